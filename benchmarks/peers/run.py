"""Runs kvserve and its peers on the same unit, in the same rounds. See README.md beside this file.

python benchmarks/peers/run.py --peers redis,flight --rounds 7 --output FILE --plot FILE.svg
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.peers.bench import PeersSettings, bench_peers, steps
from benchmarks.peers.recipes import RECIPES, Recipe
from benchmarks.peers.report import peers_chart, print_peers
from kvserve.bench.plot import render_svg
from kvserve.bench.unit import WorkUnit
from kvserve.cli.bench import run_steps

_UNIT = WorkUnit()
_WIDTH = 100
_WORK_DIR = Path.home() / ".cache" / "kvserve-peers"


def chosen(names: str) -> list[Recipe]:
    """Recipes in the order of `recipes.py`; `all` for every one."""
    wanted = set(filter(None, names.split(",")))
    known = {recipe.name for recipe in RECIPES}
    if wanted == {"all"}:
        wanted = known
    if not wanted or wanted - known:
        unknown = ", ".join(sorted(wanted - known)) or "nothing"
        raise typer.BadParameter(f"{unknown}: choose from all, {', '.join(sorted(known))}")
    return [recipe for recipe in RECIPES if recipe.name in wanted]


def main(
    peers: Annotated[str, typer.Option(help="Names with commas in between, or all.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Measured rounds.")] = 7,
    chunks: Annotated[int, typer.Option(min=1, max=512)] = _UNIT.chunk_count,
    layers: Annotated[int, typer.Option(min=1, max=512)] = _UNIT.layer_count,
    slice_bytes: Annotated[int, typer.Option(min=4096, max=1 << 20)] = _UNIT.slice_size_bytes,
    work_dir: Annotated[
        Path, typer.Option(help="Keeps the peers' environments and logs.")
    ] = _WORK_DIR,
    root: Annotated[
        Path | None, typer.Option(help="Directory for the run's files; default: the temp one.")
    ] = None,
    apt: Annotated[
        bool, typer.Option("--apt", help="Install missing system packages with apt-get.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart to this SVG file.")] = None,
) -> None:
    """Fetch one prefix from kvserve and from each peer."""
    for path in (output, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path} must name a file in a directory that exists")
    unit = WorkUnit(chunks, layers, slice_bytes)
    settings = PeersSettings(chosen(peers), unit, rounds, work_dir.absolute(), root, apt)
    report = run_steps("peers", steps(settings), lambda step: bench_peers(settings, step))
    if output is not None:
        output.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
    if plot is not None:
        plot.write_text(render_svg(peers_chart(report)), "utf-8")
    print_peers(Console(highlight=False, soft_wrap=True, width=_WIDTH), report)


if __name__ == "__main__":
    typer.run(main)
