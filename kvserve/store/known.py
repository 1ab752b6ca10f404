"""Which chunks this server has seen on the tree lately, or has missed there, so that a lookup needs
no system call.

Staleness, stated: a chunk counts as there for `ttl_s` after its file was last seen. Within that
time one that another server deleted may still be answered as a hit; the fetch then reports the
miss. A chunk counts as absent for `absent_ttl_s` after it was missed; within that time one that
another server has stored may be answered as a miss. So `absent_ttl_s` is 0, off, unless it is set:
"stored" then means readable through every server at once. What this server itself publishes,
deletes, evicts or finds damaged is known at once.

A store does not ask here: it would acknowledge a chunk that is gone.

Memory: a 64-bit key and a shared time stamp a chunk; docs/benchmarks.md has the figure. Two chunks
with the same key (2**-64 for each pair) would be a false hit in a lookup, which the fetch reports
as a miss.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from math import inf
from typing import NamedTuple

import xxhash


class Epoch(NamedTuple):
    """How often something was discarded, and how often something appeared."""

    gone: int
    come: int


class KnownChunks:
    """Two bounded sets with expiry; the oldest entries go first. Safe from any thread."""

    def __init__(
        self,
        *,
        chunks_max: int,
        ttl_s: float,
        absent_ttl_s: float = 0.0,
        clock: Callable[[], float],
    ) -> None:
        self._chunks_max = chunks_max
        self._ttl_s = ttl_s
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._seen_at: dict[int, float] = {}
        self._missed_at: dict[int, float] = {}
        self._now = 0.0
        self._epoch = Epoch(0, 0)

    def __len__(self) -> int:
        return len(self._seen_at)

    def refresh(self) -> None:
        """Reads the clock, once for the many calls that follow; entries share the reading."""
        self._now = self._clock()

    def has(self, key: int) -> bool:
        return not self.unknown((key,))

    def lacks(self, key: int) -> bool:
        missed_at = self._missed_at.get(key)
        return missed_at is not None and self._now - missed_at <= self._absent_ttl_s

    def unknown(self, keys: Sequence[int]) -> list[int]:
        """Positions of the keys that `has` is not true of."""
        seen_at, oldest = self._seen_at.get, self._now - self._ttl_s
        return [at for at, key in enumerate(keys) if seen_at(key, -inf) < oldest]

    @property
    def epoch(self) -> Epoch:
        """Read it before looking at the tree, pass it to `add` or `add_absent`."""
        return self._epoch

    def add(self, key: int, epoch: Epoch) -> None:
        """The chunk was there at a time when `epoch` was read.

        Ignored if anything was discarded since: that may have been this chunk.
        """
        if epoch.gone == self._epoch.gone:
            self._put(self._seen_at, key)

    def add_absent(self, key: int, epoch: Epoch) -> None:
        """The chunk was not there; ignored if any chunk has appeared since."""
        if self._absent_ttl_s and epoch.come == self._epoch.come:
            self._put(self._missed_at, key)

    def appeared(self, key: int) -> None:
        """This server has stored the chunk; call it after the file is there."""
        self._epoch = Epoch(self._epoch.gone, self._epoch.come + 1)
        self._missed_at.pop(key, None)

    def discard(self, key: int) -> None:
        """The chunk is gone; call it after the file is."""
        self._epoch = Epoch(self._epoch.gone + 1, self._epoch.come)
        self._seen_at.pop(key, None)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._epoch = Epoch(self._epoch.gone + 1, self._epoch.come + 1)
        self._seen_at.clear()
        self._missed_at.clear()

    def _put(self, into: dict[int, float], key: int) -> None:
        # Out and in again, so that the dict's order is the order of age.
        into.pop(key, None)
        into[key] = self._now
        excess = len(into) - self._chunks_max
        if excess > 0:
            for oldest in list(islice(into, excess)):
                into.pop(oldest, None)


def known_key(shard_directory: str, chunk_hash: bytes) -> int:
    """The key of a chunk: its hash, seeded with where its shard is under the root."""
    return xxhash.xxh3_64_intdigest(chunk_hash, _seed(shard_directory))


@lru_cache(maxsize=1024)
def _seed(shard_directory: str) -> int:
    return xxhash.xxh3_64_intdigest(shard_directory.encode())
