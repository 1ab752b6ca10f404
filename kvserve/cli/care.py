"""`kvserve fsck, du, ls`: care of a tree, with or without servers on it. No server is asked."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvserve.care.fsck import FsckOptions, FsckResult, Watcher, fsck_blocking
from kvserve.care.listing import Unlisted, Wanted, chunks_blocking
from kvserve.care.order import InOrder
from kvserve.care.tally import Finding, Kind
from kvserve.care.usage import DiskUse, Usage, usage_blocking
from kvserve.config import StoreConfig
from kvserve.errors import InvalidRequest, KvserveError, StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.fs.lfs import OstSpace
from kvserve.fs.lustre import LustreFileSystem
from kvserve.model import ModelIdentity
from kvserve.store.paths import SERVERS_DIR

_Root = Annotated[Path, typer.Option("--root", help="Directory of the chunk files (store.root).")]
_PROBLEMS_FOUND = 1
_COULD_NOT = 2
_INTERRUPTED = 130
_SHOW_INTERVAL_S = 0.1
# Enough for `ls --namespace`; --json has it all.
_NAMESPACE_SHOWN = 12

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def fsck(
    root: _Root,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move corrupt and misplaced files to .quarantine, remove dead servers' files.",
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted fsck ended.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Files read at once.")] = 8,
    owner_lease_s: Annotated[
        float, typer.Option(min=1, max=3600, help="The servers' store.owner_lease_s.")
    ] = StoreConfig().owner_lease_s,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, at the end.")
    ] = False,
) -> None:
    """Check every file of a tree. Exit status 0: clean, 1: problems found, 2: could not check."""
    options = FsckOptions(
        repairs=repair, resumes=resume, threads=threads, owner_lease_s=owner_lease_s
    )
    with _exits_with(_COULD_NOT):
        _check_root(root)
        _check_user(root)
        try:
            with _progress() as (bar, task):
                watcher = _Shown(bar, task, prints=not as_json)
                result = fsck_blocking(PosixFileSystem(), str(root), options, watcher=watcher)
        except KeyboardInterrupt:
            errors.print("kvserve: interrupted; --resume goes on from here", style="yellow")
            raise typer.Exit(_INTERRUPTED) from None
    if resume and not result.is_resumed:
        errors.print("kvserve: there was nothing to resume: all of it was checked", style="yellow")
    for warning in result.warnings:
        errors.print(f"kvserve: {warning}", style="yellow", markup=False)
    _report(root, result, repair, as_json)
    if result.tally.problems:
        raise typer.Exit(_PROBLEMS_FOUND)


def du(
    root: _Root,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
) -> None:
    """What takes the space of a tree: by tenant, by namespace, and beside the chunks."""
    usage = Usage()
    with _exits_with(_COULD_NOT), _progress() as (bar, task):
        _check_root(root)
        shown_at = 0.0
        for usage in usage_blocking(PosixFileSystem(), str(root)):
            if time.monotonic() - shown_at >= _SHOW_INTERVAL_S:
                shown_at = time.monotonic()
                so_far = usage.chunks()
                text = f"{so_far.files:,} chunks, {decimal(so_far.size_bytes)}"
                bar.update(task, description=text)
    targets = _targets(root)
    if as_json:
        shown = [asdict(target) for target in targets]
        typer.echo(json.dumps(_usage_json(root, usage) | {"targets": shown}))
    else:
        _show_usage(root, usage)
        _show_targets(targets)


def ls(
    root: _Root,
    tenant: Annotated[str, typer.Option(help="Only this tenant's chunks.")] = "",
    namespace: Annotated[
        str, typer.Option(help="Only namespaces whose directory starts like this.")
    ] = "",
    model: Annotated[str, typer.Option(help="Only chunks of this model id.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Stop after so many; 0 lists all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the chunks of a tree as they are found: size, age, path, identity."""
    listed = 0
    with _exits_with(_COULD_NOT):
        _check_root(root)
        for chunk in chunks_blocking(
            PosixFileSystem(), str(root), Wanted(tenant, namespace, model)
        ):
            if isinstance(chunk, Unlisted):
                errors.print(f"kvserve: {chunk.path}: {chunk.reason}", style="red", markup=False)
                continue
            age_s = max(0.0, time.time() - chunk.modified_at)
            if as_json:
                line = {
                    "path": chunk.path,
                    "size_bytes": chunk.size_bytes,
                    "age_s": round(age_s, 3),
                    **_identity_json(chunk.namespace.identity),
                }
                typer.echo(json.dumps(line))
            else:
                size, age = decimal(chunk.size_bytes), _age(age_s)
                typer.echo(f"{size:>10}  {age:>5}  {chunk.path}  {chunk.namespace.summary}")
            listed += 1
            if listed == limit:
                return


class _Shown(Watcher):
    """Findings as lines on standard output, counts in the progress bar on standard error."""

    def __init__(self, bar: Progress, task: TaskID, *, prints: bool) -> None:
        self._bar = bar
        self._task = task
        self._prints = prints
        self._shown_at = 0.0

    def found(self, finding: Finding) -> None:
        if self._prints and finding.kind is not Kind.LIVE:
            done = " [repaired]" if finding.is_repaired else ""
            text = f"{finding.kind}{done}: {finding.path}: {finding.reason}"
            # A name that is not ours may hold anything: bytes that are no text, escape codes.
            safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
            typer.echo(safe)

    def moved(self, directory: str, seen: InOrder) -> None:
        now = time.monotonic()
        if now - self._shown_at < _SHOW_INTERVAL_S:
            return
        self._shown_at = now
        text = f"{seen.files:,} files, {decimal(seen.size_bytes)}, {seen.problems:,} problems"
        self._bar.update(self._task, description=f"{text}  {escape(directory)}")


@contextmanager
def _progress() -> Iterator[tuple[Progress, TaskID]]:
    """One moving line on standard error, where that is a terminal; the total is not known."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Lines for a terminal go above the moving one; lines for a file or a pipe stay there.
    above = sys.stdout.isatty()
    shown = errors.is_terminal
    with Progress(
        *columns, console=errors, transient=True, redirect_stdout=above, disable=not shown
    ) as bar:
        yield bar, bar.add_task("", total=None)


@contextmanager
def _exits_with(code: int) -> Iterator[None]:
    """An error is one line; 1 is taken by `fsck` for what it finds."""
    try:
        yield
    except BrokenPipeError:
        raise  # `kvserve ls | head`: nobody is left to tell
    except (KvserveError, OSError) as error:
        text = f"kvserve: {type(error).__name__}: {error}"
        errors.print(text, style="red", markup=False)
        raise typer.Exit(code) from error


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise InvalidRequest(f"--root {root} is no directory")


def _check_user(root: Path) -> None:
    """What a check makes (its claim, `.quarantine`) must be the servers' to use and remove."""
    servers = root / SERVERS_DIR
    if not servers.exists():
        return
    owner = servers.stat().st_uid
    if owner != os.geteuid():
        raise InvalidRequest(
            f"{servers} belongs to uid {owner} and this is uid {os.geteuid()}: "
            "run fsck as the user of the servers"
        )


def _report(root: Path, result: FsckResult, repair: bool, as_json: bool) -> None:
    tally = result.tally
    counts = {kind.value: count for kind, count in tally.counts.items()}
    if as_json:
        report = {
            "command": "fsck",
            "root": str(root),
            "is_clean": not tally.problems,
            "repair": repair,
            "resumed": result.is_resumed,
            "files": tally.files,
            **tally.to_json(),
            "warnings": list(result.warnings),
            "took_s": round(result.took_s, 3),
        }
        typer.echo(json.dumps(report))
        return
    if tally.findings_left_out:
        console.print(f"and {tally.findings_left_out:,} more were told as they were found")
    found = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count) or "no files"
    console.print(
        f"fsck: {found}; {tally.repaired:,} repaired; {decimal(tally.size_bytes)} read "
        f"in {tally.directories:,} directories in {result.took_s:.1f} s"
    )


def _usage_json(root: Path, usage: Usage) -> dict[str, Any]:
    return {
        "command": "du",
        "root": str(root),
        "chunks": asdict(usage.chunks()),
        "tenants": {name: asdict(amount) for name, amount in usage.tenants().items()},
        "namespaces": [
            {
                "tenant": one.tenant,
                "namespace": one.identity.directory_name,
                **_identity_json(one.identity.identity),
                "identity_fault": one.identity.fault,
                "shards": one.shards,
                **asdict(one.chunks),
            }
            for one in usage.namespaces
        ],
        "quarantine": asdict(usage.quarantine),
        "temporaries": asdict(usage.temporaries),
        "unknown": usage.unknown,
        "unreadable": usage.unreadable,
    }


def _identity_json(identity: ModelIdentity | None) -> dict[str, str | None]:
    """The names that an identity shows; never the salt."""
    if identity is None:
        return dict.fromkeys(("model", "revision", "adapter", "dtype"))
    return {
        "model": identity.model,
        "revision": identity.revision,
        "adapter": identity.adapter,
        "dtype": identity.layout.dtype,
    }


def _show_usage(root: Path, usage: Usage) -> None:
    table = Table("tenant", "namespace", "identity", "shards", box=None)
    for name in ("chunks", "bytes", "on disk"):
        table.add_column(name, justify="right")
    for one in usage.namespaces:
        shards = ", ".join(one.shards[:4]) + (" ..." if len(one.shards) > 4 else "")
        name = one.identity.directory_name[:_NAMESPACE_SHOWN]
        identity = escape(one.identity.summary)
        table.add_row(one.tenant, name, identity, shards, *_columns(one.chunks))
    for tenant, amount in usage.tenants().items():
        table.add_row(tenant, "all", "", "", *_columns(amount), style="bold")
    table.add_row("all", "", str(root), "", *_columns(usage.chunks()), style="bold")
    table.add_row("", "", "in .quarantine", "", *_columns(usage.quarantine))
    table.add_row("", "", "temporary files", "", *_columns(usage.temporaries))
    console.print(table)
    if usage.unknown or usage.unreadable:
        console.print(f"{usage.unknown} not kvserve's, {usage.unreadable} unreadable: see fsck")


def _targets(root: Path) -> list[OstSpace]:
    """The storage targets of a Lustre file system; none on others."""
    if PosixFileSystem().kind(str(root)) != "lustre":
        return []
    try:
        return LustreFileSystem().space_blocking(str(root))
    except StorageUnavailable as error:
        errors.print(f"kvserve: no space by storage target: {error}", style="yellow", markup=False)
        return []


def _show_targets(targets: Sequence[OstSpace]) -> None:
    if not targets:
        return
    table = Table("target", "uuid", "states", box=None)
    for name in ("used", "available", "full"):
        table.add_column(name, justify="right")
    for it in targets:
        sizes = decimal(it.used_bytes), decimal(it.available_bytes)
        table.add_row(it.name, it.uuid, it.states, *sizes, f"{100 * it.used_share:.0f} %")
    console.print(table)


def _columns(amount: DiskUse) -> tuple[str, str, str]:
    return f"{amount.files:,}", decimal(amount.size_bytes), decimal(amount.disk_bytes)


def _age(age_s: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3600), ("m", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f}{unit}"
    return f"{age_s:.0f}s"
