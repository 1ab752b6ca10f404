"""`kvserve bench store`: one prefix out of a region through a server into new chunk files.

Every run stores chunks that the server has never seen; they are deleted outside the clock.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from time import perf_counter

from kvclient import AsyncClient, Descriptor, Region, StoreHandle
from kvserve.bench.ceilings import Memcpy, PageCacheWrite
from kvserve.bench.grpc_ceiling import CeilingClient, GrpcWrite, ceiling_server
from kvserve.bench.probe import PAYLOAD_FACTOR, rise_max_bytes, server_growth
from kvserve.bench.report import (
    ServerGrowth,
    TransferReport,
    growth_bar,
    machine,
    ratio_bar,
    summarise,
)
from kvserve.bench.rounds import WARM_UPS, Case, Step, Timing, run_rounds, step_count
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import (
    Settings,
    Workspace,
    empty_files,
    settings_for,
    touched,
    touched_region,
)
from kvserve.errors import ServerFault
from kvserve.format.chunk_file import ChunkGeometry

RATIO_MIN = 0.60
_BYTES_SERIES = 0
_CASES, _OTHER_STEPS = 4, 3


class StoreStream(Case):
    """The product: one request, layer after layer, acknowledged when all chunks are published."""

    name = "kvserve_stream"
    label = "kvserve, 1 request"
    is_ceiling = False
    requests = 1

    def __init__(
        self, client: AsyncClient, unit: WorkUnit, *, source: Region, pid: int, root: Path
    ) -> None:
        self._root = root
        self._client = client
        self._unit = unit
        self._source = source
        self._series = count(1)
        self.server_pid = pid
        self.descriptor: Descriptor = unit.descriptor(_BYTES_SERIES)

    async def prepare(self) -> None:
        self.descriptor = self._unit.descriptor(next(self._series))

    async def run(self) -> Timing:
        first, *others = self.descriptor.layer_order
        started = perf_counter()
        async with self._client.store(self.descriptor, self._source) as handle:
            await handle.store_layer(first)
            first_layer_at = asyncio.create_task(_stored_at(handle, first))
            for layer_index in others:
                await handle.store_layer(layer_index)
            result = await handle.finish()
            took_s = perf_counter() - started
            first_layer_s = await first_layer_at - started
        if not result.is_whole:
            raise ServerFault(f"the chunks were not stored: {result.verdicts}")
        return Timing(took_s, first_layer_s)

    async def clean_up(self) -> None:
        await asyncio.to_thread(empty_files, self._root)


async def _stored_at(handle: StoreHandle, layer_index: int) -> float:
    await handle.layer(layer_index)
    return perf_counter()


def steps(settings: Settings) -> int:
    """How often `bench_store` calls `step`."""
    return _OTHER_STEPS + step_count(_CASES, repeats=settings.repeats, warm_ups=WARM_UPS)


async def bench_store(settings: Settings, step: Step) -> TransferReport:
    """Probes memory, checks the bytes, then measures all cases in rounds."""
    unit = settings.unit
    async with AsyncExitStack() as stack:
        space = stack.enter_context(Workspace(settings.root))
        facts = machine(space.directory)
        step("server memory")
        growth = await _growth(space, unit, settings.plane)
        step("server memory, large payload")
        large = unit.with_chunks(PAYLOAD_FACTOR * unit.chunk_count)
        growth += await _growth(space, large, settings.plane)
        space.make_fan_dirs(unit)
        server = stack.enter_context(space.server(settings_for([settings.plane])))
        client = AsyncClient(server.address, plane=settings.plane)
        await stack.enter_async_context(client)
        bare = stack.enter_context(ceiling_server())
        bare_client = await stack.enter_async_context(CeilingClient(bare))
        region = touched_region(unit.size_bytes, settings.plane)
        source = region.view
        unit.fill(source, _BYTES_SERIES)
        ours = StoreStream(client, unit, source=region, pid=server.pid, root=space.chunks)
        step("checking the bytes")
        await _check_bytes(ours, client, unit)
        geometry = ChunkGeometry(ours.descriptor.key(0))
        cases = [
            ours,
            GrpcWrite(bare_client, unit),
            PageCacheWrite(unit, source, geometry, space.directory / "ceiling"),
            Memcpy(unit, touched(unit.size_bytes)),
        ]
        samples = await run_rounds(cases, repeats=settings.repeats, warm_ups=WARM_UPS, step=step)
    rows = summarise(cases, samples, unit.size_bytes)
    return TransferReport(
        benchmark="store",
        unit=unit,
        repeats=settings.repeats,
        machine=facts,
        cases=rows,
        server_growth=growth,
        verified_cases=[ours.name],
        bars=[
            ratio_bar(rows, ours.name, GrpcWrite.name, RATIO_MIN),
            growth_bar(growth, ours.name, rise_max_bytes()),
        ],
    )


async def _growth(space: Workspace, unit: WorkUnit, plane: str) -> list[ServerGrowth]:
    """Of kvserve and of the bare stream; both connections are there before memory is read."""
    source = touched_region(unit.size_bytes, plane)
    with space.server(settings_for([plane])) as server, ceiling_server() as bare:
        async with (
            AsyncClient(server.address, plane=plane) as client,
            CeilingClient(bare) as bare_client,
        ):
            await client.lookup(unit.descriptor(_BYTES_SERIES))
            await bare_client.echo(b"")
            ours = StoreStream(client, unit, source=source, pid=server.pid, root=space.chunks)
            ceiling = GrpcWrite(bare_client, unit)
            return [await server_growth(case, unit.size_bytes) for case in (ours, ceiling)]


async def _check_bytes(case: StoreStream, client: AsyncClient, unit: WorkUnit) -> None:
    """Stores once, fetches it back and compares with the source."""
    await case.prepare()
    await case.run()
    try:
        region = touched_region(unit.size_bytes, client.plane)
        async with client.fetch(case.descriptor, region) as handle:
            await handle.wait()
        wrong = unit.first_wrong_layer(region.view, _BYTES_SERIES)
        if wrong is not None:
            raise ServerFault(f"layer {wrong} is not what was stored")
    finally:
        await case.clean_up()
