"""Trees of very many chunk files, made in seconds: right in name and size, and empty inside.

A lookup takes such a file for a chunk, since it asks for the size only; a fetch would not. They
take inodes and no space.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvserve.format.chunk_file import ChunkGeometry
from kvserve.model import Descriptor, Layout, ModelIdentity, opaque
from kvserve.store.paths import chunk_path, shard_dir

LOOKUP_CHUNKS = 64
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY

_IDENTITY = ModelIdentity(
    "kvserve-many",
    "1",
    Layout.uniform(layer_count=1, spec=opaque(4096), dtype="uint8", chunk_tokens=16),
)


def many_descriptor(hashes: Sequence[bytes]) -> Descriptor:
    return Descriptor(_IDENTITY, tuple(hashes))


def many_hashes(start: int, stop: int) -> list[bytes]:
    """The names of the chunks `start` to `stop`; as evenly spread as those of any engine."""
    return [hashlib.sha256(number.to_bytes(8, "big")).digest() for number in range(start, stop)]


class ManyChunks:
    """The chunks 0 to `count` of one shard under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0
        first = many_descriptor(many_hashes(0, 1)).key(0)
        self._size_bytes = ChunkGeometry(first).file_size_bytes
        self._shard = f"{root}/{shard_dir(first)}"

    @property
    def size_bytes(self) -> int:
        """What `ls` says of them all together."""
        return self.count * self._size_bytes

    def grow_blocking(self, count: int) -> None:
        """Makes the files that are missing up to `count`."""
        for chunk_hash in many_hashes(self.count, count):
            path = chunk_path(self._shard, chunk_hash)
            try:
                fd = os.open(path, _NEW, 0o644)
            except FileNotFoundError:
                os.makedirs(path.rpartition("/")[0])
                fd = os.open(path, _NEW, 0o644)
            os.ftruncate(fd, self._size_bytes)
            os.close(fd)
        self.count = count

    @property
    def lookups(self) -> int:
        """How many lookups ask for all of them."""
        return -(-self.count // LOOKUP_CHUNKS)

    def descriptor(self, index: int) -> Descriptor:
        """Of one of these lookups."""
        start = index * LOOKUP_CHUNKS
        return many_descriptor(many_hashes(start, min(start + LOOKUP_CHUNKS, self.count)))

    def entries_max_blocking(self) -> int:
        """Entries of the fullest directory: a fan, or the one that they are in."""
        fans = os.listdir(self._shard)
        return max(len(fans), *(len(os.listdir(f"{self._shard}/{fan}")) for fan in fans))
