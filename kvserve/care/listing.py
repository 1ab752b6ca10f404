"""The chunks of a tree, one after another, as the walk finds them: never all in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.care.identity_file import NamespaceIdentity, read_namespace_blocking
from kvserve.errors import StorageError
from kvserve.fs import REFUSED, FileSystem
from kvserve.store.tree import FAN, NAMESPACE, TENANT, Parts, is_chunk_name, walk_blocking


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which chunks to list; empty wants all. `namespace` is the start of the directory's name,
    `model` the whole id. Directories that cannot match are not entered."""

    tenant: str = ""
    namespace: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """`path` is relative to the root; `modified_at` by the file system's clock."""

    path: str
    size_bytes: int
    modified_at: float
    namespace: NamespaceIdentity


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A directory or file that the file system refuses."""

    path: str
    reason: str


def chunks_blocking(fs: FileSystem, root: str, wanted: Wanted) -> Iterator[ListedChunk | Unlisted]:
    """Chunks in the order of directories; in no order within one.

    Files are not opened: whether they are good, `fsck` tells.
    """
    namespace = NamespaceIdentity("")

    def wants_blocking(parts: Parts) -> bool:
        nonlocal namespace
        if len(parts) == TENANT:
            return wanted.tenant in ("", parts[-1])
        if len(parts) != NAMESPACE:
            return True
        if not parts[-1].startswith(wanted.namespace):
            return False
        namespace = read_namespace_blocking(fs, "/".join((root, *parts)))
        return wanted.model in ("", namespace.model)

    for directory in walk_blocking(fs, root, wants=wants_blocking):
        place = "/".join(directory.parts)
        try:
            for entry in directory.entries():
                if directory.level == FAN and entry.kind == "file" and is_chunk_name(entry.name):
                    found = _listed(fs, root, f"{place}/{entry.name}", namespace)
                    if found is not None:
                        yield found
        except REFUSED as error:
            yield Unlisted(place, str(error))


def _listed(
    fs: FileSystem, root: str, place: str, namespace: NamespaceIdentity
) -> ListedChunk | Unlisted | None:
    try:
        info = fs.stat(f"{root}/{place}")
    except StorageError as error:
        return Unlisted(place, str(error))
    if info is None:
        return None
    return ListedChunk(place, info.size_bytes, info.modified_at, namespace)
