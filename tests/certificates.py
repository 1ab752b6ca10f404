"""Certificates of a test run, as the files that settings and clients name."""

import ssl
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

from kvclient import Tls
from kvserve.tls_socket import client_context, server_context


class Certificates:
    """A CA that servers and clients of the tests trust, and one that nobody does."""

    def __init__(self, directory: Path, *hosts: str) -> None:
        """`hosts`: what the server's certificate is for; by default this host."""
        self._directory = directory
        authority, stranger = trustme.CA(), trustme.CA()
        self.ca = self._written("ca.pem", authority.cert_pem)
        self.strange_ca = self._written("strange-ca.pem", stranger.cert_pem)
        self.server, self.server_key = self._issued(
            "server", authority, *(hosts or ("127.0.0.1", "localhost"))
        )
        self.client, self.client_key = self._issued("client", authority, "worker.example")
        self.stranger, self.stranger_key = self._issued("stranger", stranger, "worker.example")

    @property
    def encrypted_key(self) -> Path:
        """The server's key behind a password."""
        key = serialization.load_pem_private_key(self.server_key.read_bytes(), None)
        path = self._directory / "encrypted.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"open sesame"),
            )
        )
        return path

    @property
    def settings(self) -> dict[str, object]:
        """[server] of a server with TLS."""
        return {
            "tls_certificate_file": str(self.server),
            "tls_key_file": str(self.server_key),
        }

    @property
    def mutual(self) -> dict[str, object]:
        """The same, and clients must show a certificate."""
        return {**self.settings, "tls_client_ca_file": str(self.ca)}

    @property
    def tls(self) -> Tls:
        """A client that trusts the server and shows nothing."""
        return Tls(root_certificates_file=self.ca)

    @property
    def shown(self) -> Tls:
        """A client that also shows its certificate."""
        return Tls(self.ca, certificate_file=self.client, key_file=self.client_key)

    def server_context(self) -> ssl.SSLContext:
        context = server_context()
        context.load_cert_chain(self.server, self.server_key)
        return context

    def client_context(self, ca: Path | None = None) -> ssl.SSLContext:
        context = client_context()
        context.load_verify_locations(ca or self.ca)
        return context

    def _issued(self, name: str, ca: trustme.CA, *hosts: str) -> tuple[Path, Path]:
        leaf = ca.issue_cert(*hosts)
        key = self._written(f"{name}.key", leaf.private_key_pem)
        return self._written(f"{name}.pem", leaf.cert_chain_pems[0]), key

    def _written(self, name: str, blob: trustme.Blob) -> Path:
        path = self._directory / name
        blob.write_to_path(str(path))
        return path
