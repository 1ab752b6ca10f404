"""The benchmark: kvserve first and last in each round, the peers and the ceilings in between."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.install import NotInstalled, install, python_of
from benchmarks.peers.processes import WAYS, PeerCase, RunningPeer, running
from benchmarks.peers.recipes import Recipe
from benchmarks.peers.report import Absent, PeersReport, Present
from kvclient import AsyncClient, Region, SharedRegion
from kvclient.planes import base
from kvserve.bench.ceilings import Memcpy
from kvserve.bench.fetch import FetchByLayer, FetchStream, check_bytes
from kvserve.bench.measure import cpu_s
from kvserve.bench.report import machine
from kvserve.bench.rounds import WARM_UPS, Case, Step, run_rounds, step_count
from kvserve.bench.tcp_ceiling import TcpRead, tcp_ceiling_server
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Workspace, touched
from kvserve.errors import KvserveError
from kvserve.store.locations import ChunkLocations

_SERIES = 0
_IDLE_S = 1.0
# Not nixl, which needs a package: NIXL is beside them as a peer.
PLANES = [plane for plane in base.PLANES if plane != "nixl"]
_OURS, _CEILINGS, _OTHER_STEPS = 2 * len(PLANES), 3, 2 + 2 * len(PLANES)
_STEPS_A_PEER = 2


@dataclass(frozen=True, slots=True)
class PeersSettings:
    """`work_dir` keeps the peers' environments; what the run puts below `root` goes with it."""

    recipes: Sequence[Recipe]
    unit: WorkUnit
    repeats: int
    work_dir: Path
    root: Path | None = None
    with_apt: bool = False


def steps(settings: PeersSettings) -> int:
    """How often `bench_peers` calls `step`, if every peer runs."""
    peers = len(settings.recipes)
    cases = 2 * _OURS + _CEILINGS + len(WAYS) * peers
    rounds = step_count(cases, repeats=settings.repeats, warm_ups=WARM_UPS)
    return _OTHER_STEPS + _STEPS_A_PEER * peers + rounds


async def bench_peers(settings: PeersSettings, step: Step) -> PeersReport:
    """Installs, starts and checks each peer, then measures all cases in rounds."""
    unit = settings.unit
    absent: list[Absent] = []
    usable = _installed(settings, step, absent)
    async with AsyncExitStack() as stack:
        space = stack.enter_context(Workspace(settings.root))
        facts = machine(space.directory)
        ours, ceilings = await _ours(stack, space, unit, step)
        source = space.directory / "source.bin"
        payload = touched(unit.size_bytes)
        unit.fill(payload, _SERIES)
        source.write_bytes(payload)
        payload.release()
        peers: list[RunningPeer] = []
        for recipe in usable:
            step(f"starting, storing, checking the bytes: {recipe.title}")
            try:
                peers.append(_start(stack, recipe, settings, source))
            except KvserveError as error:
                absent.append(Absent(recipe.name, recipe.title, f"not started: {error}"))
        step("looking at what the peers do without work")
        present = await _present(peers)
        theirs = [PeerCase(peer, way) for peer in peers for way in WAYS]
        # kvserve first and last: what the machine did meanwhile shows in its two halves.
        cases = [*ours, *theirs, *ceilings, *ours]
        samples = await run_rounds(cases, repeats=settings.repeats, warm_ups=WARM_UPS, step=step)
    failed = [case for case in theirs if case.failure]
    absent += [Absent(case.name, case.label, f"failed: {case.failure}") for case in failed]
    planes = {case.name: case.name.rpartition("_")[2] for case in ours}
    planes |= {case.name: case.plane for case in theirs}
    return PeersReport.of(
        [*ours, *(case for case in theirs if not case.failure), *ceilings],
        samples,
        unit=unit,
        repeats=settings.repeats,
        machine=facts,
        planes=planes,
        present=present,
        absent=absent,
    )


def _installed(settings: PeersSettings, step: Step, absent: list[Absent]) -> list[Recipe]:
    usable: list[Recipe] = []
    failed: dict[tuple[object, ...], str] = {}
    for recipe in settings.recipes:
        step(f"installing: {recipe.title}")
        # Several recipes share an environment; what failed once is not tried again at once.
        needs = (recipe.environment.name, recipe.system)
        try:
            if needs in failed:
                raise NotInstalled(failed[needs])
            install(recipe, settings.work_dir, with_apt=settings.with_apt)
        except NotInstalled as error:
            failed[needs] = str(error)
            absent.append(Absent(recipe.name, recipe.title, f"not installed: {error}"))
        else:
            usable.append(recipe)
    return usable


async def _ours(
    stack: AsyncExitStack, space: Workspace, unit: WorkUnit, step: Step
) -> tuple[list[Case], list[Case]]:
    """kvserve's cases on each plane, the bytes checked, and the ceilings."""
    step("storing the chunks in kvserve")
    await space.store_series([(unit, _SERIES)])
    server = stack.enter_context(space.server())
    region = touched(unit.size_bytes)
    shared = SharedRegion(unit.size_bytes)
    ours: list[Case] = []
    for plane in PLANES:
        client = await stack.enter_async_context(AsyncClient(server.address, plane=plane))
        into = shared if plane == "shm" else Region(region)
        stream = FetchStream(client, unit, _SERIES, region=into, pid=server.pid)
        layers = FetchByLayer(client, unit, _SERIES, region=into, pid=server.pid, depth=1)
        for case in (stream, layers):
            case.name = f"{case.name}_{plane}"
            case.label = case.label.replace("kvserve", f"kvserve {plane}", 1)
            step(f"checking the bytes: {case.label}")
            await check_bytes(case, unit, into.view)
            ours.append(case)
    files = ChunkLocations(str(space.chunks), unit.descriptor(_SERIES))
    bare = stack.enter_context(tcp_ceiling_server())
    reads = [stack.enter_context(TcpRead(bare, unit, region, of)) for of in (files, None)]
    return ours, [*reads, Memcpy(unit, region)]


def _start(
    stack: AsyncExitStack, recipe: Recipe, settings: PeersSettings, source: Path
) -> RunningPeer:
    """Started, filled and checked; it ends with `stack`, or at once if it fails here."""
    directory = source.with_name(recipe.name)
    directory.mkdir()
    logs = settings.work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{recipe.name}.log"
    log.unlink(missing_ok=True)
    work = {"unit": {**asdict(settings.unit), "source": str(source)}, "directory": str(directory)}
    with ExitStack() as own:
        python = python_of(recipe, settings.work_dir)
        peer = own.enter_context(running(recipe, work, python=python, log=log))
        peer.check()
        stack.push(own.pop_all())
    return peer


async def _present(peers: Sequence[RunningPeer]) -> list[Present]:
    """What each uses while nobody asks it anything: a peer that spins disturbs all others."""

    def used_s(peer: RunningPeer) -> float:
        return sum(cpu_s(pid) for pid in (peer.client.pid, *peer.server_pids))

    before = [used_s(peer) for peer in peers]
    await asyncio.sleep(_IDLE_S)
    return [
        Present(
            name=peer.recipe.name,
            title=peer.recipe.title,
            plane=peer.recipe.plane,
            packages=[*peer.recipe.environment.alone, *peer.recipe.environment.packages],
            version=peer.version,
            idle_cores=(used_s(peer) - was_s) / _IDLE_S,
        )
        for peer, was_s in zip(peers, before, strict=True)
    ]
