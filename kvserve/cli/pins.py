"""`kvserve pin, unpin, release`: what operators do to keep chunks, or to let them go."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvclient import ChunkStatus, Client
from kvserve.cli.descriptor_file import read_descriptor

_Server = Annotated[str, typer.Option("--server", help="Address of the server.")]
_DescriptorFile = Annotated[Path, typer.Argument(help="JSON file; docs/command_line.md has one.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
_Timeout = Annotated[float, typer.Option("--timeout-s", help="Deadline of the whole command.")]
_DEFAULT_SERVER = "127.0.0.1:7411"
_TIMEOUT_S = 60.0

console = Console(highlight=False, soft_wrap=True)


def pin(
    descriptor_file: _DescriptorFile,
    server: _Server = _DEFAULT_SERVER,
    timeout_s: _Timeout = _TIMEOUT_S,
    as_json: _Json = False,
) -> None:
    """Bar stored chunks from eviction (a system prompt). Exit status 1 if one is not stored."""
    with Client(server, timeout_s=timeout_s) as client:
        _report("pin", client.pin(read_descriptor(descriptor_file)), as_json)


def unpin(
    descriptor_file: _DescriptorFile,
    server: _Server = _DEFAULT_SERVER,
    timeout_s: _Timeout = _TIMEOUT_S,
    as_json: _Json = False,
) -> None:
    """Let pinned chunks be evicted again. Exit status 1 if one is not stored."""
    with Client(server, timeout_s=timeout_s) as client:
        _report("unpin", client.unpin(read_descriptor(descriptor_file)), as_json)


def release(
    lease_owner: Annotated[str, typer.Argument(help="The request that holds the lease.")],
    tenant: Annotated[str, typer.Option(help="The request's tenant.")] = "default",
    server: _Server = _DEFAULT_SERVER,
    timeout_s: _Timeout = _TIMEOUT_S,
    as_json: _Json = False,
) -> None:
    """Give free what lookups have leased to a request."""
    with Client(server, timeout_s=timeout_s) as client:
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
