"""Results as plain numbers: cases, bars, and the JSON that `--json` and `--output` write."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import grpc

import kvserve
from kvserve.bench.measure import Usage, load_average
from kvserve.bench.rounds import Case, Sample
from kvserve.bench.unit import WorkUnit
from kvserve.fs import PosixFileSystem

_GB = 1e9


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process over all repeats of a case: mean CPU time, greatest peak and growth.

    `cpu_s_a_gib`: the same CPU time for a GiB of payload.
    """

    cpu_s_mean: float
    cpu_s_a_gib: float
    peak_bytes: int
    growth_bytes: int


@dataclass(frozen=True, slots=True)
class CaseReport:
    """One row. `ratios`: this median over the median of each ceiling, by the ceiling's name."""

    name: str
    label: str
    is_ceiling: bool
    requests: int
    gb_per_s_median: float
    gb_per_s_best: float
    gb_per_s: list[float]
    first_layer_ms_median: float
    client: ProcessReport
    server: ProcessReport | None
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach. `figure` says it in words, with its unit."""

    name: str
    figure: str
    passed: bool


@dataclass(frozen=True, slots=True)
class ServerGrowth:
    """How far a fresh server's peak rose above its rest during one transfer of a case."""

    name: str
    label: str
    payload_bytes: int
    growth_bytes: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """`kvserve bench fetch`, `store` and `planes`."""

    benchmark: str
    unit: WorkUnit
    repeats: int
    machine: dict[str, Any]
    cases: list[CaseReport]
    server_growth: list[ServerGrowth]
    verified_cases: list[str]
    bars: list[Bar]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "unit": unit_json(self.unit)}


def unit_json(unit: WorkUnit) -> dict[str, int]:
    return {**asdict(unit), "size_bytes": unit.size_bytes}


def summarise(
    cases: Sequence[Case], samples: Mapping[str, list[Sample]], size_bytes: int
) -> list[CaseReport]:
    """One row for each case, in order, ratios included."""
    medians = {
        name: median(size_bytes / sample.timing.took_s / _GB for sample in taken)
        for name, taken in samples.items()
    }
    return [
        _summarise_case(case, samples[case.name], size_bytes, _ratios(cases, case, medians))
        for case in cases
    ]


def _ratios(cases: Sequence[Case], case: Case, medians: Mapping[str, float]) -> dict[str, float]:
    ceilings = [other.name for other in cases if other.is_ceiling and other is not case]
    return {name: medians[case.name] / medians[name] for name in ceilings}


def _summarise_case(
    case: Case, samples: Sequence[Sample], size_bytes: int, ratios: dict[str, float]
) -> CaseReport:
    speeds = [size_bytes / sample.timing.took_s / _GB for sample in samples]
    on_server = [sample.server for sample in samples if sample.server is not None]
    return CaseReport(
        name=case.name,
        label=case.label,
        is_ceiling=case.is_ceiling,
        requests=case.requests,
        gb_per_s_median=median(speeds),
        gb_per_s_best=max(speeds),
        gb_per_s=speeds,
        first_layer_ms_median=1e3 * median(s.timing.first_layer_s for s in samples),
        client=_summarise_process([sample.client for sample in samples], size_bytes),
        server=_summarise_process(on_server, size_bytes) if on_server else None,
        ratios=ratios,
    )


def _summarise_process(usages: Sequence[Usage], size_bytes: int) -> ProcessReport:
    cpu_s = fmean(usage.cpu_s for usage in usages)
    return ProcessReport(
        cpu_s_mean=cpu_s,
        cpu_s_a_gib=cpu_s * (1 << 30) / size_bytes,
        peak_bytes=max(usage.peak_bytes for usage in usages),
        growth_bytes=max(usage.growth_bytes for usage in usages),
    )


def ratio_bar(cases: Sequence[CaseReport], name: str, ceiling: str, ratio_min: float) -> Bar:
    """Passed if the median of `name` is at least `ratio_min` of the ceiling's."""
    case = next(case for case in cases if case.name == name)
    ratio = case.ratios[ceiling]
    against = next(case.label for case in cases if case.name == ceiling)
    figure = f"{ratio:.2f} of {against}, at least {ratio_min:.2f}"
    return Bar(f"{name} speed", figure, ratio >= ratio_min)


def first_layer_bar(cases: Sequence[CaseReport], name: str, ceiling: str, ms_max: float) -> Bar:
    """Passed if the first layer was whole within `ms_max` or twice the ceiling's time."""
    took_ms = next(case.first_layer_ms_median for case in cases if case.name == name)
    against = next(case for case in cases if case.name == ceiling)
    twice_ms = 2 * against.first_layer_ms_median
    figure = (
        f"{took_ms:.2f} ms, at most {ms_max:.2f} ms or {twice_ms:.2f} ms, "
        f"twice that of {against.label}"
    )
    return Bar(f"{name} first layer", figure, took_ms <= max(ms_max, twice_ms))


def growth_bar(growth: Sequence[ServerGrowth], name: str, rise_max_bytes: int) -> Bar:
    """Passed if the larger payload cost the server at most `rise_max_bytes` more than the smaller.

    Memory that follows the payload would cost it the difference of the payloads.
    """
    small, large = (row for row in growth if row.name == name)
    rise_bytes = large.growth_bytes - small.growth_bytes
    figure = (
        f"{mib(small.growth_bytes)} for {mib(small.payload_bytes)} of payload, "
        f"{mib(large.growth_bytes)} for {mib(large.payload_bytes)}; "
        f"{mib(rise_bytes)} more, at most {mib(rise_max_bytes)}"
    )
    return Bar("server memory growth", figure, rise_bytes <= rise_max_bytes)


def mib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def machine(root: Path) -> dict[str, Any]:
    """What somebody must know to read the figures; nothing that names the host."""
    cpu_info = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    model = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.M)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cpu_count": os.cpu_count(),
        "file_system": PosixFileSystem().kind(str(root)),
        "load_average_1m": load_average(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "kvserve": kvserve.__version__,
    }
