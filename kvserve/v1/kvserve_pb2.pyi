from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChunkStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_STATUS_UNSPECIFIED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_HIT: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_ABSENT: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_IDENTITY: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_CORRUPT: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_ERROR: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_EVICTED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_EXPIRED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_MISS_TIMEOUT: _ClassVar[ChunkStatus]
    CHUNK_STATUS_NEEDED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_STORED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_KNOWN: _ClassVar[ChunkStatus]
    CHUNK_STATUS_INCOMPLETE: _ClassVar[ChunkStatus]
    CHUNK_STATUS_NO_SPACE: _ClassVar[ChunkStatus]
    CHUNK_STATUS_STORE_ERROR: _ClassVar[ChunkStatus]
    CHUNK_STATUS_DELETED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_PINNED: _ClassVar[ChunkStatus]
    CHUNK_STATUS_UNPINNED: _ClassVar[ChunkStatus]

class LayerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_KIND_UNSPECIFIED: _ClassVar[LayerKind]
    LAYER_KIND_ATTENTION: _ClassVar[LayerKind]
    LAYER_KIND_LATENT: _ClassVar[LayerKind]
    LAYER_KIND_OPAQUE: _ClassVar[LayerKind]
CHUNK_STATUS_UNSPECIFIED: ChunkStatus
CHUNK_STATUS_HIT: ChunkStatus
CHUNK_STATUS_MISS_ABSENT: ChunkStatus
CHUNK_STATUS_MISS_IDENTITY: ChunkStatus
CHUNK_STATUS_MISS_CORRUPT: ChunkStatus
CHUNK_STATUS_MISS_ERROR: ChunkStatus
CHUNK_STATUS_MISS_EVICTED: ChunkStatus
CHUNK_STATUS_MISS_EXPIRED: ChunkStatus
CHUNK_STATUS_MISS_TIMEOUT: ChunkStatus
CHUNK_STATUS_NEEDED: ChunkStatus
CHUNK_STATUS_STORED: ChunkStatus
CHUNK_STATUS_KNOWN: ChunkStatus
CHUNK_STATUS_INCOMPLETE: ChunkStatus
CHUNK_STATUS_NO_SPACE: ChunkStatus
CHUNK_STATUS_STORE_ERROR: ChunkStatus
CHUNK_STATUS_DELETED: ChunkStatus
CHUNK_STATUS_PINNED: ChunkStatus
CHUNK_STATUS_UNPINNED: ChunkStatus
LAYER_KIND_UNSPECIFIED: LayerKind
LAYER_KIND_ATTENTION: LayerKind
LAYER_KIND_LATENT: LayerKind
LAYER_KIND_OPAQUE: LayerKind

class LayerRun(_message.Message):
    __slots__ = ("kind", "count", "kv_heads", "head_dim", "opaque_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: LayerKind
    count: int
    kv_heads: int
    head_dim: int
    opaque_bytes: int
    def __init__(self, kind: _Optional[_Union[LayerKind, str]] = ..., count: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., opaque_bytes: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("dtype", "axes", "chunk_tokens", "layers")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    axes: str
    chunk_tokens: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerRun]
    def __init__(self, dtype: _Optional[str] = ..., axes: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerRun, _Mapping]]] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("model", "revision", "layout", "adapter", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    layout: Layout
    adapter: str
    salt: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("rank", "count")
    RANK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    count: int
    def __init__(self, rank: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Descriptor(_message.Message):
    __slots__ = ("tenant", "identity", "shard", "hash_size_bytes", "chunk_hashes", "layer_order")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    HASH_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAYER_ORDER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    identity: ModelIdentity
    shard: Shard
    hash_size_bytes: int
    chunk_hashes: bytes
    layer_order: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[str] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., hash_size_bytes: _Optional[int] = ..., chunk_hashes: _Optional[bytes] = ..., layer_order: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkDetail(_message.Message):
    __slots__ = ("chunk_index", "message")
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    chunk_index: int
    message: str
    def __init__(self, chunk_index: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoReply(_message.Message):
    __slots__ = ("version", "capabilities", "limits", "file_system", "chunk_file_version", "data_address")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FILE_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FILE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    file_system: str
    chunk_file_version: int
    data_address: str
    def __init__(self, version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., file_system: _Optional[str] = ..., chunk_file_version: _Optional[int] = ..., data_address: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("chunks_max", "message_size_bytes_max", "frame_size_bytes_max", "transfers_max", "lease_ttl_s_max")
    CHUNKS_MAX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_MAX_FIELD_NUMBER: _ClassVar[int]
    chunks_max: int
    message_size_bytes_max: int
    frame_size_bytes_max: int
    transfers_max: int
    lease_ttl_s_max: float
    def __init__(self, chunks_max: _Optional[int] = ..., message_size_bytes_max: _Optional[int] = ..., frame_size_bytes_max: _Optional[int] = ..., transfers_max: _Optional[int] = ..., lease_ttl_s_max: _Optional[float] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("descriptor", "lease_owner", "lease_ttl_s", "all_ranks")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    LEASE_OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    ALL_RANKS_FIELD_NUMBER: _ClassVar[int]
    descriptor: Descriptor
    lease_owner: str
    lease_ttl_s: float
    all_ranks: bool
    def __init__(self, descriptor: _Optional[_Union[Descriptor, _Mapping]] = ..., lease_owner: _Optional[str] = ..., lease_ttl_s: _Optional[float] = ..., all_ranks: bool = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("prefix_chunks", "chunk_statuses", "details", "leased_chunks")
    PREFIX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    LEASED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    prefix_chunks: int
    chunk_statuses: bytes
    details: _containers.RepeatedCompositeFieldContainer[ChunkDetail]
    leased_chunks: int
    def __init__(self, prefix_chunks: _Optional[int] = ..., chunk_statuses: _Optional[bytes] = ..., details: _Optional[_Iterable[_Union[ChunkDetail, _Mapping]]] = ..., leased_chunks: _Optional[int] = ...) -> None: ...

class PayloadFrame(_message.Message):
    __slots__ = ("layer_index", "first_chunk", "slice_offset", "checksums", "payload")
    LAYER_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SLICE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    layer_index: int
    first_chunk: int
    slice_offset: int
    checksums: bytes
    payload: bytes
    def __init__(self, layer_index: _Optional[int] = ..., first_chunk: _Optional[int] = ..., slice_offset: _Optional[int] = ..., checksums: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class DataOffer(_message.Message):
    __slots__ = ("address", "secret")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    address: str
    secret: bytes
    def __init__(self, address: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class KeptConnection(_message.Message):
    __slots__ = ("secret", "region")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    region: bytes
    def __init__(self, secret: _Optional[bytes] = ..., region: _Optional[bytes] = ...) -> None: ...

class StoreOpen(_message.Message):
    __slots__ = ("descriptor", "planes")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    descriptor: Descriptor
    planes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, descriptor: _Optional[_Union[Descriptor, _Mapping]] = ..., planes: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreFinish(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("open", "payload", "finish")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    open: StoreOpen
    payload: PayloadFrame
    finish: StoreFinish
    def __init__(self, open: _Optional[_Union[StoreOpen, _Mapping]] = ..., payload: _Optional[_Union[PayloadFrame, _Mapping]] = ..., finish: _Optional[_Union[StoreFinish, _Mapping]] = ...) -> None: ...

class StoreNeeds(_message.Message):
    __slots__ = ("chunk_statuses", "frame_size_bytes_max", "plane", "data")
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    chunk_statuses: bytes
    frame_size_bytes_max: int
    plane: str
    data: DataOffer
    def __init__(self, chunk_statuses: _Optional[bytes] = ..., frame_size_bytes_max: _Optional[int] = ..., plane: _Optional[str] = ..., data: _Optional[_Union[DataOffer, _Mapping]] = ...) -> None: ...

class LayerStored(_message.Message):
    __slots__ = ("layer_index",)
    LAYER_INDEX_FIELD_NUMBER: _ClassVar[int]
    layer_index: int
    def __init__(self, layer_index: _Optional[int] = ...) -> None: ...

class StoreResult(_message.Message):
    __slots__ = ("chunk_statuses", "details")
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    chunk_statuses: bytes
    details: _containers.RepeatedCompositeFieldContainer[ChunkDetail]
    def __init__(self, chunk_statuses: _Optional[bytes] = ..., details: _Optional[_Iterable[_Union[ChunkDetail, _Mapping]]] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("needs", "layer_stored", "result")
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_STORED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    needs: StoreNeeds
    layer_stored: LayerStored
    result: StoreResult
    def __init__(self, needs: _Optional[_Union[StoreNeeds, _Mapping]] = ..., layer_stored: _Optional[_Union[LayerStored, _Mapping]] = ..., result: _Optional[_Union[StoreResult, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("descriptor", "layers", "planes", "kept")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    descriptor: Descriptor
    layers: _containers.RepeatedScalarFieldContainer[int]
    planes: _containers.RepeatedScalarFieldContainer[str]
    kept: KeptConnection
    def __init__(self, descriptor: _Optional[_Union[Descriptor, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ..., planes: _Optional[_Iterable[str]] = ..., kept: _Optional[_Union[KeptConnection, _Mapping]] = ...) -> None: ...

class FetchHead(_message.Message):
    __slots__ = ("chunk_statuses", "details", "plane", "data")
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    PLANE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    chunk_statuses: bytes
    details: _containers.RepeatedCompositeFieldContainer[ChunkDetail]
    plane: str
    data: DataOffer
    def __init__(self, chunk_statuses: _Optional[bytes] = ..., details: _Optional[_Iterable[_Union[ChunkDetail, _Mapping]]] = ..., plane: _Optional[str] = ..., data: _Optional[_Union[DataOffer, _Mapping]] = ...) -> None: ...

class ChunkMiss(_message.Message):
    __slots__ = ("chunk_index", "status", "message")
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    chunk_index: int
    status: ChunkStatus
    message: str
    def __init__(self, chunk_index: _Optional[int] = ..., status: _Optional[_Union[ChunkStatus, str]] = ..., message: _Optional[str] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("head", "payload", "miss")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    head: FetchHead
    payload: PayloadFrame
    miss: ChunkMiss
    def __init__(self, head: _Optional[_Union[FetchHead, _Mapping]] = ..., payload: _Optional[_Union[PayloadFrame, _Mapping]] = ..., miss: _Optional[_Union[ChunkMiss, _Mapping]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("descriptor",)
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    descriptor: Descriptor
    def __init__(self, descriptor: _Optional[_Union[Descriptor, _Mapping]] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("chunk_statuses", "details")
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    chunk_statuses: bytes
    details: _containers.RepeatedCompositeFieldContainer[ChunkDetail]
    def __init__(self, chunk_statuses: _Optional[bytes] = ..., details: _Optional[_Iterable[_Union[ChunkDetail, _Mapping]]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("descriptor",)
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    descriptor: Descriptor
    def __init__(self, descriptor: _Optional[_Union[Descriptor, _Mapping]] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("chunk_statuses",)
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    chunk_statuses: bytes
    def __init__(self, chunk_statuses: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("tenant", "lease_owner")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_OWNER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    lease_owner: str
    def __init__(self, tenant: _Optional[str] = ..., lease_owner: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released_chunks",)
    RELEASED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    released_chunks: int
    def __init__(self, released_chunks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("descriptor",)
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    descriptor: Descriptor
    def __init__(self, descriptor: _Optional[_Union[Descriptor, _Mapping]] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("chunk_statuses",)
    CHUNK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    chunk_statuses: bytes
    def __init__(self, chunk_statuses: _Optional[bytes] = ...) -> None: ...
