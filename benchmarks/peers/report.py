"""What came out: the rows with their ratio to kvserve, as JSON, as tables and as a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from kvclient.planes.base import PLANES
from kvserve.bench.plot import Chart, Row
from kvserve.bench.report import CaseReport, mib, summarise, unit_json
from kvserve.bench.rounds import Case, Sample
from kvserve.bench.unit import WorkUnit

_OURS = "kvserve_stream_"
_TITLES = (
    *("GB/s\nmedian", "\nbest", "layer 0\nms", "of\nkvserve", "of TCP\nloop", "of\nmemcpy"),
    *("client\nCPU s/GiB", "server\nCPU s/GiB"),
)


@dataclass(frozen=True, slots=True)
class Present:
    """A peer that ran. `idle_cores`: what client and server used while nobody asked anything."""

    name: str
    title: str
    plane: str
    packages: list[str]
    version: str
    idle_cores: float


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer, or one way of it, without figures, and why."""

    name: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One case beside kvserve's single request on the same plane; a ceiling has no plane.

    `of_kvserve`: its median over kvserve's.
    `last_over_first`: kvserve's rows only, the median of the runs that ended the rounds over the
    median of those that began them; far from 1, the machine was not quiet.
    """

    case: CaseReport
    plane: str
    of_kvserve: float | None
    last_over_first: float | None


@dataclass(frozen=True, slots=True)
class PeersReport:
    unit: WorkUnit
    repeats: int
    machine: dict[str, Any]
    rows: list[PeerRow]
    present: list[Present]
    absent: list[Absent]

    @classmethod
    def of(
        cls,
        cases: Sequence[Case],
        samples: Mapping[str, list[Sample]],
        *,
        unit: WorkUnit,
        repeats: int,
        machine: dict[str, Any],
        planes: Mapping[str, str],
        present: list[Present],
        absent: list[Absent],
    ) -> Self:
        """`planes`: of each case by its name. kvserve's cases ran twice a round, first and last."""
        taken = {case.name: samples[case.name] for case in cases}
        reports = {row.name: row for row in summarise(cases, taken, unit.size_bytes)}
        rows = []
        for name, case in reports.items():
            plane = planes.get(name, "")
            ours = reports[_OURS + plane].gb_per_s_median if plane else None
            rows.append(
                PeerRow(
                    case=case,
                    plane=plane,
                    of_kvserve=None if ours is None else case.gb_per_s_median / ours,
                    last_over_first=_drift(case) if name.startswith("kvserve_") else None,
                )
            )
        # By plane, kvserve first in each (sorting keeps the order), the ceilings at the end.
        order = [*PLANES, ""]
        rows.sort(key=lambda row: (order.index(row.plane), row.last_over_first is None))
        return cls(unit, repeats, machine, rows, present, absent)

    def to_json(self) -> dict[str, Any]:
        return {"benchmark": "peers", **asdict(self), "unit": unit_json(self.unit)}


def _drift(case: CaseReport) -> float:
    """Runs alternate: one at the start of a round, one at its end."""
    return median(case.gb_per_s[1::2]) / median(case.gb_per_s[::2])


def print_peers(console: Console, report: PeersReport) -> None:
    unit, facts = report.unit, report.machine
    console.print(
        f"peers: {unit.chunk_count} chunks x {unit.layer_count} layers x {unit.slice_size_bytes} "
        f"bytes = {mib(unit.size_bytes)}, {report.repeats} rounds",
        style="bold",
    )
    console.print(
        f"{facts['cpu']} x{facts['cpu_count']}, {facts['file_system']}, Python {facts['python']}, "
        f"load average {facts['load_average_1m']:.2f}",
        style="dim",
        markup=False,
    )
    for plane in (*PLANES, ""):
        console.print(
            _table(plane or "ceilings", [row for row in report.rows if row.plane == plane])
        )
    for row in report.rows:
        if row.last_over_first is not None:
            console.print(f"{row.case.label}: last of a round over first {row.last_over_first:.2f}")
    for peer in report.present:
        made_of = ", ".join(filter(None, (peer.version, *peer.packages[:2])))
        console.print(f"{peer.title}: {made_of}; idle {peer.idle_cores:.2f} cores", markup=False)
    for missing in report.absent:
        console.print(f"no figures  {missing.title}: {missing.reason}", style="red", markup=False)


def _table(title: str, rows: Sequence[PeerRow]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(title, no_wrap=True, min_width=30)
    for column in _TITLES:
        table.add_column(column, justify="right")
    for row in rows:
        case = row.case
        ratios = (row.of_kvserve, case.ratios.get("tcp_constant"), case.ratios.get("memcpy"))
        table.add_row(
            case.label,
            f"{case.gb_per_s_median:.2f}",
            f"{case.gb_per_s_best:.2f}",
            f"{case.first_layer_ms_median:.2f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{case.client.cpu_s_a_gib:.3f}",
            "" if case.server is None else f"{case.server.cpu_s_a_gib:.3f}",
            style="" if row.last_over_first is None else "bold",
        )
    return table


def peers_chart(report: PeersReport) -> Chart:
    unit = report.unit
    return Chart(
        title=f"kvserve and peers: {unit.chunk_count} chunks x {unit.layer_count} layers "
        f"x {unit.slice_size_bytes / 1024:g} KiB",
        axis="GB/s (10⁹ bytes a second), more is better",
        legend=f"bar: median of {report.repeats} rounds; tick: best; by kvserve's planes",
        rows=[
            Row(
                f"{row.plane}: {row.case.label}" if row.plane else row.case.label,
                row.case.gb_per_s_median,
                row.case.gb_per_s_best,
                row.last_over_first is not None,
            )
            for row in report.rows
        ],
    )
