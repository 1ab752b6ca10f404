"""`kvserve serve`: a server in the foreground."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from kvserve.config import load_config, parse_value, render_toml
from kvserve.errors import InvalidRequest
from kvserve.rpc.server import Server
from kvserve.rpc.server import serve as serve_until_signal
from kvserve.rpc.workers import serve_workers


def serve(
    root: Annotated[
        str | None, typer.Option(help="Directory of the chunk files (store.root).")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT, [V6]:PORT or unix:PATH (server.listen).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes behind the address (server.workers).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; --print-config shows every setting.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="SECTION.KEY=VALUE or tenants.NAME.KEY=VALUE, over the file; may be repeated.",
        ),
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Write the bound address here once the server answers.")
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the settings, explained, as TOML, and exit."),
    ] = False,
) -> None:
    """Serve a directory. Stops cleanly on SIGTERM and Ctrl-C."""
    overrides = _overrides(settings or [])
    if root is not None:
        overrides.setdefault("store", {})["root"] = root
    if listen is not None:
        overrides.setdefault("server", {})["listen"] = listen
    if workers is not None:
        overrides.setdefault("server", {})["workers"] = workers
    effective = load_config(config, overrides)
    if print_config:
        typer.echo(render_toml(effective, with_comments=True), nl=False)
        return
    logging.basicConfig(
        level=effective.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("effective settings:", style="bold")
    console.print(render_toml(effective, with_comments=False), markup=False)

    def started(address: str, metrics_addresses: Sequence[str]) -> None:
        if address_file is not None:
            # Whole or not there, so that a waiting script never reads half an address.
            temp = address_file.with_name(f"{address_file.name}.{os.getpid()}")
            temp.write_text(address, "utf-8")
            temp.replace(address_file)
        console.print(f"kvserve: serving {effective.store.root} on {address}", markup=False)
        for metrics_address in metrics_addresses:
            console.print(f"kvserve: metrics on http://{metrics_address}/metrics")

    def one_started(server: Server) -> None:
        started(server.address, [server.metrics_address] if server.metrics_address else [])

    if effective.server.workers > 1:
        uvloop.run(serve_workers(effective, started=started))
    else:
        uvloop.run(serve_until_signal(effective, started=one_started))


def _overrides(settings: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and section and key):
            raise InvalidRequest(f"--set {setting!r} must be SECTION.KEY=VALUE")
        entries = found.setdefault(section, {})
        # A tenant's name may have dots, its keys have none.
        tenant, dot, tenant_key = key.rpartition(".")
        if section == "tenants" and dot:
            entries, key = entries.setdefault(tenant, {}), tenant_key
        if not isinstance(entries, dict):
            raise InvalidRequest(f"--set {setting!r}: tenants.{tenant} was set to no table before")
        entries[key] = parse_value(value)
    return found
