"""`kvserve bench lookup`: how long a lookup takes while the server is busy with fetches.

One client, one lookup after the other, first on an idle server, then while fetches run without
pause in other processes. A bare unary call to another process, interleaved with the lookups, shows
how much of the tail is the machine's and grpcio's own.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from kvclient import AsyncClient
from kvserve.bench.child import Child
from kvserve.bench.grpc_ceiling import CeilingClient, ceiling_server
from kvserve.bench.latency import Latency, latency, timed
from kvserve.bench.load import load_process
from kvserve.bench.measure import Meter
from kvserve.bench.report import Bar, machine, unit_json
from kvserve.bench.rounds import Step
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Settings, Workspace
from kvserve.errors import ServerFault

P99_MS_MAX = 5.0
FETCHES_AT_ONCE = 8
_SERIES, _FIRST_LOAD_SERIES = 0, 1
_STEPS_A_PHASE = 20
_PHASE_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The fetches while the lookups ran; `fetches` counts those that ended."""

    processes: int
    fetches_at_once: int
    fetch_size_bytes: int
    fetches: int
    took_s: float
    gb_per_s: float
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class LookupReport:
    """`kvserve bench lookup`."""

    benchmark: str
    unit: WorkUnit
    lookups: int
    machine: dict[str, Any]
    latencies: list[Latency]
    load: LoadReport
    bars: list[Bar]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "unit": unit_json(self.unit)}


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """`processes`: over how many the fetches of the load are spread."""

    common: Settings
    lookups: int
    processes: int


def steps() -> int:
    """How often `bench_lookup` calls `step`."""
    return 3 + 2 * _STEPS_A_PHASE


async def bench_lookup(settings: LookupSettings, step: Step) -> LookupReport:
    """Stores the chunks, measures lookups on the idle server, then under load."""
    unit = settings.common.unit
    load_unit = unit.with_chunks(unit.chunk_count // 2)
    load_series = range(_FIRST_LOAD_SERIES, _FIRST_LOAD_SERIES + FETCHES_AT_ONCE)
    async with AsyncExitStack() as stack:
        space = stack.enter_context(Workspace(settings.common.root))
        facts = machine(space.directory)
        step("storing the chunks")
        await space.store_series([(unit, _SERIES), *((load_unit, s) for s in load_series)])
        server = stack.enter_context(space.server())
        bare = stack.enter_context(ceiling_server())
        client = await stack.enter_async_context(AsyncClient(server.address))
        bare_client = await stack.enter_async_context(CeilingClient(bare))
        calls = _Calls(client, bare_client, unit)
        step("warm-up")
        await calls.measure(max(1, settings.lookups // 10), "warm-up", _silent)
        idle = await calls.measure(settings.lookups, "idle", step)
        step("starting the load")
        children = [
            stack.enter_context(load_process(server.address, load_unit, part))
            for part in _spread(load_series, settings.processes)
        ]
        meter = Meter(server.pid)
        meter.start()
        before, started = _landed(children), perf_counter()
        busy = await calls.measure(settings.lookups, "under load", step)
        after, took_s = _landed(children), perf_counter() - started
        load = LoadReport(
            processes=len(children),
            fetches_at_once=FETCHES_AT_ONCE,
            fetch_size_bytes=load_unit.size_bytes,
            fetches=after[1] - before[1],
            took_s=took_s,
            gb_per_s=(after[0] - before[0]) / took_s / 1e9,
            server_cpu_s=meter.stop().cpu_s,
        )
        return LookupReport(
            benchmark="lookup",
            unit=unit,
            lookups=settings.lookups,
            machine=facts,
            latencies=[*idle, *busy],
            load=load,
            bars=[_bar(busy[0])],
        )


class _Calls:
    """The two kinds of call, measured in turn."""

    def __init__(self, client: AsyncClient, bare: CeilingClient, unit: WorkUnit) -> None:
        self._client = client
        self._bare = bare
        self._descriptor = unit.descriptor(_SERIES)
        # As many bytes as a lookup sends: the hashes.
        self._echo = b"".join(self._descriptor.chunk_hashes)

    async def measure(self, count: int, phase: str, step: Step) -> list[Latency]:
        """The lookups first. Ends early, with fewer calls, when the phase takes too long."""
        lookups: list[float] = []
        echoes: list[float] = []
        deadline = perf_counter() + _PHASE_S_MAX
        for part in range(_STEPS_A_PHASE):
            step(f"{phase}: {len(lookups)}/{count} lookups")
            for _ in range(count * part // _STEPS_A_PHASE, count * (part + 1) // _STEPS_A_PHASE):
                if lookups and perf_counter() > deadline:
                    break
                lookups.append(await timed(self._lookup))
                echoes.append(await timed(self._call_bare))
        name = phase.replace(" ", "_")
        return [
            latency(f"lookup_{name}", f"lookup, {phase}", lookups),
            latency(f"grpc_unary_{name}", f"bare grpcio call, {phase}", echoes),
        ]

    async def _lookup(self) -> None:
        presence = await self._client.lookup(self._descriptor)
        if presence.prefix_chunks != self._descriptor.chunk_count:
            raise ServerFault(f"only {presence.prefix_chunks} chunks were found")

    async def _call_bare(self) -> None:
        await self._bare.echo(self._echo)


def _bar(under_load: Latency) -> Bar:
    figure = f"p99 {under_load.p99_ms:.2f} ms, below {P99_MS_MAX:.2f} ms"
    return Bar("lookup latency under load", figure, under_load.p99_ms < P99_MS_MAX)


def _spread(series: range, processes: int) -> list[range]:
    """Consecutive parts of nearly one size, none empty."""
    parts = min(processes, len(series))
    cuts = [len(series) * part // parts for part in range(parts + 1)]
    return [series[cuts[part] : cuts[part + 1]] for part in range(parts)]


def _landed(children: Sequence[Child]) -> tuple[int, int]:
    answers = [child.ask("landed") for child in children]
    return sum(a["payload_bytes"] for a in answers), sum(a["fetches"] for a in answers)


def _silent(_: str) -> None:
    pass
