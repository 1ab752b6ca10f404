"""`kvserve evict`: make room by hand, with or without servers on the tree."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvserve.care.evict import EvictOptions, evict_blocking
from kvserve.config import StoreConfig
from kvserve.errors import InvalidRequest
from kvserve.fs import PosixFileSystem
from kvserve.names import check_tenant
from kvserve.store.evict import EvictionResult

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def evict(
    root: Annotated[Path, typer.Option(help="Directory of the chunk files (store.root).")],
    tenant: Annotated[str, typer.Option(help="Only this tenant's chunks.")] = "",
    older_than: Annotated[
        str,
        typer.Option(help="Only chunks that nobody has used for so long: 90s, 30m, 12h, 7d, 4w."),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what would go; leases are not looked at.")
    ] = False,
    owner_lease_s: Annotated[
        float, typer.Option(min=1, max=3600, help="The servers' store.owner_lease_s.")
    ] = StoreConfig().owner_lease_s,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Evict chunks by tenant or age, never leased or pinned ones. Exit status 1 if a file could not
    be deleted."""
    if not tenant and not older_than:
        raise InvalidRequest(
            "name a --tenant or --older-than (0s for all of it): else all would go"
        )
    if tenant:
        check_tenant(tenant)
    if not root.is_dir():
        raise InvalidRequest(f"{root} is no directory")
    options = EvictOptions(tenant, seconds(older_than or "0s"), dry_run)
    result = EvictionResult()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = errors.is_terminal and not as_json
    with Progress(*columns, console=errors, transient=True, disable=not shown) as bar:
        task = bar.add_task("evict", total=None)
        for result in evict_blocking(
            PosixFileSystem(), str(root.resolve()), options, owner_lease_s=owner_lease_s
        ):
            bar.update(task, description=_text(result, dry_run))
    if as_json:
        report = {
            "command": "evict",
            "dry_run": dry_run,
            "chunks": result.evicted.files,
            "size_bytes": result.evicted.size_bytes,
            "held": result.held,
            "failed": result.failed,
        }
        typer.echo(json.dumps(report))
    else:
        console.print(_text(result, dry_run))
    if result.failed:
        raise typer.Exit(1)


def seconds(text: str) -> float:
    """A duration such as 7d. Raises `InvalidRequest`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if found is None:
        raise InvalidRequest(f"--older-than {text!r} must be a number and s, m, h, d or w: 7d")
    return float(found.group(1)) * _UNITS_S[found.group(2)]


def _text(result: EvictionResult, dry_run: bool) -> str:
    verb = "would evict" if dry_run else "evicted"
    text = f"{verb} {result.evicted.files} chunks, {decimal(result.evicted.size_bytes)}"
    if result.held:
        text += f"; {result.held} leased, pinned or just used stay"
    if result.failed:
        text += f"; {result.failed} could not be deleted"
    return text
