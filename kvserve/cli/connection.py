"""How commands reach a server: `--server` and the `--tls-...` options, the same for all of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from kvclient import Client, Tls


@dataclass(frozen=True, slots=True)
class Server:
    """What the options say."""

    address: str
    tls: Tls | None

    def client(self, timeout_s: float) -> Client:
        return Client(self.address, timeout_s=timeout_s, tls=self.tls)


def _read_options(
    *,
    server: Annotated[str, typer.Option(help="Address of the server.")] = "127.0.0.1:7411",
    tls_ca: Annotated[
        Path | None, typer.Option(help="Speak TLS; PEM file: who signs servers' certificates.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file: the certificate to show, with --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file: its key.")] = None,
    tls_name: Annotated[
        str | None, typer.Option(help="The name in the server's certificate, if not the address.")
    ] = None,
) -> Server:
    if not (tls_ca or tls_certificate or tls_key or tls_name):
        return Server(server, None)
    return Server(server, Tls(tls_ca, tls_certificate, tls_key, tls_name))


def talks_to_server(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `server` is a `Server`: it gets the options in its place."""
    options = inspect.signature(_read_options).parameters
    own = [it for it in inspect.signature(command).parameters.values() if it.name != "server"]

    @wraps(command)
    def with_options(**given: Any) -> None:
        server = _read_options(**{name: given.pop(name) for name in options})
        command(**given, server=server)

    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [*(it.replace(kind=keyword) for it in own), *options.values()]
    with_options.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    with_options.__annotations__ = {it.name: it.annotation for it in shown}
    return with_options
