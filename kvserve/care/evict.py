"""Evicts chunks by tenant and age from the command line, beside running servers.

The rules are the servers' own (`store/evict.py`): what is leased or pinned stays, and servers learn
what is going before it goes. Their usage is corrected through the tree, too.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import SystemRandom

from kvserve.fs import FileSystem
from kvserve.policy.quota import Amount, Quotas
from kvserve.store.departures import Departures
from kvserve.store.evict import EvictionResult, Evictor
from kvserve.store.exchange import Exchange
from kvserve.store.known import KnownChunks
from kvserve.store.leases import Leases
from kvserve.store.ledger import Ledger
from kvserve.store.open_chunks import OpenChunks
from kvserve.store.owners import Owner
from kvserve.store.tree import FAN, Parts, walk_blocking
from kvserve.store.usage_files import UsageFiles


@dataclass(frozen=True, slots=True)
class EvictOptions:
    """`tenant`: only its chunks; empty for all. `unused_s`: only what nobody used for so long."""

    tenant: str = ""
    unused_s: float = 0.0
    only_counts: bool = False


def evict_blocking(
    fs: FileSystem, root: str, options: EvictOptions, *, owner_lease_s: float
) -> Iterator[EvictionResult]:
    """Yields the running counts after each directory. With `only_counts` nothing is evicted.

    Raises:
        StorageError: the tree cannot be used.
    """
    random = SystemRandom()
    owner = Owner(fs, root, random, lease_s=owner_lease_s, may_lead=False)
    owner.claim_blocking()
    try:
        ledger = Ledger(Quotas())
        evictor, exchange = _evictor(fs, root, owner, ledger, random)
        beat_at = time.monotonic()
        try:
            for result in _evict(fs, root, options, evictor):
                yield result
                # Else servers take this for dead and remove the file that tells them what goes.
                if time.monotonic() - beat_at > owner_lease_s / 3:
                    owner.beat_blocking()
                    beat_at = time.monotonic()
        finally:
            exchange.close_blocking()
            # Tells the servers what went; the next count of the tree makes the file superfluous.
            UsageFiles(fs, root, owner.tag).base_for(ledger.own_changes())
    finally:
        owner.release_blocking()


def _evict(
    fs: FileSystem, root: str, options: EvictOptions, evictor: Evictor
) -> Iterator[EvictionResult]:
    def wants(parts: Parts) -> bool:
        return not options.tenant or parts[0] == options.tenant

    result = EvictionResult()
    for directory in walk_blocking(fs, root, wants=wants):
        if directory.level != FAN:
            continue
        if options.only_counts:
            for candidate in evictor.expired_blocking(directory.path, options.unused_s):
                result.evicted += Amount(candidate.size_bytes, 1)
        else:
            evictor.expire_blocking(directory.path, options.unused_s, result)
        yield result


def _evictor(
    fs: FileSystem, root: str, owner: Owner, ledger: Ledger, random: SystemRandom
) -> tuple[Evictor, Exchange]:
    known = KnownChunks(chunks_max=0, ttl_s=0.0, clock=time.monotonic)
    exchange = Exchange(
        fs,
        root,
        owner.tag,
        leases=Leases(chunks_max=0, clock=time.time),
        departures=Departures(remembered_max=0, clock=time.time),
        known=known,
    )
    evictor = Evictor(
        fs,
        root,
        ledger=ledger,
        exchange=exchange,
        open_chunks=OpenChunks(fs, 0),
        known=known,
        random=random,
        clock=time.time,
    )
    return evictor, exchange
