"""Where the chunks of a descriptor lie on the tree. Does no I/O."""

from collections.abc import Sequence
from functools import cached_property

from kvserve.format.chunk_file import ChunkGeometry
from kvserve.model import Descriptor
from kvserve.store.known import known_key
from kvserve.store.paths import chunk_path, shard_dir


class ChunkLocations:
    """Paths and geometry of one descriptor's chunks."""

    def __init__(self, root: str, descriptor: Descriptor) -> None:
        first = descriptor.key(0)
        self.descriptor = descriptor
        self.geometry = ChunkGeometry(first)
        self.shard = shard_dir(first)
        self._directory = f"{root}/{self.shard}"

    def __repr__(self) -> str:
        return f"<ChunkLocations {self.descriptor.chunk_count} chunks under {self._directory}>"

    @cached_property
    def known_keys(self) -> list[int]:
        """By chunk: its key in `KnownChunks`, the same for every server of the tree."""
        return [known_key(self.shard, it) for it in self.descriptor.chunk_hashes]

    def known_key(self, chunk_index: int) -> int:
        return known_key(self.shard, self.descriptor.chunk_hashes[chunk_index])

    def path(self, chunk_index: int) -> str:
        return chunk_path(self._directory, self.descriptor.chunk_hashes[chunk_index])

    @cached_property
    def paths(self) -> Sequence[str]:
        """By chunk; made once and kept for the next request."""
        return [chunk_path(self._directory, it) for it in self.descriptor.chunk_hashes]
