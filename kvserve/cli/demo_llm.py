"""`kvserve demo-llm`: shows a real model that continues from KV another process computed."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TaskID, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvserve.demo.llm import LlmDemoResult, Reuse, run_llm_demo


def demo_llm(
    new_tokens: Annotated[
        int, typer.Option(min=1, max=512, help="Tokens to generate, fewer if the model ends.")
    ] = 48,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """A real model: process A prefills, process B continues from fetched KV.

    Exit status 1 if a token from float32 KV differs from the uninterrupted run.
    """
    console = Console(highlight=False)
    columns = (SpinnerColumn(finished_text="+"), "{task.description}", TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="kvserve-demo-llm-") as directory,
        Progress(*columns, console=console, disable=as_json) as progress,
    ):
        begun: list[TaskID] = []

        def seen(step: str) -> None:
            for task in begun[-1:]:
                progress.update(task, total=1, completed=1)
            begun.append(progress.add_task(step, total=None))

        result = run_llm_demo(Path(directory), new_tokens=new_tokens, seen=seen)
        progress.update(begun[-1], total=1, completed=1)
    if as_json:
        report = {**asdict(result), "chunks": result.chunks, "is_good": result.is_good}
        typer.echo(json.dumps(report))
    else:
        _show(console, result)
    if not result.is_good:
        raise typer.Exit(1)


def _show(console: Console, result: LlmDemoResult) -> None:
    rest = result.prompt_tokens - result.reused_tokens
    console.print(
        f"\nprompt of {result.prompt_tokens} tokens: {result.chunks} chunks of "
        f"{result.chunk_tokens} = {result.reused_tokens} reused, {rest} computed by process B"
    )
    table = Table(box=None)
    table.add_column("", no_wrap=True)
    table.add_column("no reuse", justify="right")
    for dtype in result.reuse:
        table.add_column(f"{dtype} KV", justify="right")

    def row(name: str, without: str, cell: Callable[[Reuse], object]) -> None:
        table.add_row(name, without, *(str(cell(reuse)) for reuse in result.reuse.values()))

    row("KV fetched, MiB", "", lambda reuse: f"{reuse.size_bytes / 2**20:.1f}")
    row("fetch requests", "", lambda reuse: reuse.fetch_requests)
    row("layers sent while A computed", "", lambda r: f"{r.layers_sent_early} of {r.layers}")
    row(
        "TTFT, ms, median",
        f"{result.ttft_s * 1e3:.0f}",
        lambda reuse: f"{reuse.ttft_s * 1e3:.0f}",
    )
    row("TTFT, times faster", "", lambda reuse: f"{result.ttft_s / reuse.ttft_s:.1f}")
    row("tokens equal", "", lambda reuse: f"{reuse.tokens_equal} of {result.new_tokens}")
    row("logits equal bit for bit", "", lambda reuse: "yes" if reuse.is_bit_equal else "no")
    console.print(table)
    for dtype, reuse in result.reuse.items():
        if reuse.first_difference is not None:
            console.print(
                f"{dtype} KV: new token {reuse.first_difference + 1} is the first that differs",
                style="red" if dtype == "float32" else "",
            )
    pids = ", ".join(f"{name} {pid}" for name, pid in result.pids.items())
    console.print(
        f"\nan uninterrupted run with an unsplit prefill: {result.unsplit_tokens_equal} of "
        f"{result.new_tokens} tokens equal\nprocesses: {pids}\nthe model said:"
    )
    console.print(Padding(Text(result.text), (0, 0, 0, 2)))
