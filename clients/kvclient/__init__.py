"""kvclient: store and fetch KV layer by layer from inside prefill and decode workers.

`AsyncClient` for asyncio programs, `Client` for engine worker threads; both hand out handles with
NIXL's life cycle. See README.md for twenty lines that use it.
"""

from kvclient import fork_support  # noqa: F401 - before anything that imports grpc

# isort: split
from kvclient.blocking import BlockingFetch, BlockingStore, Client
from kvclient.client import AsyncClient, Presence, ServerInfo
from kvclient.fetch import FetchHandle, FetchResult
from kvclient.fetch_session import LayerEvent
from kvclient.handle import HandleState
from kvclient.placement import LayerMajor, Paged, Placement
from kvclient.region import Region
from kvclient.shared_region import SharedRegion
from kvclient.store import StoreHandle, StoreResult
from kvclient.tls import Tls
from kvserve.errors import (
    DeadlineExceeded,
    HandleClosed,
    InvalidRequest,
    KvserveError,
    MessageTooLarge,
    Overloaded,
    QuotaExceeded,
    ServerFault,
    ServerUnavailable,
    StorageFull,
    StorageUnavailable,
    TransferCancelled,
)
from kvserve.model import (
    ChunkStatus,
    Descriptor,
    Layout,
    ModelIdentity,
    Shard,
    Verdict,
    attention,
    latent,
    opaque,
)
from kvserve.prefix import chunk_hashes

__all__ = [
    "AsyncClient",
    "BlockingFetch",
    "BlockingStore",
    "ChunkStatus",
    "Client",
    "DeadlineExceeded",
    "Descriptor",
    "FetchHandle",
    "FetchResult",
    "HandleClosed",
    "HandleState",
    "InvalidRequest",
    "KvserveError",
    "LayerEvent",
    "LayerMajor",
    "Layout",
    "MessageTooLarge",
    "ModelIdentity",
    "Overloaded",
    "Paged",
    "Placement",
    "Presence",
    "QuotaExceeded",
    "Region",
    "ServerFault",
    "ServerInfo",
    "ServerUnavailable",
    "Shard",
    "SharedRegion",
    "StorageFull",
    "StorageUnavailable",
    "StoreHandle",
    "StoreResult",
    "Tls",
    "TransferCancelled",
    "Verdict",
    "attention",
    "chunk_hashes",
    "latent",
    "opaque",
]
