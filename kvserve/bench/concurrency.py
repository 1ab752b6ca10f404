"""`kvserve bench concurrency`: the same server under 1, 4, 16 and 64 clients, over several planes.

The clients, each with a connection of its own, are spread over two processes and fetch prefixes
from page cache without pause; counted is what lands within a fixed time. Beside them, in the same
rounds, a bare loop over TCP under as many clients: a thread for each of them on both sides.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from kvclient.planes.base import PLANES
from kvserve.bench.child import Child
from kvserve.bench.crowd import BARE, STOP, Start, crowd_process, measure
from kvserve.bench.measure import Meter
from kvserve.bench.report import Bar, machine, unit_json
from kvserve.bench.rounds import Step
from kvserve.bench.tcp_ceiling import tcp_ceiling_server
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Settings, Workspace, settings_for
from kvserve.errors import ServerFault
from kvserve.testing.server_process import ServerProcess

OF_PEAK_MIN = 0.85
SLOWEST_OF_FASTEST_MIN = 0.5
UNIT = WorkUnit(16, 16, 64 << 10)
PROCESSES = 2
"""Over which the clients are spread."""
_SERIES = 8
DEFAULT_PLANES = tuple(it for it in PLANES if it != "nixl")
_ANSWER_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """`common.unit` is what each client fetches; each count of `workers` is another server."""

    common: Settings
    clients: tuple[int, ...]
    workers: tuple[int, ...]
    seconds: float
    planes: tuple[str, ...] = DEFAULT_PLANES


@dataclass(frozen=True, slots=True)
class CrowdReport:
    """One way under so many clients. `slowest_of_fastest`: the least of the rounds.

    `of_peak`: this median over the greatest of its way; `of_fewest_workers`: over that of the same
    plane and clients with the fewest workers. Memory is that of all server processes together;
    `server_cores`, `client_cores`: how many were busy with them.
    """

    name: str
    label: str
    plane: str
    workers: int
    clients: int
    is_ceiling: bool
    gb_per_s: list[float]
    gb_per_s_median: float
    gb_per_s_best: float
    of_peak: float
    of_fewest_workers: float
    slowest_of_fastest: float
    server_cpu_s_a_gib: float
    client_cpu_s_a_gib: float
    server_cores: float
    client_cores: float
    server_peak_bytes: int


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """`kvserve bench concurrency`. `scaling`: in words, what more workers brought, and what was
    left of the machine to bring more."""

    benchmark: str
    unit: WorkUnit
    repeats: int
    seconds: float
    processes: int
    machine: dict[str, Any]
    rows: list[CrowdReport]
    scaling: list[str]
    bars: list[Bar]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "unit": unit_json(self.unit)}


@dataclass(frozen=True, slots=True)
class _Window:
    """One measurement."""

    gb_per_s: float
    slowest_of_fastest: float
    server_cores: float
    client_cores: float
    server_peak_bytes: int


@dataclass(frozen=True, slots=True)
class _Way:
    """A server and how clients reach it; `windows` by number of clients."""

    plane: str
    workers: int
    address: str
    pids: Sequence[int]
    windows: dict[int, list[_Window]] = field(default_factory=dict)

    def label(self, clients: int, *, says_workers: bool) -> str:
        server = "bare TCP" if self.plane == BARE else f"kvserve {self.plane}"
        if says_workers and self.plane != BARE:
            server = f"{self.plane}, {_counted(self.workers, 'worker')}"
        return f"{server}, {_counted(clients, 'client')}"


def steps(settings: ConcurrencySettings) -> int:
    """How often `bench_concurrency` calls `step`."""
    ways = len(settings.workers) * len(settings.planes) + 1
    return 2 + ways * len(settings.clients) * settings.common.repeats


async def bench_concurrency(settings: ConcurrencySettings, step: Step) -> ConcurrencyReport:
    """Stores the chunks, starts a server for each number of workers on them, then measures all
    ways under all numbers of clients."""
    common = settings.common
    clients_max = -(-max(settings.clients) // PROCESSES)
    async with AsyncExitStack() as stack:
        step("storing the chunks")
        space = stack.enter_context(Workspace(common.root))
        await space.store_series([(common.unit, series) for series in range(_SERIES)])
        ways: list[_Way] = []
        for workers in settings.workers:
            # A name of its own, since a server's log and address lie beside its root.
            root = space.directory / f"chunks-{workers}"
            root.symlink_to(space.chunks)
            of_server = (f"server.workers={workers}", *settings_for(settings.planes))
            server = stack.enter_context(ServerProcess(root, settings=of_server))
            pids = server.serving_pids
            ways += [_Way(it, workers, server.address, pids) for it in settings.planes]
        bare = stack.enter_context(tcp_ceiling_server())
        ways.append(_Way(BARE, 1, f"127.0.0.1:{bare.hello['port']}", [bare.pid]))
        facts = machine(space.directory)
        step("making the clients' regions")
        crowds = [
            stack.enter_context(crowd_process(common.unit, space.chunks, clients_max))
            for _ in range(PROCESSES)
        ]
        for number in range(1, common.repeats + 1):
            for way in ways:
                for clients in settings.clients:
                    label = way.label(clients, says_workers=len(settings.workers) > 1)
                    step(f"round {number}/{common.repeats}: {label}")
                    window = _measure(way, crowds, clients, settings.seconds)
                    way.windows.setdefault(clients, []).append(window)
    rows = [row for way in ways for row in _rows(way, ways, settings)]
    return ConcurrencyReport(
        benchmark="concurrency",
        unit=common.unit,
        repeats=common.repeats,
        seconds=settings.seconds,
        processes=PROCESSES,
        machine=facts,
        rows=rows,
        scaling=scaling(rows, facts["cpu_count"]),
        bars=crowd_bars(rows),
    )


def _measure(way: _Way, crowds: Sequence[Child], clients: int, seconds: float) -> _Window:
    """Starts the clients, lets them run, stops them."""
    parts = [range(clients)[first::PROCESSES] for first in range(PROCESSES)]
    busy = [(crowd, part) for crowd, part in zip(crowds, parts, strict=True) if part]
    for crowd, part in busy:
        series = [client % _SERIES for client in part]
        crowd.tell(Start(way.address, way.plane, series).question())
    for crowd, _ in busy:
        crowd.answer(_ANSWER_S_MAX)
    servers, clients_ = [Meter(pid) for pid in way.pids], [Meter(crowd.pid) for crowd, _ in busy]
    for meter in (*servers, *clients_):
        meter.start()
    for crowd, _ in busy:
        crowd.tell(measure(seconds))
    answers = [crowd.answer(_ANSWER_S_MAX) for crowd, _ in busy]
    used, used_by_clients = [it.stop() for it in servers], [it.stop() for it in clients_]
    for crowd, _ in busy:
        crowd.tell(STOP)
    for crowd, _ in busy:
        crowd.answer(_ANSWER_S_MAX)
    speeds = [landed / it["took_s"] for it in answers for landed in it["landed_bytes"]]
    took_s = fmean(it["took_s"] for it in answers)
    if not any(speeds):
        raise ServerFault(f"{way.label(clients, says_workers=True)}: nothing landed in {took_s} s")
    return _Window(
        gb_per_s=sum(speeds) / 1e9,
        slowest_of_fastest=min(speeds) / max(speeds),
        server_cores=sum(it.cpu_s for it in used) / took_s,
        client_cores=sum(it.cpu_s for it in used_by_clients) / took_s,
        server_peak_bytes=sum(it.peak_bytes for it in used),
    )


def _rows(way: _Way, ways: Sequence[_Way], settings: ConcurrencySettings) -> Iterator[CrowdReport]:
    peak = max(_median(way, clients) for clients in way.windows)
    fewest = next(it for it in ways if it.plane == way.plane)
    for clients, windows in way.windows.items():
        typical = _median(way, clients)
        yield CrowdReport(
            name=f"{way.plane}_{way.workers}_workers_{clients}_clients",
            label=way.label(clients, says_workers=len(settings.workers) > 1),
            plane=way.plane,
            workers=way.workers,
            clients=clients,
            is_ceiling=way.plane == BARE,
            gb_per_s=[it.gb_per_s for it in windows],
            gb_per_s_median=typical,
            gb_per_s_best=max(it.gb_per_s for it in windows),
            of_peak=typical / peak,
            of_fewest_workers=typical / _median(fewest, clients),
            slowest_of_fastest=min(it.slowest_of_fastest for it in windows),
            server_cpu_s_a_gib=_a_gib(it.server_cores / it.gb_per_s for it in windows),
            client_cpu_s_a_gib=_a_gib(it.client_cores / it.gb_per_s for it in windows),
            server_cores=fmean(it.server_cores for it in windows),
            client_cores=fmean(it.client_cores for it in windows),
            server_peak_bytes=max(it.server_peak_bytes for it in windows),
        )


def _median(way: _Way, clients: int) -> float:
    return median(it.gb_per_s for it in way.windows[clients])


def _a_gib(cpu_s_a_gb: Iterable[float]) -> float:
    return fmean(cpu_s_a_gb) * (1 << 30) / 1e9


def scaling(rows: Sequence[CrowdReport], cpu_count: int) -> list[str]:
    """For each plane, every number of workers against the fewest, each at its peak."""
    peaks: dict[str, dict[int, CrowdReport]] = {}
    for row in rows:
        of_plane = peaks.setdefault(row.plane, {})
        if row.of_peak == 1.0:
            of_plane.setdefault(row.workers, row)
    lines = []
    for plane, by_workers in peaks.items():
        fewest = by_workers[min(by_workers)]
        busy = fewest.server_cores + fewest.client_cores
        lines += [
            f"{plane}: {_counted(workers, 'worker')} at best {row.gb_per_s_median:.2f} GB/s, "
            f"{row.gb_per_s_median / fewest.gb_per_s_median:.2f} of "
            f"{_counted(fewest.workers, 'worker')}, where {busy:.2f} of {cpu_count} cores were "
            f"busy: {fewest.server_cores:.2f} with the server, {fewest.client_cores:.2f} with "
            "the clients"
            for workers, row in by_workers.items()
            if row is not fewest
        ]
    return lines


def crowd_bars(rows: Sequence[CrowdReport]) -> list[Bar]:
    """For each plane and number of workers: more clients than at the peak cost little, and no
    client starves."""
    ours: dict[str, list[CrowdReport]] = {}
    for row in rows:
        if not row.is_ceiling:
            name = f"{row.plane}, {_counted(row.workers, 'worker')}"
            ours.setdefault(name, []).append(row)
    bars = []
    for name, of_way in ours.items():
        peak = max(of_way, key=lambda row: row.gb_per_s_median)
        beyond = [row for row in of_way if row.clients >= peak.clients]
        least = min(beyond, key=lambda row: row.of_peak)
        unfair = min(of_way, key=lambda row: row.slowest_of_fastest)
        throughput = (
            f"{least.of_peak:.2f} of its peak ({_counted(peak.clients, 'client')}) with "
            f"{_counted(least.clients, 'client')}, at least {OF_PEAK_MIN:.2f}"
        )
        fairness = (
            f"the slowest has {unfair.slowest_of_fastest:.2f} of the fastest with "
            f"{_counted(unfair.clients, 'client')}, at least {SLOWEST_OF_FASTEST_MIN:.2f}"
        )
        is_fair = unfair.slowest_of_fastest >= SLOWEST_OF_FASTEST_MIN
        bars += [
            Bar(f"{name}: throughput", throughput, least.of_peak >= OF_PEAK_MIN),
            Bar(f"{name}: clients", fairness, is_fair),
        ]
    return bars


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
