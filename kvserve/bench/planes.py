"""`kvserve bench planes`: one prefix from page cache into a region, over each plane.

Beside them, what a bare loop of Python does: the same reads from the same files and the same sends
over one TCP connection, and constant bytes over the same. Without NIXL its plane is left out.
"""

from contextlib import AsyncExitStack

from kvclient import AsyncClient, Region, SharedRegion
from kvclient.planes.base import PLANES
from kvserve import nixl_agent
from kvserve.bench.fetch import FetchByLayer, FetchStream, check_bytes
from kvserve.bench.report import TransferReport, machine, ratio_bar, summarise
from kvserve.bench.rounds import WARM_UPS, Case, Step, run_rounds, step_count
from kvserve.bench.tcp_ceiling import TcpRead, tcp_ceiling_server
from kvserve.bench.workspace import Settings, Workspace, touched
from kvserve.store.locations import ChunkLocations

RATIO_MIN = 0.85
_SERIES = 0
_MEASURED = [plane for plane in PLANES if plane != "nixl" or nixl_agent.is_installed()]
_CASES, _OTHER_STEPS = 2 * len(_MEASURED) + 2, 2 * len(_MEASURED) + 1


def steps(settings: Settings) -> int:
    """How often `bench_planes` calls `step`."""
    return _OTHER_STEPS + step_count(_CASES, repeats=settings.repeats, warm_ups=WARM_UPS)


async def bench_planes(settings: Settings, step: Step) -> TransferReport:
    """Stores the chunks, checks the bytes of each plane, then measures all cases in rounds."""
    unit = settings.unit
    async with AsyncExitStack() as stack:
        space = stack.enter_context(Workspace(settings.root))
        facts = machine(space.directory)
        step("storing the chunks")
        await space.store_series([(unit, _SERIES)])
        settings_of_nixl = ("server.nixl=true",) if "nixl" in _MEASURED else ()
        server = stack.enter_context(space.server(settings_of_nixl))
        region = touched(unit.size_bytes)
        shared = SharedRegion(unit.size_bytes)
        shared.view[:] = region
        whole: list[Case] = []
        by_layer: list[Case] = []
        for plane in _MEASURED:
            client = await stack.enter_async_context(AsyncClient(server.address, plane=plane))
            into = shared if plane == "shm" else Region(region)
            stream = FetchStream(client, unit, _SERIES, region=into, pid=server.pid)
            layers = FetchByLayer(client, unit, _SERIES, region=into, pid=server.pid, depth=1)
            for case in (stream, layers):
                case.name = f"{case.name}_{plane}"
                case.label = case.label.replace("kvserve", f"kvserve {plane}", 1)
                step(f"checking the bytes: {case.label}")
                await check_bytes(case, unit, into.view)
            whole.append(stream)
            by_layer.append(layers)
        files = ChunkLocations(str(space.chunks), unit.descriptor(_SERIES))
        bare = stack.enter_context(tcp_ceiling_server())
        ceilings = [stack.enter_context(TcpRead(bare, unit, region, of)) for of in (files, None)]
        cases = [*whole, *by_layer, *ceilings]
        samples = await run_rounds(cases, repeats=settings.repeats, warm_ups=WARM_UPS, step=step)
    rows = summarise(cases, samples, unit.size_bytes)
    return TransferReport(
        benchmark="planes",
        unit=unit,
        repeats=settings.repeats,
        machine=facts,
        cases=rows,
        server_growth=[],
        verified_cases=[case.name for case in (*whole, *by_layer)],
        bars=[ratio_bar(rows, "kvserve_stream_tcp", "tcp_files", RATIO_MIN)],
    )
