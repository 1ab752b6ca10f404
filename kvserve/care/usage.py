"""What takes the space of a tree: files and bytes by namespace, and beside the chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvserve.care.identity_file import NamespaceIdentity, read_namespace_blocking
from kvserve.errors import StorageError
from kvserve.fs import REFUSED, FileSystem
from kvserve.store.paths import IDENTITY_NAME, QUARANTINE_DIR, temp_owner
from kvserve.store.tree import (
    FAN,
    NAMESPACE,
    ROOT,
    SHARD,
    TENANT,
    Directory,
    is_chunk_name,
    is_ours,
    walk_blocking,
)


@dataclass(slots=True)
class DiskUse:
    """`disk_bytes` is what the files take on the disk: holes and padding make the difference."""

    files: int = 0
    size_bytes: int = 0
    disk_bytes: int = 0

    def add(self, other: "DiskUse") -> None:
        self.files += other.files
        self.size_bytes += other.size_bytes
        self.disk_bytes += other.disk_bytes


@dataclass(slots=True)
class NamespaceUsage:
    """The chunks of one identity of one tenant."""

    tenant: str
    identity: NamespaceIdentity
    shards: list[str] = field(default_factory=list)
    chunks: DiskUse = field(default_factory=DiskUse)


@dataclass(slots=True)
class Usage:
    """The whole tree. `unreadable` counts directories and files that could not be asked."""

    namespaces: list[NamespaceUsage] = field(default_factory=list)
    quarantine: DiskUse = field(default_factory=DiskUse)
    temporaries: DiskUse = field(default_factory=DiskUse)
    unknown: int = 0
    unreadable: int = 0

    def tenants(self) -> dict[str, DiskUse]:
        """Chunks by tenant, in the order of their names."""
        found: dict[str, DiskUse] = {}
        for namespace in self.namespaces:
            found.setdefault(namespace.tenant, DiskUse()).add(namespace.chunks)
        return found

    def chunks(self) -> DiskUse:
        total = DiskUse()
        for namespace in self.namespaces:
            total.add(namespace.chunks)
        return total


def usage_blocking(fs: FileSystem, root: str) -> Iterator[Usage]:
    """Measures a tree; yields the same growing usage after each directory, whole at the end.

    Raises:
        StorageError: the root cannot be listed.
    """
    usage = Usage()
    _measure_quarantine(fs, f"{root}/{QUARANTINE_DIR}", usage)
    for directory in walk_blocking(fs, root):
        if directory.level == NAMESPACE:
            identity = read_namespace_blocking(fs, directory.path)
            usage.namespaces.append(NamespaceUsage(directory.parts[0], identity))
        elif directory.level == SHARD:
            usage.namespaces[-1].shards.append(directory.parts[-1])
        try:
            _measure(fs, directory, usage)
        except REFUSED:
            if directory.level == ROOT:
                raise
            usage.unreadable += 1
        yield usage


def _measure(fs: FileSystem, directory: Directory, usage: Usage) -> None:
    for entry in directory.entries():
        path = f"{directory.path}/{entry.name}"
        if entry.kind == "directory" and directory.level < FAN:
            is_dot = directory.level < TENANT and entry.name.startswith(".")
            usage.unknown += not (is_dot or is_ours((*directory.parts, entry.name)))
        elif entry.kind == "file" and temp_owner(entry.name) is not None:
            _add(fs, path, usage.temporaries, usage)
        elif entry.kind == "file" and directory.level == FAN and is_chunk_name(entry.name):
            _add(fs, path, usage.namespaces[-1].chunks, usage)
        elif not (directory.level == NAMESPACE and entry.name == IDENTITY_NAME):
            usage.unknown += 1


def _measure_quarantine(fs: FileSystem, directory: str, usage: Usage) -> None:
    try:
        for entry in fs.scan(directory):
            if entry.kind == "file":
                _add(fs, f"{directory}/{entry.name}", usage.quarantine, usage)
    except REFUSED:
        usage.unreadable += 1


def _add(fs: FileSystem, path: str, amount: DiskUse, usage: Usage) -> None:
    try:
        info = fs.stat(path)
    except StorageError:
        usage.unreadable += 1
        return
    if info is not None:
        amount.add(DiskUse(1, info.size_bytes, info.disk_bytes))
