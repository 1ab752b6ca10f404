"""`kvserve pin, unpin, release`: what operators do to keep chunks, or to let them go."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvclient import ChunkStatus
from kvserve.cli.connection import Server, talks_to_server
from kvserve.cli.descriptor_file import read_descriptor

_DescriptorFile = Annotated[Path, typer.Argument(help="JSON file; docs/command_line.md has one.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_Timeout = Annotated[float, typer.Option("--timeout-s", help="Deadline of the whole command.")]
_TIMEOUT_S = 60.0

console = Console(highlight=False, soft_wrap=True)


@talks_to_server
def pin(
    descriptor_file: _DescriptorFile,
    timeout_s: _Timeout = _TIMEOUT_S,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Bar stored chunks from eviction (a system prompt). Exit status 1 if one is not stored."""
    with server.client(timeout_s) as client:
        _report("pin", client.pin(read_descriptor(descriptor_file)), as_json)


@talks_to_server
def unpin(
    descriptor_file: _DescriptorFile,
    timeout_s: _Timeout = _TIMEOUT_S,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Let pinned chunks be evicted again. Exit status 1 if one is not stored."""
    with server.client(timeout_s) as client:
        _report("unpin", client.unpin(read_descriptor(descriptor_file)), as_json)


@talks_to_server
def release(
    lease_owner: Annotated[str, typer.Argument(help="The request that holds the lease.")],
    tenant: Annotated[str, typer.Option(help="The request's tenant.")] = "default",
    timeout_s: _Timeout = _TIMEOUT_S,
    as_json: _Json = False,
    *,
    server: Server,
) -> None:
    """Give free what lookups have leased to a request."""
    with server.client(timeout_s) as client:
        released = client.release(lease_owner, tenant=tenant)
    if as_json:
        typer.echo(json.dumps({"command": "release", "released_chunks": released}))
    else:
        console.print(f"release: {released} chunks given free")


def _report(verb: str, statuses: list[ChunkStatus], as_json: bool) -> None:
    done = sum(not status.is_miss for status in statuses)
    if as_json:
        report = {"command": verb, "statuses": [status.name for status in statuses]}
        typer.echo(json.dumps(report))
    else:
        others = "; the others are not stored" if done < len(statuses) else ""
        console.print(f"{verb}: {done} of {len(statuses)} chunks{others}")
    if done < len(statuses):
        raise typer.Exit(1)
