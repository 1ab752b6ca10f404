"""`kvserve bench fetch`: one prefix from page cache through a server into a region.

Rows of kvserve: the whole prefix with one request, and one request for each layer, once one after
the other and once with the next already posted (what an engine does that decides layer by layer).
"""

from collections import deque
from contextlib import AsyncExitStack
from time import perf_counter

from kvclient import AsyncClient, FetchHandle, FetchResult, Region
from kvserve.bench.ceilings import Memcpy, PageCacheRead
from kvserve.bench.grpc_ceiling import CeilingClient, GrpcRead, ceiling_server
from kvserve.bench.probe import PAYLOAD_FACTOR, rise_max_bytes, server_growth
from kvserve.bench.report import (
    ServerGrowth,
    TransferReport,
    growth_bar,
    machine,
    ratio_bar,
    summarise,
)
from kvserve.bench.rounds import WARM_UPS, Case, Step, Timing, run_once, run_rounds, step_count
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Settings, Workspace, settings_for, touched_region
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations

RATIO_MIN = 0.80
_SERIES, _LARGE_SERIES = 0, 1
_CASES, _OTHER_STEPS = 6, 6


class FetchStream(Case):
    """The product: all layers with one request, an event for each layer."""

    name = "kvserve_stream"
    label = "kvserve, 1 request"
    is_ceiling = False
    requests = 1

    def __init__(
        self,
        client: AsyncClient,
        unit: WorkUnit,
        series: int,
        *,
        region: Region,
        pid: int,
    ) -> None:
        self._client = client
        self._descriptor = unit.descriptor(series)
        self._region = region
        self.server_pid = pid

    async def run(self) -> Timing:
        started = perf_counter()
        first_layer_s = 0.0
        async with self._client.fetch(self._descriptor, self._region) as handle:
            async for _ in handle.layers():
                first_layer_s = first_layer_s or perf_counter() - started
            result = await handle.wait()
        took_s = perf_counter() - started
        _check_whole(result)
        return Timing(took_s, first_layer_s)


class FetchByLayer(Case):
    """One request for each layer; `depth` of them are open at once."""

    is_ceiling = False

    def __init__(
        self,
        client: AsyncClient,
        unit: WorkUnit,
        series: int,
        *,
        region: Region,
        pid: int,
        depth: int,
    ) -> None:
        self._client = client
        self._descriptor = unit.descriptor(series)
        self._region = region
        self._depth = depth
        self.server_pid = pid
        self.requests = unit.layer_count
        way = "sequential" if depth == 1 else f"{depth} deep"
        self.name = f"kvserve_by_layer_{way.replace(' ', '_')}"
        self.label = f"kvserve, by layer, {way}"

    async def run(self) -> Timing:
        started = perf_counter()
        first_layer_s = 0.0
        open_handles: deque[FetchHandle] = deque()
        try:
            for layer_index in self._descriptor.layer_order:
                open_handles.append(
                    self._client.fetch(self._descriptor, self._region, layers=[layer_index])
                )
                if len(open_handles) == self._depth:
                    _check_whole(await open_handles[0].wait())
                    open_handles.popleft()
                    first_layer_s = first_layer_s or perf_counter() - started
            while open_handles:
                _check_whole(await open_handles[0].wait())
                open_handles.popleft()
        finally:
            for handle in open_handles:
                await handle.cancel()
        return Timing(perf_counter() - started, first_layer_s)


def steps(settings: Settings) -> int:
    """How often `bench_fetch` calls `step`."""
    return _OTHER_STEPS + step_count(_CASES, repeats=settings.repeats, warm_ups=WARM_UPS)


async def bench_fetch(settings: Settings, step: Step) -> TransferReport:
    """Stores the chunks, probes memory, checks the bytes, then measures all cases in rounds."""
    unit = settings.unit
    large = unit.with_chunks(PAYLOAD_FACTOR * unit.chunk_count)
    async with AsyncExitStack() as stack:
        space = stack.enter_context(Workspace(settings.root))
        facts = machine(space.directory)
        step("storing the chunks")
        await space.store_series([(unit, _SERIES), (large, _LARGE_SERIES)])
        step("server memory")
        growth = await _growth(space, unit, _SERIES, settings.plane)
        step("server memory, large payload")
        growth += await _growth(space, large, _LARGE_SERIES, settings.plane)
        server = stack.enter_context(space.server(settings_for([settings.plane])))
        client = AsyncClient(server.address, plane=settings.plane)
        await stack.enter_async_context(client)
        bare = stack.enter_context(ceiling_server())
        bare_client = await stack.enter_async_context(CeilingClient(bare))
        into = touched_region(unit.size_bytes, settings.plane)
        region = into.view
        ours: list[Case] = [
            FetchStream(client, unit, _SERIES, region=into, pid=server.pid),
            FetchByLayer(client, unit, _SERIES, region=into, pid=server.pid, depth=1),
            FetchByLayer(client, unit, _SERIES, region=into, pid=server.pid, depth=2),
        ]
        for case in ours:
            step(f"checking the bytes: {case.label}")
            await check_bytes(case, unit, region)
        files = ChunkLocations(str(space.chunks), unit.descriptor(_SERIES))
        page_cache = stack.enter_context(PageCacheRead(unit, region, files))
        cases = [*ours, GrpcRead(bare_client, unit), page_cache, Memcpy(unit, region)]
        samples = await run_rounds(cases, repeats=settings.repeats, warm_ups=WARM_UPS, step=step)
    rows = summarise(cases, samples, unit.size_bytes)
    return TransferReport(
        benchmark="fetch",
        unit=unit,
        repeats=settings.repeats,
        machine=facts,
        cases=rows,
        server_growth=growth,
        verified_cases=[case.name for case in ours],
        bars=[
            ratio_bar(rows, FetchStream.name, GrpcRead.name, RATIO_MIN),
            growth_bar(growth, FetchStream.name, rise_max_bytes()),
        ],
    )


async def _growth(space: Workspace, unit: WorkUnit, series: int, plane: str) -> list[ServerGrowth]:
    """Of kvserve and of the bare stream; both connections are there before memory is read."""
    region = touched_region(unit.size_bytes, plane)
    with space.server(settings_for([plane])) as server, ceiling_server() as bare:
        async with (
            AsyncClient(server.address, plane=plane) as client,
            CeilingClient(bare) as bare_client,
        ):
            await client.lookup(unit.descriptor(series))
            await bare_client.echo(b"")
            ours = FetchStream(client, unit, series, region=region, pid=server.pid)
            ceiling = GrpcRead(bare_client, unit)
            return [await server_growth(case, unit.size_bytes) for case in (ours, ceiling)]


async def check_bytes(case: Case, unit: WorkUnit, region: memoryview) -> None:
    """Fetches into scrubbed memory and compares with the source."""
    region[:] = bytes(len(region))
    await run_once(case)
    wrong = unit.first_wrong_layer(region, _SERIES)
    if wrong is not None:
        raise ServerFault(f"{case.label}: layer {wrong} is not what was stored")


def _check_whole(result: FetchResult) -> None:
    if not result.is_whole:
        missing = result.verdicts[result.prefix_chunks]
        raise ServerFault(f"chunk {result.prefix_chunks} was not fetched: {missing}")
