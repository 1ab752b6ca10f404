"""Which chunks this server has seen on the tree lately, so that a lookup needs no system call.

Staleness, stated: an entry is trusted for `ttl_s` after the file was last seen. Within that time a
chunk that another server deleted may still be answered as a hit; the fetch then reports the miss.
What this server itself publishes, deletes or finds damaged is known at once. Absence is never
cached: a chunk that any server has published is found by the next lookup.

A store does not ask here: it would acknowledge a chunk that is gone.

Memory: a 64-bit key and a shared time stamp a chunk, about 120 bytes in a dict. Two chunks with the
same key (2**-64 for each pair) would be a false hit in a lookup, which the fetch reports as a miss.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import islice

import xxhash


class KnownChunks:
    """A bounded set with expiry; the oldest entries go first. Safe from any thread."""

    def __init__(self, *, chunks_max: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._chunks_max = chunks_max
        self._ttl_s = ttl_s
        self._clock = clock
        self._seen_at: dict[int, float] = {}
        self._now = 0.0
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._seen_at)

    def refresh(self) -> None:
        """Reads the clock, once for the many calls that follow; entries share the reading."""
        self._now = self._clock()

    def has(self, key: int) -> bool:
        seen_at = self._seen_at.get(key)
        return seen_at is not None and self._now - seen_at <= self._ttl_s

    @property
    def epoch(self) -> int:
        """Read it before looking at the tree, pass it to `add`."""
        return self._epoch

    def add(self, key: int, epoch: int) -> None:
        """The chunk was there at a time when `epoch` was read.

        Ignored if anything was discarded since: that may have been this chunk.
        """
        if epoch != self._epoch:
            return
        # Out and in again, so that the dict's order is the order of age.
        self._seen_at.pop(key, None)
        self._seen_at[key] = self._now
        excess = len(self._seen_at) - self._chunks_max
        if excess > 0:
            for oldest in list(islice(self._seen_at, excess)):
                self._seen_at.pop(oldest, None)

    def discard(self, key: int) -> None:
        """The chunk is gone; call it after the file is."""
        self._epoch += 1
        self._seen_at.pop(key, None)


def known_key(shard_directory: str, chunk_hash: bytes) -> int:
    """The key of a chunk: its hash, seeded with where its shard is."""
    return xxhash.xxh3_64_intdigest(chunk_hash, _seed(shard_directory))


@lru_cache(maxsize=1024)
def _seed(shard_directory: str) -> int:
    return xxhash.xxh3_64_intdigest(shard_directory.encode())
