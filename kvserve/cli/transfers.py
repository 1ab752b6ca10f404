"""`kvserve put, get, lookup, delete, stat`: one client call each, for people and scripts."""

import json
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from kvclient import ChunkStatus, Descriptor, InvalidRequest, Verdict
from kvserve.cli.connection import Server, talks_to_server
from kvserve.cli.descriptor_file import read_descriptor

_DescriptorFile = Annotated[Path, typer.Argument(help="JSON file; docs/command_line.md has one.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_Timeout = Annotated[float, typer.Option("--timeout-s", help="Deadline of the whole command.")]

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


@talks_to_server
def put(
    descriptor_file: _DescriptorFile,
    payload: Annotated[Path, typer.Argument(help=r"KV bytes, laid out \[layer]\[chunk].")],
    timeout_s: _Timeout = 600.0,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Store the KV in a file, layer by layer. Exit status 1 if a chunk was not stored."""
    descriptor = read_descriptor(descriptor_file)
    with payload.open("rb") as file, server.client(timeout_s) as client:
        if payload.stat().st_size != descriptor.payload_size_bytes:
            raise InvalidRequest(
                f"{payload} has {payload.stat().st_size} bytes; {descriptor.chunk_count} chunks "
                f"of this layout are {descriptor.payload_size_bytes}"
            )
        region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        started = time.perf_counter()
        with (
            _progress("put", descriptor, as_json) as advance,
            client.store(descriptor, region) as handle,
        ):
            needed = len(handle.needed())
            for layer_index in descriptor.layer_order:
                handle.store_layer(layer_index)
                advance(layer_index, needed)
            result = handle.finish()
    _report("put", descriptor, result.verdicts, time.perf_counter() - started, as_json)
    if not result.is_whole:
        raise typer.Exit(1)


@talks_to_server
def get(
    descriptor_file: _DescriptorFile,
    output: Annotated[Path, typer.Argument(help=r"File to write, laid out \[layer]\[chunk].")],
    timeout_s: _Timeout = 600.0,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Fetch KV into a file. It is written only if every chunk arrived; else exit status 1."""
    descriptor = read_descriptor(descriptor_file)
    temp = output.with_name(f".{output.name}.part")
    try:
        with temp.open("w+b") as file, server.client(timeout_s) as client:
            file.truncate(descriptor.payload_size_bytes)
            region = mmap.mmap(file.fileno(), descriptor.payload_size_bytes)
            started = time.perf_counter()
            with (
                _progress("get", descriptor, as_json) as advance,
                client.fetch(descriptor, region) as handle,
            ):
                for event in handle.layers():
                    advance(event.layer_index, descriptor.chunk_count - len(event.missing))
                result = handle.wait()
        if result.is_whole:
            temp.replace(output)
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()
    _report("get", descriptor, result.verdicts, time.perf_counter() - started, as_json)
    if not result.is_whole:
        raise typer.Exit(1)


@talks_to_server
def lookup(
    descriptor_file: _DescriptorFile,
    timeout_s: _Timeout = 30.0,
    lease_owner: Annotated[
        str, typer.Option(help="Lease the hits to this request: they are not evicted meanwhile.")
    ] = "",
    lease_ttl_s: Annotated[float, typer.Option(help="For at most so long.")] = 60.0,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Which chunks of a descriptor are stored, and why not."""
    descriptor = read_descriptor(descriptor_file)
    lease_ttl_s = lease_ttl_s if lease_owner else 0.0
    started = time.perf_counter()
    with server.client(timeout_s) as client:
        presence = client.lookup(descriptor, lease_owner=lease_owner, lease_ttl_s=lease_ttl_s)
    took_s = time.perf_counter() - started
    extra = {"prefix_chunks": presence.prefix_chunks}
    if lease_owner:
        extra["leased_chunks"] = presence.leased_chunks
    _report("lookup", descriptor, presence.verdicts, took_s, as_json, extra)


@talks_to_server
def delete(
    descriptor_file: _DescriptorFile,
    timeout_s: _Timeout = 30.0,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Delete the chunks of a descriptor."""
    descriptor = read_descriptor(descriptor_file)
    started = time.perf_counter()
    with server.client(timeout_s) as client:
        verdicts = [Verdict(status) for status in client.delete(descriptor)]
    _report("delete", descriptor, verdicts, time.perf_counter() - started, as_json)


@talks_to_server
def stat(
    timeout_s: _Timeout = 10.0,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """What a server is and what it accepts."""
    with server.client(timeout_s) as client:
        answer = client.server_info()
    info = {**asdict(answer), "planes": answer.planes}
    if as_json:
        typer.echo(json.dumps(info))
        return
    table = Table("", server.address, box=None)
    for name, value in info.items():
        table.add_row(name, ", ".join(value) if isinstance(value, tuple) else str(value))
    console.print(table)


@contextmanager
def _progress(
    verb: str, descriptor: Descriptor, is_silent: bool
) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, where that is a terminal; moved by layer index and the
    chunks whose bytes of it have moved. None with --json."""
    is_silent = is_silent or not errors.is_terminal
    columns = (BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(verb, *columns, console=errors, disable=is_silent) as bar:
        task = bar.add_task(verb, total=descriptor.payload_size_bytes)

        def advance(layer_index: int, chunks: int) -> None:
            bar.advance(task, descriptor.layout.slice_sizes[layer_index] * chunks)

        yield advance


def _report(
    verb: str,
    descriptor: Descriptor,
    verdicts: list[Verdict],
    took_s: float,
    as_json: bool,
    extra: dict[str, Any] | None = None,
) -> None:
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.status.name] = counts.get(verdict.status.name, 0) + 1
    details = {index: found.message for index, found in enumerate(verdicts) if found.message}
    moved = verb in ("put", "get")
    if as_json:
        report = {
            "command": verb,
            "chunks": descriptor.chunk_count,
            "statuses": [ChunkStatus(verdict.status).name for verdict in verdicts],
            "details": details,
            "took_s": round(took_s, 6),
            **({"size_bytes": descriptor.payload_size_bytes} if moved else {}),
            **(extra or {}),
        }
        typer.echo(json.dumps(report))
        return
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    for name, value in (extra or {}).items():
        summary += f"; {name} {value}"
    console.print(f"{verb}: {descriptor.chunk_count} chunks: {summary} in {took_s:.3f} s")
    for index, message in list(details.items())[:8]:
        console.print(f"  chunk {index}: {message}", markup=False)
