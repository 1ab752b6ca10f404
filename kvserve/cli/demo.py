"""`kvserve demo`: shows one store and one fetch between real processes."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from kvserve.demo.run import DemoResult, Event, run_demo

_TIMELINE_COLUMNS = 28


def demo(
    tokens: Annotated[int, typer.Option(min=64, max=8192, help="Length of the prompt.")] = 2048,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """Prefill and decode processes over a real server, Llama-3.1-8B geometry."""
    console = Console(highlight=False)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="kvserve-demo-") as directory,
        Progress(*columns, console=console, disable=as_json) as bar,
    ):
        tasks = {
            name: bar.add_task(text, total=32)
            for name, text in (
                ("stored", "prefill: layers computed and stored"),
                ("fetched", "decode: layers fetched"),
                ("verified", "decode: layers compared with its own computation"),
            )
        }

        def seen(role: str, event: Event) -> None:
            if event["event"] in tasks:
                bar.advance(tasks[event["event"]])

        result = run_demo(Path(directory) / "kv", tokens, seen=seen)
    if as_json:
        typer.echo(json.dumps({**asdict(result), "is_good": result.is_good}))
    else:
        _show(console, result)
    if not result.is_good:
        raise typer.Exit(1)


def _show(console: Console, result: DemoResult) -> None:
    table = Table(title="One fetch, layer by layer", title_justify="left", box=None)
    for heading in ("layer", "stored ms", "fetched ms", "verified"):
        table.add_column(heading, justify="right")
    table.add_column("the fetch over time", no_wrap=True)
    rows = zip(result.stored_at_s, result.fetched_at_s, result.is_verified, strict=True)
    before, end = 0.0, max(result.fetched_at_s[-1], 1e-9)
    for layer_index, (stored, fetched, matches) in enumerate(rows):
        start = int(before / end * _TIMELINE_COLUMNS)
        width = max(1, int(fetched / end * _TIMELINE_COLUMNS) - start)
        table.add_row(
            str(layer_index),
            f"{stored * 1e3:.1f}",
            f"{fetched * 1e3:.1f}",
            "yes" if matches else "[red]NO[/red]",
            " " * start + "█" * width,
        )
        before = fetched
    console.print(table)
    size = result.size_bytes
    console.print(
        f"\n{result.tokens} tokens = {result.chunks} chunks x 32 layers = {size / 2**20:.0f} MiB\n"
        f"store: {result.store_requests} request, {size / result.storing_s / 1e9:.2f} GB/s "
        f"without the time to compute\n"
        f"fetch: {result.fetch_requests} request (not {32 * result.chunks}), "
        f"{size / result.fetching_s / 1e9:.2f} GB/s, "
        f"layer 0 after {result.first_layer_s * 1e3:.1f} ms of {result.fetching_s * 1e3:.1f} ms\n"
        f"every byte as computed: {'yes' if result.is_good else 'NO'}; "
        f"largest process {result.memory_bytes_max / 2**20:.0f} MiB"
    )
