"""The server's certificate and key: read once at the start, for gRPC and for the data port."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvserve.config import ServerConfig
from kvserve.errors import InvalidRequest
from kvserve.tls_socket import server_context


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The same certificate, and the same demands on clients, for both."""

    credentials: grpc.ServerCredentials
    context: ssl.SSLContext


def load_tls_blocking(config: ServerConfig) -> ServerTls | None:
    """None without a certificate.

    Raises:
        InvalidRequest: a file that cannot be read or is not what its key says.
    """
    if not config.tls_certificate_file:
        return None
    chain = _read_blocking("server.tls_certificate_file", config.tls_certificate_file)
    key = _read_blocking("server.tls_key_file", config.tls_key_file)
    context = server_context()
    try:
        context.load_cert_chain(
            config.tls_certificate_file, config.tls_key_file, password=_no_password
        )
    except ssl.SSLError as error:
        raise InvalidRequest(
            f"server.tls_certificate_file {config.tls_certificate_file} and server.tls_key_file "
            f"{config.tls_key_file} must be a certificate in PEM and its key: "
            f"{error.reason or error}"
        ) from error
    client_ca = None
    if config.tls_client_ca_file:
        client_ca = _read_blocking("server.tls_client_ca_file", config.tls_client_ca_file)
        try:
            context.load_verify_locations(config.tls_client_ca_file)
        except ssl.SSLError as error:
            raise InvalidRequest(
                f"server.tls_client_ca_file {config.tls_client_ca_file} has no certificate in "
                f"PEM: {error.reason or error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    credentials = grpc.ssl_server_credentials(
        [(key, chain)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )
    return ServerTls(credentials, context)


def _read_blocking(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{key} {path} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise InvalidRequest("server.tls_key_file is encrypted: nobody is there to type its password")
