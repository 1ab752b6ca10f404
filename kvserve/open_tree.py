"""Opens a root: all that one server process needs of its tree, put together from the settings."""

import logging
import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from kvserve.config import CapacityConfig, Config, StoreConfig
from kvserve.errors import InvalidRequest, KvserveError
from kvserve.fs import FileSystem, open_file_system_blocking
from kvserve.policy.quota import Amount, Quotas, TenantQuota
from kvserve.store.chunk_store import ChunkStore, StorePolicy
from kvserve.store.departures import Departures
from kvserve.store.evict import Evictor
from kvserve.store.exchange import Exchange
from kvserve.store.known import KnownChunks
from kvserve.store.leases import Leases
from kvserve.store.ledger import Ledger
from kvserve.store.open_chunks import OpenChunks
from kvserve.store.owners import Owner
from kvserve.store.paths import TempNames
from kvserve.store.quarantine import Quarantine
from kvserve.store.recency import Recency
from kvserve.store.usage_files import UsageFiles

log = logging.getLogger(__name__)

# What the process needs beside chunk files: sockets, data connections and the memory that clients
# share over them, the loop's own, libraries.
_OTHER_FILES = 1536

_REMEMBERED_MAX = 1 << 16
"""Evicted chunks whose misses can say so."""


@dataclass(frozen=True, slots=True)
class OpenTree:
    """An open root."""

    store: ChunkStore
    owner: Owner
    file_system: str
    ledger: Ledger
    usage_files: UsageFiles
    exchange: Exchange
    evictor: Evictor
    recency: Recency
    quarantine: Quarantine


def open_tree_blocking(config: Config, fs: FileSystem | None = None) -> OpenTree:
    """The store on a root that was just written to, and this server's claim on it.

    `fs`: instead of the one that the root lies on.

    Raises:
        InvalidRequest: no root, or one that cannot be written; the message names path, uid, errno.
    """
    if not config.store.root:
        raise InvalidRequest("store.root is not set: pass --root DIR or set it in the config")
    root = os.path.abspath(config.store.root)
    if os.path.exists(root) and not os.path.isdir(root):
        raise InvalidRequest(f"the root {root} (store.root) is no directory")
    # Names need not be secret, only different: seeded from the system once.
    random = Random(os.urandom(16))
    owner: Owner | None = None
    try:
        fs = fs or open_file_system_blocking(root, config.lustre)
        owner = Owner(fs, root, random, lease_s=config.store.owner_lease_s)
        owner.claim_blocking()
        tree = build_tree(fs, root, config, owner, random, file_system=fs.kind(root))
        tree.store.check_root_blocking()
        tree.ledger.set_base(tree.usage_files.base_for({}))
        tree.exchange.read_departures_blocking()
        return tree
    except KvserveError as error:
        if owner is not None:
            with suppress(KvserveError):  # it expires, too
                owner.release_blocking()
        raise InvalidRequest(
            f"the root {root} cannot be used by uid {os.getuid()}: {error}"
        ) from error


def build_tree(
    fs: FileSystem,
    root: str,
    config: Config,
    owner: Owner,
    random: Random,
    *,
    file_system: str = "",
) -> OpenTree:
    """Puts the parts together; does no I/O."""
    store, capacity = config.store, config.capacity
    ledger = Ledger(quotas_of(config))
    known = KnownChunks(
        chunks_max=store.known_chunks_max,
        ttl_s=store.known_ttl_s,
        absent_ttl_s=store.known_absent_ttl_s,
        clock=time.monotonic,
    )
    departures = Departures(remembered_max=_REMEMBERED_MAX, clock=time.time)
    leases = Leases(chunks_max=capacity.leased_chunks_max, clock=time.time)
    exchange = Exchange(fs, root, owner.tag, leases=leases, departures=departures, known=known)
    open_chunks = OpenChunks(fs, _raise_file_limit(store.open_files_max))
    quarantine = Quarantine(fs, root, size_bytes_max=store.quarantine_size_bytes_max)
    return OpenTree(
        ChunkStore(
            fs,
            root,
            policy=_policy(store, capacity),
            open_chunks=open_chunks,
            names=TempNames(owner.tag, random),
            known=known,
            ledger=ledger,
            departures=departures,
            quarantine=quarantine,
        ),
        owner,
        file_system,
        ledger,
        UsageFiles(fs, root, owner.tag),
        exchange,
        Evictor(
            fs,
            root,
            ledger=ledger,
            exchange=exchange,
            open_chunks=open_chunks,
            known=known,
            random=random,
            clock=time.time,
        ),
        Recency(fs, interval_s=capacity.touch_interval_s),
        quarantine,
    )


def quotas_of(config: Config) -> Quotas:
    """The limits that the settings ask for."""
    capacity = config.capacity
    ceiling = Amount(capacity.tenant_size_bytes_max, capacity.tenant_files_max)
    return Quotas(
        total=Amount(capacity.size_bytes_max, capacity.files_max),
        high_watermark=capacity.high_watermark,
        low_watermark=capacity.low_watermark,
        default=TenantQuota(ceiling),
        tenants={
            name: TenantQuota(
                Amount(
                    tenant.size_bytes_max or ceiling.size_bytes,
                    tenant.files_max or ceiling.files,
                ),
                tenant.size_bytes_floor,
            )
            for name, tenant in config.tenants.items()
        },
    )


def _policy(store: StoreConfig, capacity: CapacityConfig) -> StorePolicy:
    return StorePolicy(survives_power_loss=store.durability == "power", ttl_s=capacity.ttl_s)


def _raise_file_limit(open_files_max: int) -> int:
    """Lifts the soft limit on descriptors as far as needed and allowed; returns what is usable."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = open_files_max + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    usable = open_files_max if soft == resource.RLIM_INFINITY else min(open_files_max, soft)
    if usable + _OTHER_FILES > soft != resource.RLIM_INFINITY:
        usable = max(16, soft - _OTHER_FILES)
        log.warning("store.open_files_max is %d here: RLIMIT_NOFILE allows %d", usable, soft)
    return usable
