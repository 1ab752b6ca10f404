"""Leases: chunks that a request has been promised, until it has fetched them or a time has passed.

A lookup grants a lease on its hits, owned by the request that the client names. While it lasts,
eviction leaves these chunks alone; a client's own delete does not. Releasing twice, or what has
expired, is harmless; nothing that a client forgets holds a chunk for longer than its ttl.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from kvserve.errors import Overloaded

LeaseOwner = tuple[str, str]
"""Tenant and request."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Chunks of one shard, by their keys."""

    keys: Sequence[int]
    expires_at: float
    granted_at: float


class Leases:
    """The leases that this server has granted. `clock`: wall time, since other servers read the
    expiry (`exchange.py`). Safe from any thread; does no I/O.

    The lock is held for one lease at a time, never for all of them: the event loop waits for it."""

    def __init__(self, *, chunks_max: int, clock: Callable[[], float]) -> None:
        self._chunks_max = chunks_max
        self.clock = clock
        self._lock = threading.Lock()
        # By owner, then by shard directory: a request of many ranks looks up each rank's chunks.
        self._by_owner: dict[LeaseOwner, dict[str, Lease]] = {}
        # By chunk: how many leases hold it.
        self._holders: dict[int, int] = {}
        self._chunks = 0

    def __repr__(self) -> str:
        return f"<Leases {len(self._by_owner)} requests, {self._chunks} chunks>"

    @property
    def chunks(self) -> int:
        """Leased chunks, counted once for each lease."""
        return self._chunks

    def grant(self, owner: LeaseOwner, shard: str, keys: Sequence[int], ttl_s: float) -> float:
        """Replaces what the owner held of this shard; returns when it expires, by the clock.

        Raises:
            Overloaded: more chunks would be leased than the bound allows; what was held still is.
        """
        expires_at = self._grant(owner, shard, keys, ttl_s)
        if expires_at is None:
            self.drop_expired()
            expires_at = self._grant(owner, shard, keys, ttl_s)
        if expires_at is None:
            raise Overloaded(
                f"{self._chunks} chunks are leased (capacity.leased_chunks_max); release some "
                "or retry when some have expired",
                retry_after_s=1.0,
            )
        return expires_at

    def narrow(self, owner: LeaseOwner, shard: str, keys: Sequence[int]) -> None:
        """The owner keeps only these of what it holds of this shard, until the same time; nothing
        if that was released or has expired meanwhile."""
        with self._lock:
            held = self._by_owner.get(owner, {}).get(shard)
            if held is not None:
                self._put(owner, shard, Lease(keys, held.expires_at, held.granted_at))

    def held(self, owner: LeaseOwner, shard: str) -> Lease | None:
        """What the owner holds of this shard."""
        with self._lock:
            return self._by_owner.get(owner, {}).get(shard)

    def put_back(self, owner: LeaseOwner, shard: str, held: Lease | None) -> None:
        """Undoes a grant: the owner holds again what it held of this shard before."""
        with self._lock:
            self._put(owner, shard, held or Lease((), 0.0, 0.0))

    def owners(self) -> list[LeaseOwner]:
        with self._lock:
            return list(self._by_owner)

    def chunks_of(self, owner: LeaseOwner) -> int:
        """How many chunks the owner holds."""
        with self._lock:
            return sum(len(lease.keys) for lease in self._by_owner.get(owner, {}).values())

    def release(self, owner: LeaseOwner, *, granted_before: float = inf) -> int:
        """How many chunks were given free; 0 if the owner has no lease (any more)."""
        with self._lock:
            shards = list(self._by_owner.get(owner, {}))
        return sum(
            self._drop_if(owner, shard, lambda lease: lease.granted_at <= granted_before)
            for shard in shards
        )

    def drop_expired(self) -> None:
        now = self.clock()
        with self._lock:
            expired = [
                (owner, shard)
                for owner, leases in self._by_owner.items()
                for shard, lease in leases.items()
                if lease.expires_at <= now
            ]
        for owner, shard in expired:
            self._drop_if(owner, shard, lambda lease: lease.expires_at <= now)

    def holds(self, key: int) -> bool:
        """Whether a lease that was not dropped holds the chunk."""
        with self._lock:  # else a lease that is being renewed could be missed
            return key in self._holders

    def records(self) -> list[tuple[int, float]]:
        """Every leased chunk with the time that its lease expires."""
        with self._lock:
            found = [lease for leases in self._by_owner.values() for lease in leases.values()]
        return [(key, lease.expires_at) for lease in found for key in lease.keys]

    def _grant(
        self, owner: LeaseOwner, shard: str, keys: Sequence[int], ttl_s: float
    ) -> float | None:
        """When it expires; None without room."""
        with self._lock:
            if self._chunks_without(owner, shard) + len(keys) > self._chunks_max:
                return None
            now = self.clock()
            lease = Lease(keys, now + ttl_s, now)
            self._put(owner, shard, lease)
            return lease.expires_at

    def _drop_if(self, owner: LeaseOwner, shard: str, is_due: Callable[[Lease], bool]) -> int:
        """Drops one lease, if it is still due: it may have been granted anew meanwhile."""
        with self._lock:
            held = self._by_owner.get(owner, {}).get(shard)
            return self._drop(owner, shard) if held is not None and is_due(held) else 0

    def _chunks_without(self, owner: LeaseOwner, shard: str) -> int:
        held = self._by_owner.get(owner, {}).get(shard)
        return self._chunks - (len(held.keys) if held is not None else 0)

    def _put(self, owner: LeaseOwner, shard: str, lease: Lease) -> None:
        self._drop(owner, shard)
        if not lease.keys:
            return
        self._by_owner.setdefault(owner, {})[shard] = lease
        self._chunks += len(lease.keys)
        for key in lease.keys:
            self._holders[key] = self._holders.get(key, 0) + 1

    def _drop(self, owner: LeaseOwner, shard: str) -> int:
        leases = self._by_owner.get(owner, {})
        lease = leases.pop(shard, None)
        if lease is None:
            return 0
        if not leases:
            del self._by_owner[owner]
        self._chunks -= len(lease.keys)
        for key in lease.keys:
            left = self._holders[key] - 1
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
        return len(lease.keys)
