"""The file `identity` of a namespace, as care reads it: whether it is the one that its directory
is named after, and what it says. Never shows a salt."""

import hashlib
from dataclasses import dataclass

from kvserve.errors import KvserveError, MalformedMessage
from kvserve.format.identity import ENCODED_SIZE_BYTES_MAX, decode_identity
from kvserve.fs import FileSystem
from kvserve.model import ModelIdentity
from kvserve.store.paths import IDENTITY_NAME
from kvserve.store.small_file import read_small_blocking


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """What is known of a namespace. `identity` is None for a file that is missing, damaged, of
    another namespace or of a later version."""

    directory_name: str
    encoded: bytes | None = None
    identity: ModelIdentity | None = None
    fault: str = ""

    @property
    def is_whole(self) -> bool:
        """The file holds what the directory is named after, readable by this version or not."""
        if self.encoded is None:
            return False
        return hashlib.sha256(self.encoded).hexdigest()[:32] == self.directory_name

    @property
    def model(self) -> str:
        return self.identity.model if self.identity is not None else ""

    @property
    def summary(self) -> str:
        """One line for a person."""
        if self.identity is None:
            return self.fault or "no identity file"
        found = self.identity
        adapter = f" adapter {found.adapter}" if found.adapter else ""
        return f"{found.model}@{found.revision} {found.layout.dtype}{adapter}"


def read_namespace_blocking(fs: FileSystem, directory: str) -> NamespaceIdentity:
    """Never fails: what cannot be read is said in `fault`."""
    name = directory.rpartition("/")[2]
    try:
        encoded = read_small_blocking(fs, f"{directory}/{IDENTITY_NAME}", ENCODED_SIZE_BYTES_MAX)
    except KvserveError as error:
        return NamespaceIdentity(name, fault=str(error))
    if encoded is None:
        return NamespaceIdentity(name)
    try:
        identity = decode_identity(encoded)
    except MalformedMessage as error:
        return NamespaceIdentity(name, encoded, fault=f"the identity file is unreadable: {error}")
    if identity.namespace != name:
        fault = f"the identity file is that of {identity.namespace}"
        return NamespaceIdentity(name, encoded, fault=fault)
    return NamespaceIdentity(name, encoded, identity)
