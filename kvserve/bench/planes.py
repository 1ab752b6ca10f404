"""`kvserve bench planes`: one prefix from page cache into a region, over each plane.

Beside them, for each plane what a bare loop of Python does: the same reads from the same files and
the same way to the client, and nothing else. And what its transport does alone, with constant
bytes. All that needs NIXL is left out where it is not installed.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kvclient import AsyncClient, Region, SharedRegion
from kvclient.planes.base import PLANES
from kvserve import nixl_agent
from kvserve.bench.ceilings import Memcpy
from kvserve.bench.fetch import FetchByLayer, FetchStream, check_bytes
from kvserve.bench.grpc_ceiling import CeilingClient, GrpcRead, ceiling_server
from kvserve.bench.grpc_files import GrpcReadFiles
from kvserve.bench.nixl_ceiling import NixlRead, nixl_ceiling_server
from kvserve.bench.report import (
    Bar,
    CaseReport,
    TransferReport,
    first_layer_bar,
    machine,
    ratio_bar,
    summarise,
)
from kvserve.bench.rounds import WARM_UPS, Case, Step, run_rounds, step_count
from kvserve.bench.shm_ceiling import ShmRead, shm_ceiling_server
from kvserve.bench.tcp_ceiling import TcpRead, tcp_ceiling_server
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Settings, Workspace, settings_for, touched
from kvserve.store.locations import ChunkLocations

RATIO_MIN = 0.85
FIRST_LAYER_MS_MAX = {"tcp": 3.0, "shm": 1.0}
GEOMETRIES = {
    "default": WorkUnit(),
    "small": WorkUnit(256, 32, 16 << 10),
    "large": WorkUnit(4, 32, 1 << 20),
    "mla": WorkUnit(128, 61, 18 << 10),
}
"""About 128 MiB each. `mla`: DeepSeek-V3's 61 layers, 16 tokens of 576 values in bfloat16."""
_SERIES = 0
_MEASURED = [plane for plane in PLANES if plane != "nixl" or nixl_agent.is_installed()]
# Of each plane: with one request, by layer, the bare loop, and the transport alone. Bytes of all
# but the last are checked.
_CASES, _OTHER_STEPS = 4 * len(_MEASURED), 1 + 3 * len(_MEASURED)


@dataclass(frozen=True, slots=True)
class GeometriesReport:
    """The same for several units, by their name in `GEOMETRIES`."""

    benchmark: str
    geometries: dict[str, TransferReport]

    @property
    def bars(self) -> list[Bar]:
        return [bar for report in self.geometries.values() for bar in report.bars]

    def to_json(self) -> dict[str, Any]:
        reports = {name: report.to_json() for name, report in self.geometries.items()}
        return {"benchmark": self.benchmark, "geometries": reports}


def steps(settings: Settings) -> int:
    """How often `bench_planes` calls `step`."""
    return _OTHER_STEPS + step_count(_CASES, repeats=settings.repeats, warm_ups=WARM_UPS)


async def bench_geometries(settings: dict[str, Settings], step: Step) -> GeometriesReport:
    """One after the other."""
    reports: dict[str, TransferReport] = {}

    def step_of_one(what: str) -> None:
        step(f"{name}: {what}")

    for name, of_one in settings.items():
        reports[name] = await bench_planes(of_one, step_of_one)
    return GeometriesReport("planes", reports)


async def bench_planes(settings: Settings, step: Step) -> TransferReport:
    """Stores the chunks, checks the bytes of each plane, then measures all cases in rounds."""
    unit = settings.unit
    async with AsyncExitStack() as stack:
        space = stack.enter_context(Workspace(settings.root))
        facts = machine(space.directory)
        step("storing the chunks")
        await space.store_series([(unit, _SERIES)])
        region = touched(unit.size_bytes)
        shared = SharedRegion(unit.size_bytes)
        shared.view[:] = region
        ours = await _planes(stack, space, unit, Region(region), shared)
        bare = await _bare_loops(stack, space, unit, region, shared)
        for case in (*ours, *bare):
            step(f"checking the bytes: {case.label}")
            is_shared = case.name.endswith("_shm") or case.name.startswith("shm_")
            await check_bytes(case, unit, shared.view if is_shared else region)
        cases = [*ours, *bare, *await _transports(stack, unit, region)]
        samples = await run_rounds(cases, repeats=settings.repeats, warm_ups=WARM_UPS, step=step)
    rows = summarise(cases, samples, unit.size_bytes)
    return TransferReport(
        benchmark="planes",
        unit=unit,
        repeats=settings.repeats,
        machine=facts,
        cases=rows,
        server_growth=[],
        verified_cases=[case.name for case in (*ours, *bare)],
        bars=_bars(rows),
    )


async def _planes(
    stack: AsyncExitStack,
    space: Workspace,
    unit: WorkUnit,
    region: Region,
    shared: SharedRegion,
) -> Sequence[Case]:
    """With one request over each plane, then layer by layer."""
    server = stack.enter_context(space.server(settings_for(_MEASURED)))
    whole: list[Case] = []
    by_layer: list[Case] = []
    for plane in _MEASURED:
        client = await stack.enter_async_context(AsyncClient(server.address, plane=plane))
        into = shared if plane == "shm" else region
        stream = FetchStream(client, unit, _SERIES, region=into, pid=server.pid)
        stream.name, stream.label = f"{stream.name}_{plane}", f"kvserve {plane}, 1 request"
        layers = FetchByLayer(client, unit, _SERIES, region=into, pid=server.pid, depth=1)
        layers.name, layers.label = f"{layers.name}_{plane}", f"kvserve {plane}, by layer"
        whole.append(stream)
        by_layer.append(layers)
    return [*whole, *by_layer]


async def _bare_loops(
    stack: AsyncExitStack,
    space: Workspace,
    unit: WorkUnit,
    region: memoryview,
    shared: SharedRegion,
) -> Sequence[Case]:
    """One for each plane, over the same files: `shm_files`, and so on."""
    files = ChunkLocations(str(space.chunks), unit.descriptor(_SERIES))
    over_shm = stack.enter_context(shm_ceiling_server())
    over_tcp = stack.enter_context(tcp_ceiling_server())
    over_grpc = await stack.enter_async_context(
        CeilingClient(stack.enter_context(ceiling_server()))
    )
    loops: list[Case] = [
        stack.enter_context(ShmRead(over_shm, unit, shared, files)),
        stack.enter_context(TcpRead(over_tcp, unit, region, files)),
        GrpcReadFiles(over_grpc, unit, region, files),
    ]
    if "nixl" in _MEASURED:
        over_nixl = stack.enter_context(nixl_ceiling_server())
        loops.append(stack.enter_context(NixlRead(over_nixl, unit, region, files)))
    return loops


async def _transports(stack: AsyncExitStack, unit: WorkUnit, region: memoryview) -> Sequence[Case]:
    """What each plane's transport does alone, with the same bytes again and again from no file:
    `memcpy` (shm), `tcp_constant`, `grpc`, `nixl_constant`."""
    over_tcp = stack.enter_context(tcp_ceiling_server())
    over_grpc = await stack.enter_async_context(
        CeilingClient(stack.enter_context(ceiling_server()))
    )
    cases: list[Case] = [
        Memcpy(unit, region),
        stack.enter_context(TcpRead(over_tcp, unit, region, None)),
        GrpcRead(over_grpc, unit),
    ]
    if "nixl" in _MEASURED:
        over_nixl = stack.enter_context(nixl_ceiling_server())
        cases.append(stack.enter_context(NixlRead(over_nixl, unit, region, None)))
    return cases


def _bars(rows: Sequence[CaseReport]) -> list[Bar]:
    """Each plane against its own bare loop."""
    speeds = [ratio_bar(rows, f"kvserve_stream_{it}", f"{it}_files", RATIO_MIN) for it in _MEASURED]
    first = [
        first_layer_bar(rows, f"kvserve_stream_{plane}", f"{plane}_files", ms_max)
        for plane, ms_max in FIRST_LAYER_MS_MAX.items()
    ]
    return [*speeds, *first]
