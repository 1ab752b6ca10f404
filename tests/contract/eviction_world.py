"""Servers on one real tree whose every file system call can be stepped, and what they do to it."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvserve.format.chunk_file import checksum
from kvserve.model import Descriptor
from kvserve.open_tree import OpenTree
from kvserve.policy.eviction import Candidate
from kvserve.store.chunk_store import HIT, ChunkLocations
from kvserve.store.evict import EvictionResult
from kvserve.testing.stepped_fs import SteppedFileSystem
from tests.trees import tree_on
from tests.unit.samples import SMALL, descriptor_of, slice_of

LONG_S = 600.0


class EvictingServer:
    """One of the servers on a tree, with short words for what it does."""

    def __init__(
        self,
        root: Path,
        tag: str,
        *,
        fs: SteppedFileSystem | None = None,
        chunks: int = 3,
        tenant: str = "default",
        **sections: dict[str, object],
    ) -> None:
        self.fs = fs or SteppedFileSystem()
        self.tree: OpenTree = tree_on(root, self.fs, tag=tag, **sections)
        self.descriptor: Descriptor = descriptor_of(chunks, tenant=tenant)
        self.where: ChunkLocations = self.tree.store.locate(self.descriptor)
        self.indexes = range(chunks)

    def put(self, *indexes: int) -> None:
        for index in indexes or self.indexes:
            writer = self.tree.store.writer(self.where, index)
            slices = [slice_of(layer, index, size) for layer, size in enumerate(SMALL.slice_sizes)]
            for layer, data in enumerate(slices):
                writer.write_blocking(layer, 0, memoryview(data))
            writer.commit_blocking([checksum(data) for data in slices])

    def there(self) -> set[int]:
        return {it for it in self.indexes if os.path.exists(self.where.path(it))}

    def used(self, index: int, ago_s: float) -> None:
        """The chunk was used so long ago."""
        at = time.time() - ago_s
        os.utime(self.where.path(index), (at, at))

    def lease(
        self, request: str = "r", *, among: Iterable[int] | None = None, ttl_s: float = LONG_S
    ) -> set[int]:
        """The hits of a lookup with a lease, as the service does it."""
        indexes = list(self.indexes if among is None else among)
        keys = [self.where.known_key(index) for index in indexes]
        owner, exchange = (self.descriptor.tenant, request), self.tree.exchange
        exchange.grant_blocking(owner, self.where.shard, keys, ttl_s)
        store = self.tree.store
        hits = [it for it in indexes if store.leased_status_blocking(self.where, it) is HIT]
        kept = [self.where.known_key(index) for index in hits]
        exchange.narrow(owner, self.where.shard, kept)
        return set(hits)

    def release(self, request: str = "r") -> int:
        return self.tree.exchange.release((self.descriptor.tenant, request))

    def candidates(self) -> list[Candidate]:
        found: list[Candidate] = []
        for index in self.indexes:
            path = self.where.path(index)
            seen = self.fs.stat(path)
            if seen is not None and not seen.is_marked:
                directory, _, name = path.rpartition("/")
                tenant = self.descriptor.tenant
                found.append(Candidate(tenant, directory, name, seen.size_bytes, seen.modified_at))
        return found

    def evict(self, candidates: Sequence[Candidate] | None = None) -> EvictionResult:
        """Tries to evict these chunks, all of the descriptor unless told otherwise."""
        result = EvictionResult()
        chosen = self.candidates() if candidates is None else candidates
        self.tree.evictor.evict_blocking(chosen, result, for_others=False)
        return result

    def picked(self) -> set[int]:
        """Chunks of which this server believes that they are about to be evicted."""
        is_leaving = self.tree.exchange.departures.is_leaving
        return {it for it in self.indexes if is_leaving(self.where.known_key(it))}

    def close(self) -> None:
        self.tree.exchange.close_blocking()
        self.tree.store.open_chunks.close_idle_blocking()
