"""TLS: what a client trusts, and what it shows. One set of files for gRPC and data connections."""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import grpc

from kvserve.errors import InvalidRequest
from kvserve.tls_socket import TlsDataSocket, client_context


@dataclass(frozen=True, slots=True)
class Tls:
    """Speak TLS with the server. All files are PEM, read once, at the client's first call.

    `root_certificates_file`: who signs servers' certificates; None: whom the system trusts.
    `certificate_file` and `key_file`: what this client shows to a server that demands it.
    `server_name`: what the server's certificate must be for, if that is not the host of the address
    ("localhost" for a Unix socket).
    """

    root_certificates_file: str | PathLike[str] | None = None
    certificate_file: str | PathLike[str] | None = None
    key_file: str | PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise InvalidRequest("tls: certificate_file and key_file belong together")
        name = self.server_name
        if name is not None and (not name or name.startswith(".") or not name.isascii()):
            raise InvalidRequest(f"tls: server_name {name!r} must be the name of a host")


class Security:
    """How one client secures its connections to the server at `address`."""

    def __init__(self, tls: Tls, address: str) -> None:
        self._tls = tls
        is_unix = address.startswith("unix:")
        host = "localhost" if is_unix else address.rpartition(":")[0].strip("[]")
        self._server_name = tls.server_name or host
        self._is_renamed = is_unix or tls.server_name is not None
        self._files: tuple[bytes, bytes | None, bytes | None] | None = None
        self._context: ssl.SSLContext | None = None

    async def load(self) -> None:
        """Before the first connection; later calls do nothing.

        Raises:
            InvalidRequest: a file that cannot be read or is not what its name says.
        """
        if self._files is None:
            await asyncio.get_running_loop().run_in_executor(None, self._load_blocking)

    def channel(self, address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """After `load`. The credentials are not kept: they would keep gRPC over a fork."""
        assert self._files is not None, "not loaded"
        renamed = [("grpc.ssl_target_name_override", self._server_name)] if self._is_renamed else []
        credentials = grpc.ssl_channel_credentials(*self._files)
        return grpc.aio.secure_channel(address, credentials, options=[*options, *renamed])

    def data_socket(self, sock: socket.socket, peer: str) -> TlsDataSocket:
        """After `load`; its handshake is still to come. Raises `ServerUnavailable`."""
        assert self._context is not None, "not loaded"
        return TlsDataSocket(sock, peer, self._context, server_name=self._server_name)

    def advice(self, details: str) -> str:
        """What to do when gRPC could not connect, by its own words; empty if they say nothing of
        TLS."""
        tls = self._tls
        if "WRONG_VERSION_NUMBER" in details:
            return (
                "the server does not speak TLS: leave out tls, or give the server "
                "server.tls_certificate_file"
            )
        if "CERTIFICATE_VERIFY_FAILED" in details:
            return (
                "the server's certificate is not signed by a CA that is trusted here ("
                f"{tls.root_certificates_file or 'those of the system'}): name the CA's file, "
                'Tls("ca.pem") or --tls-ca'
            )
        if "Hostname Verification" in details:
            return f"the server's certificate is not for {self._server_name!r}: set server_name"
        if "Socket closed" in details:
            return (
                "if the server has server.tls_client_ca_file, certificate_file and key_file must "
                "be signed by it"
            )
        return ""

    def _load_blocking(self) -> None:
        tls = self._tls
        root = tls.root_certificates_file or ssl.get_default_verify_paths().cafile
        if root is None:
            raise InvalidRequest("tls: this system trusts nobody: name root_certificates_file")
        files = (
            _read_blocking("root_certificates_file", root),
            _read_blocking("key_file", tls.key_file) if tls.key_file else None,
            _read_blocking("certificate_file", tls.certificate_file)
            if tls.certificate_file
            else None,
        )
        context = client_context()
        try:
            context.load_verify_locations(fspath(root))
        except ssl.SSLError as error:
            raise InvalidRequest(
                f"tls: root_certificates_file {root} has no certificate in PEM: "
                f"{error.reason or error}"
            ) from error
        if tls.certificate_file and tls.key_file:
            try:
                context.load_cert_chain(tls.certificate_file, tls.key_file, password=_no_password)
            except ssl.SSLError as error:
                raise InvalidRequest(
                    f"tls: certificate_file {tls.certificate_file} and key_file {tls.key_file} "
                    f"must be a certificate in PEM and its key: {error.reason or error}"
                ) from error
        self._context, self._files = context, files


def advice_for_plain(details: str) -> str:
    """The same for a client without TLS: a server with it just closes."""
    if "Socket closed" in details:
        return "if the server speaks TLS, the client needs tls=Tls(...)"
    return ""


def _read_blocking(name: str, path: str | PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"tls: {name} {path} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise InvalidRequest("tls: key_file is encrypted: nobody is there to type its password")
