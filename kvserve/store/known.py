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
from itertools import islice


class KnownChunks:
    """A bounded set with expiry; the oldest entries go first. Safe from any thread."""

    def __init__(self, *, chunks_max: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._chunks_max = chunks_max
        self._ttl_s = ttl_s
        self._clock = clock
        self._seen_at: dict[int, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._seen_at)

    def refresh(self) -> None:
        """Reads the clock, once for the many calls that follow; entries share the reading."""
        self._now = self._clock()

    def has(self, key: int) -> bool:
        seen_at = self._seen_at.get(key)
        return seen_at is not None and self._now - seen_at <= self._ttl_s

    def add(self, key: int) -> None:
        # Out and in again, so that the dict's order is the order of age.
        self._seen_at.pop(key, None)
        self._seen_at[key] = self._now
        excess = len(self._seen_at) - self._chunks_max
        if excess > 0:
            for oldest in list(islice(self._seen_at, excess)):
                self._seen_at.pop(oldest, None)

    def discard(self, key: int) -> None:
        self._seen_at.pop(key, None)
