"""Which chunks go first; pure.

Least recently used, and of one prefix the tail before the head: a chunk is of no use without all
that come before it. Both are in one number that the file itself carries, its time of last use: the
chunk at place i of a prefix is stamped as if it were used `i * DEPTH_STEP_S` earlier. So a prefix
is taken from its tail, and a head that many prefixes share is as young as the last of them.

No list of all chunks is kept. As in Redis' approximated LRU, the evictor looks at the files of some
random directories and takes the oldest part of that sample; chunk hashes are spread evenly over
directories, so every sample is a fair picture of the tree.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvserve.policy.quota import Amount

DEPTH_STEP_S = 1 / 64
"""2,000 chunks deep is half a minute: small against the ages that eviction compares, and visible
where times are kept in whole seconds only."""

SAMPLE_MIN = 256
"""Chunks looked at before some are taken; a smaller tree is looked at whole."""

TAKEN_OF_SAMPLE = 4
"""One in so many of a sample is taken: the oldest quarter."""

POOL_MAX = 1024
"""Chunks of earlier samples that are kept for comparison with later ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk file that may be evicted."""

    tenant: str
    directory: str
    name: str
    size_bytes: int
    used_at: float


def use_stamp(used_at: float, chunk_index: int) -> float:
    """The time of last use of the chunk at this place of a prefix that is used now."""
    return used_at - chunk_index * DEPTH_STEP_S


def choose(
    pool: Iterable[Candidate], excess: Amount, *, chunks_max: int
) -> tuple[list[Candidate], list[Candidate]]:
    """The oldest, just enough to remove `excess` from bytes and from files, `chunks_max` at most;
    and the pool for the next sample, the oldest of the others."""
    oldest = sorted(pool, key=lambda it: (it.used_at, it.directory, it.name))
    size_bytes = count = 0
    for candidate in oldest[:chunks_max]:
        if size_bytes >= excess.size_bytes and count >= excess.files:
            break
        count += 1
        size_bytes += candidate.size_bytes
    return oldest[:count], oldest[count : count + POOL_MAX]
