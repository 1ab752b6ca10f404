"""`kvserve bench`: speed against ceilings taken in the same run."""

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from kvclient.planes.base import PLANES
from kvclient.planes.choice import AUTO
from kvserve.bench.concurrency import (
    DEFAULT_PLANES,
    ConcurrencyReport,
    ConcurrencySettings,
    bench_concurrency,
)
from kvserve.bench.concurrency import UNIT as CROWD_UNIT
from kvserve.bench.concurrency import steps as concurrency_steps
from kvserve.bench.fetch import bench_fetch
from kvserve.bench.fetch import steps as fetch_steps
from kvserve.bench.lookup import LookupReport, LookupSettings, bench_lookup
from kvserve.bench.lookup import steps as lookup_steps
from kvserve.bench.metadata import MetadataReport, MetadataSettings, bench_metadata
from kvserve.bench.metadata import steps as metadata_steps
from kvserve.bench.planes import GEOMETRIES, GeometriesReport, bench_geometries, bench_planes
from kvserve.bench.planes import steps as planes_steps
from kvserve.bench.plot import (
    Chart,
    concurrency_chart,
    geometries_chart,
    lookup_chart,
    metadata_chart,
    render_svg,
    transfer_chart,
)
from kvserve.bench.report import TransferReport
from kvserve.bench.rounds import Step
from kvserve.bench.store import bench_store
from kvserve.bench.store import steps as store_steps
from kvserve.bench.tables import (
    print_concurrency,
    print_geometries,
    print_lookup,
    print_metadata,
    print_transfer,
)
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Settings
from kvserve.errors import InvalidRequest

bench = typer.Typer(help="Measure speed against ceilings taken in the same run.")

_Report = TransferReport | GeometriesReport | ConcurrencyReport | LookupReport | MetadataReport
_T = TypeVar("_T")

_Chunks = Annotated[int, typer.Option(min=1, max=512, help="Chunks of the prefix.")]
_Layers = Annotated[int, typer.Option(min=1, max=1024, help="Layers of the model.")]
_SliceBytes = Annotated[
    int, typer.Option(min=1, max=64 << 20, help="One layer's bytes in one chunk.")
]
_Repeats = Annotated[int, typer.Option(min=1, max=1000, help="Measured rounds.")]
_Root = Annotated[
    Path | None,
    typer.Option(help="Directory on the file system to measure; default: the temp directory."),
]
_Plane = Annotated[str, typer.Option(help="How payload moves: auto, shm, nixl, tcp or grpc.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_Output = Annotated[Path | None, typer.Option(help="Write the JSON to this file.")]
_Plot = Annotated[Path | None, typer.Option(help="Write a bar chart to this SVG file.")]
_Check = Annotated[bool, typer.Option("--check", help="Exit status 1 if a bar is not reached.")]

_UNIT = WorkUnit()
_REPEATS = 9
_LOOKUPS = 1000
_CLIENTS = [1, 4, 16, 64]
_WORKERS = [1]
_PLANES = list(DEFAULT_PLANES)
_COUNTS = [10_000, 100_000, 1_000_000]
_Lookups = Annotated[int, typer.Option(min=1, max=1_000_000, help="Lookups in each phase.")]

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


@bench.command()
def fetch(
    chunks: _Chunks = _UNIT.chunk_count,
    layers: _Layers = _UNIT.layer_count,
    slice_bytes: _SliceBytes = _UNIT.slice_size_bytes,
    repeats: _Repeats = _REPEATS,
    root: _Root = None,
    plane: _Plane = AUTO,
    as_json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
    check: _Check = False,
) -> None:
    """Fetch one prefix: beside a bare grpcio stream, page cache and memcpy."""
    settings = Settings(
        WorkUnit(chunks, layers, slice_bytes), repeats, _checked(root), _known(plane)
    )
    ending = _Ending(as_json, output, plot, check)
    ending.finish(
        run_steps("fetch", fetch_steps(settings), lambda step: bench_fetch(settings, step))
    )


@bench.command()
def store(
    chunks: _Chunks = _UNIT.chunk_count,
    layers: _Layers = _UNIT.layer_count,
    slice_bytes: _SliceBytes = _UNIT.slice_size_bytes,
    repeats: _Repeats = _REPEATS,
    root: _Root = None,
    plane: _Plane = AUTO,
    as_json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
    check: _Check = False,
) -> None:
    """Store one prefix: beside a bare grpcio stream, page cache and memcpy."""
    settings = Settings(
        WorkUnit(chunks, layers, slice_bytes), repeats, _checked(root), _known(plane)
    )
    ending = _Ending(as_json, output, plot, check)
    ending.finish(
        run_steps("store", store_steps(settings), lambda step: bench_store(settings, step))
    )


@bench.command()
def planes(
    chunks: _Chunks = _UNIT.chunk_count,
    layers: _Layers = _UNIT.layer_count,
    slice_bytes: _SliceBytes = _UNIT.slice_size_bytes,
    geometry: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(GEOMETRIES)}, or all, in place of the three; repeatable."),
    ] = None,
    repeats: _Repeats = _REPEATS,
    root: _Root = None,
    as_json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
    check: _Check = False,
) -> None:
    """Fetch one prefix over each plane: beside a bare loop of reads and sends for each of them."""
    ending = _Ending(as_json, output, plot, check)
    if not geometry:
        one = Settings(WorkUnit(chunks, layers, slice_bytes), repeats, _checked(root))
        ending.finish(run_steps("planes", planes_steps(one), lambda step: bench_planes(one, step)))
        return
    names = [*GEOMETRIES] if "all" in geometry else [*dict.fromkeys(geometry)]
    for name in names:
        if name not in GEOMETRIES:
            raise InvalidRequest(f"--geometry {name} must be all, {' or '.join(GEOMETRIES)}")
    several = {name: Settings(GEOMETRIES[name], repeats, _checked(root)) for name in names}
    count = sum(map(planes_steps, several.values()))
    ending.finish(run_steps("planes", count, lambda step: bench_geometries(several, step)))


@bench.command()
def concurrency(
    chunks: _Chunks = CROWD_UNIT.chunk_count,
    layers: _Layers = CROWD_UNIT.layer_count,
    slice_bytes: _SliceBytes = CROWD_UNIT.slice_size_bytes,
    clients: Annotated[
        list[int], typer.Option(min=1, max=256, help="Clients at once; again for another number.")
    ] = _CLIENTS,
    workers: Annotated[
        list[int], typer.Option(min=1, max=16, help="As of serve; again for another server.")
    ] = _WORKERS,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60, help="How long each is measured, in each round.")
    ] = 2.0,
    plane: Annotated[
        list[str], typer.Option(help="shm, nixl, tcp or grpc; again for another plane.")
    ] = _PLANES,
    repeats: _Repeats = 2,
    root: _Root = None,
    as_json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
    check: _Check = False,
) -> None:
    """Fetch with more and more clients at once, over each plane: beside a bare loop over TCP."""
    settings = ConcurrencySettings(
        Settings(WorkUnit(chunks, layers, slice_bytes), repeats, _checked(root)),
        tuple(sorted(set(clients))),
        tuple(sorted(set(workers))),
        seconds,
        tuple(dict.fromkeys(map(_pinned, plane))),
    )
    ending = _Ending(as_json, output, plot, check)
    work = run_steps(
        "concurrency",
        concurrency_steps(settings),
        lambda step: bench_concurrency(settings, step),
    )
    ending.finish(work)


@bench.command()
def lookup(
    chunks: _Chunks = _UNIT.chunk_count,
    layers: _Layers = _UNIT.layer_count,
    slice_bytes: _SliceBytes = _UNIT.slice_size_bytes,
    lookups: _Lookups = _LOOKUPS,
    processes: Annotated[
        int, typer.Option(min=1, max=8, help="Processes that the eight fetches are spread over.")
    ] = 1,
    root: _Root = None,
    as_json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
    check: _Check = False,
) -> None:
    """Look chunks up, on an idle server and while eight fetches of half the prefix run."""
    unit = WorkUnit(chunks, layers, slice_bytes)
    settings = LookupSettings(Settings(unit, 1, _checked(root)), lookups, processes)
    ending = _Ending(as_json, output, plot, check)
    ending.finish(run_steps("lookup", lookup_steps(), lambda step: bench_lookup(settings, step)))


@bench.command()
def metadata(
    count: Annotated[
        list[int], typer.Option(min=1, help="Chunk files on the tree; give it again for another.")
    ] = _COUNTS,
    lookups: _Lookups = _LOOKUPS,
    root: _Root = None,
    as_json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
    check: _Check = False,
) -> None:
    """Look chunks up on trees of very many chunk files: latency, start and memory."""
    settings = MetadataSettings(tuple(sorted(set(count))), lookups, _checked(root))
    ending = _Ending(as_json, output, plot, check)
    work = run_steps(
        "metadata", metadata_steps(settings), lambda step: bench_metadata(settings, step)
    )
    ending.finish(work)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What becomes of a report. Refuses at once what would fail after minutes of measuring."""

    as_json: bool
    output: Path | None
    plot: Path | None
    check: bool

    def __post_init__(self) -> None:
        for option, path in (("--output", self.output), ("--plot", self.plot)):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise InvalidRequest(f"{option} {path} must name a file in a directory that exists")

    def finish(self, report: _Report) -> None:
        if self.output is not None:
            self.output.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
        if self.plot is not None:
            self.plot.write_text(render_svg(_chart(report)), "utf-8")
        if self.as_json:
            typer.echo(json.dumps(report.to_json()))
        elif isinstance(report, LookupReport):
            print_lookup(console, report)
        elif isinstance(report, MetadataReport):
            print_metadata(console, report)
        elif isinstance(report, ConcurrencyReport):
            print_concurrency(console, report)
        elif isinstance(report, GeometriesReport):
            print_geometries(console, report)
        else:
            print_transfer(console, report)
        if self.check and not all(bar.passed for bar in report.bars):
            raise typer.Exit(1)


def run_steps(name: str, steps: int, work: Callable[[Step], Coroutine[Any, Any, _T]]) -> _T:
    """Runs `work` under a progress bar; `steps` is how often it calls its `Step`."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between the steps only: a thread that redraws would take its share of every figure.
    progress = Progress(
        *columns,
        console=errors,
        auto_refresh=False,
        transient=True,
        disable=not errors.is_terminal,
    )
    with progress:
        task = progress.add_task(f"bench {name}", total=steps)
        done = -1

        def step(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=f"bench {name}: {what}")
            progress.refresh()

        async def until_terminated() -> _T:
            # SIGTERM unwinds like Ctrl-C: servers end and directories go.
            task = asyncio.current_task()
            assert task is not None, "not in a task"
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            return await work(step)

        try:
            return uvloop.run(until_terminated())
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None


def _checked(root: Path | None) -> Path | None:
    if root is not None and not root.is_dir():
        raise InvalidRequest(f"--root {root} is no directory")
    return root


def _known(plane: str) -> str:
    if plane not in (AUTO, *PLANES):
        raise InvalidRequest(f"--plane {plane} must be one of {', '.join((AUTO, *PLANES))}")
    return plane


def _pinned(plane: str) -> str:
    if plane not in PLANES:
        raise InvalidRequest(f"--plane {plane} must be one of {', '.join(PLANES)}")
    return plane


def _chart(report: _Report) -> Chart:
    if isinstance(report, LookupReport):
        return lookup_chart(report)
    if isinstance(report, MetadataReport):
        return metadata_chart(report)
    if isinstance(report, ConcurrencyReport):
        return concurrency_chart(report)
    if isinstance(report, GeometriesReport):
        return geometries_chart(report)
    return transfer_chart(report)
