"""What is moved and how it is named: layouts, identities, chunk keys, descriptors.

Pure and frozen. Every constructor checks its arguments and raises `InvalidRequest` naming the
field, so that an object of these classes is always valid; both ends of the wire rely on it.

Identity follows the rule that field reports taught (wrong KV comes from keys that leave something
out): the *namespace* is a SHA-256 over everything that changes the bytes or their meaning, in an
injective encoding, and the encoding itself is kept in every chunk file and compared on read.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Final

import msgpack

from kvserve.errors import InvalidRequest
from kvserve.names import check_hashes, check_name, check_tenant

LAYERS_MAX: Final = 4096
CHUNK_TOKENS_MAX: Final = 65_536
SLICE_SIZE_BYTES_MAX: Final = 1 << 30
SLICES_MAX: Final = 1 << 22
"""Chunks times layers in one descriptor: a transfer keeps a checksum for each."""

DTYPE_BITS: Final = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "float4_e2m1": 4,
    "int4": 4,
}


class ChunkStatus(IntEnum):
    """The state of one chunk in a reply; values as in `proto/kvserve/v1/kvserve.proto`."""

    HIT = 1
    MISS_ABSENT = 2
    MISS_IDENTITY = 3
    MISS_CORRUPT = 4
    MISS_ERROR = 5
    MISS_EVICTED = 6
    MISS_EXPIRED = 7
    MISS_TIMEOUT = 8
    NEEDED = 16
    STORED = 17
    KNOWN = 18
    INCOMPLETE = 19
    NO_SPACE = 20
    STORE_ERROR = 21
    DELETED = 32
    PINNED = 33
    UNPINNED = 34

    @property
    def is_miss(self) -> bool:
        """Looked for and not there, for whatever reason."""
        return self.name.startswith("MISS_")

    @property
    def is_stored(self) -> bool:
        """The chunk is whole on the server after this reply."""
        return self in (ChunkStatus.HIT, ChunkStatus.STORED, ChunkStatus.KNOWN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A chunk's status and, where there is more to say, one sentence for a person."""

    status: ChunkStatus
    message: str = ""


def leading_hits(verdicts: Sequence[Verdict]) -> int:
    """Length of the leading run of hits: the prefix that an engine may use."""
    for index, verdict in enumerate(verdicts):
        if verdict.status is not ChunkStatus.HIT:
            return index
    return len(verdicts)


def miss_counts(verdicts: Sequence[Verdict]) -> dict[ChunkStatus, int]:
    """How many chunks are misses, by reason."""
    reasons = Counter(verdict.status for verdict in verdicts)
    return {status: count for status, count in reasons.items() if status.is_miss}


class LayerKind(IntEnum):
    """What one layer keeps for a token; values as on the wire."""

    ATTENTION = 1
    LATENT = 2
    OPAQUE = 3


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open byte range [start, stop)."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shape of one layer's KV on one shard. Build it with `attention`, `latent`, `opaque`."""

    kind: LayerKind
    kv_heads: int = 0
    head_dim: int = 0
    opaque_bytes: int = 0

    def __post_init__(self) -> None:
        wants = {
            LayerKind.ATTENTION: (True, True, False),
            LayerKind.LATENT: (False, True, False),
            LayerKind.OPAQUE: (False, False, True),
        }
        if self.kind not in wants:
            raise InvalidRequest(f"layout.layers: unknown layer kind {self.kind!r}")
        fields = ("kv_heads", "head_dim", "opaque_bytes")
        for name, wanted in zip(fields, wants[self.kind], strict=True):
            value = getattr(self, name)
            if wanted and not 1 <= value <= SLICE_SIZE_BYTES_MAX:
                raise InvalidRequest(
                    f"layout.layers.{name} must be 1 to {SLICE_SIZE_BYTES_MAX} "
                    f"for {LayerKind(self.kind).name}, got {value}"
                )
            if not wanted and value:
                raise InvalidRequest(
                    f"layout.layers.{name} must be 0 for {LayerKind(self.kind).name}, got {value}"
                )


def attention(kv_heads: int, head_dim: int) -> LayerSpec:
    """K and V of MHA or GQA, with the KV heads that this shard holds."""
    return LayerSpec(LayerKind.ATTENTION, kv_heads=kv_heads, head_dim=head_dim)


def latent(width: int) -> LayerSpec:
    """MLA: one latent vector a token (`kv_lora_rank + qk_rope_head_dim` elements)."""
    return LayerSpec(LayerKind.LATENT, head_dim=width)


def opaque(size_bytes: int) -> LayerSpec:
    """`size_bytes` a chunk that only the engine understands (scales, recurrent state)."""
    return LayerSpec(LayerKind.OPAQUE, opaque_bytes=size_bytes)


@dataclass(frozen=True)
class Layout:
    """Shape of the stored bytes: `layers[i]` says what layer i keeps for `chunk_tokens` tokens.

    `axes` names the axis order inside a slice, such as "2,tokens,heads,dim"; kvserve never looks
    inside a slice, but another order is another identity. A chunk of fewer tokens (the partial end
    of a prompt) is padded to the full slice by the caller.
    """

    dtype: str
    chunk_tokens: int
    layers: tuple[LayerSpec, ...]
    axes: str = "2,tokens,heads,dim"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise InvalidRequest(
                f"layout.dtype {self.dtype[:64]!r} is unknown; use one of {', '.join(DTYPE_BITS)}"
            )
        if not 1 <= self.chunk_tokens <= CHUNK_TOKENS_MAX:
            raise InvalidRequest(
                f"layout.chunk_tokens must be 1 to {CHUNK_TOKENS_MAX}, got {self.chunk_tokens}"
            )
        if not 1 <= len(self.layers) <= LAYERS_MAX:
            raise InvalidRequest(f"layout.layers must be 1 to {LAYERS_MAX}, got {len(self.layers)}")
        if not re.fullmatch(r"[a-z0-9_,]{1,64}", self.axes):
            raise InvalidRequest(
                f"layout.axes must be 1 to 64 of a-z 0-9 _ and comma, got {self.axes[:80]!r}"
            )
        for index, size in enumerate(self.slice_sizes):
            if not 1 <= size <= SLICE_SIZE_BYTES_MAX:
                raise InvalidRequest(
                    f"layout.layers[{index}]: a slice of {size} bytes; "
                    f"must be 1 to {SLICE_SIZE_BYTES_MAX}"
                )

    @classmethod
    def uniform(
        cls, *, layer_count: int, spec: LayerSpec, dtype: str, chunk_tokens: int, axes: str = ""
    ) -> "Layout":
        """All layers alike."""
        if not 1 <= layer_count <= LAYERS_MAX:
            raise InvalidRequest(f"layer_count must be 1 to {LAYERS_MAX}, got {layer_count}")
        default = "tokens,dim" if spec.kind is LayerKind.LATENT else cls.axes
        return cls(dtype, chunk_tokens, (spec,) * layer_count, axes or default)

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @cached_property
    def slice_sizes(self) -> tuple[int, ...]:
        """Bytes of one chunk's slice, by layer: 2 * tokens * kv_heads * head_dim elements."""
        return tuple(self._slice_size(spec) for spec in self.layers)

    @cached_property
    def chunk_size_bytes(self) -> int:
        """Payload bytes of one chunk, all layers, without the file's header and padding."""
        return sum(self.slice_sizes)

    def _slice_size(self, spec: LayerSpec) -> int:
        if spec.kind is LayerKind.OPAQUE:
            return spec.opaque_bytes
        elements = self.chunk_tokens * spec.head_dim
        if spec.kind is LayerKind.ATTENTION:
            elements *= 2 * spec.kv_heads
        return (elements * DTYPE_BITS[self.dtype] + 7) // 8


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that changes the bytes or their meaning. Other identity: a miss, never a mix-up.

    `model` may be a hub id with `/`; `revision` must name the weights (a commit, a digest), since
    two checkpoints under one name give different KV.
    """

    model: str
    revision: str
    layout: Layout
    adapter: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        check_name("identity.model", self.model, may_be_empty=False)
        check_name("identity.revision", self.revision, may_be_empty=False)
        check_name("identity.adapter", self.adapter, may_be_empty=True)
        check_name("identity.salt", self.salt, may_be_empty=True)

    @cached_property
    def encoded(self) -> bytes:
        """Injective and stable encoding: a msgpack list, part of the chunk file format."""
        layout = self.layout
        layers = [
            [count, int(spec.kind), spec.kv_heads, spec.head_dim, spec.opaque_bytes]
            for spec, count in layer_runs(layout.layers)
        ]
        names = [self.model, self.revision, self.adapter, self.salt]
        shape = [layout.dtype, layout.axes, layout.chunk_tokens, layers]
        packed: bytes = msgpack.packb([1, *names, *shape])
        return packed

    @cached_property
    def namespace(self) -> str:
        """Hex SHA-256 of `encoded`, cut to 128 bits: the directory of this identity."""
        return hashlib.sha256(self.encoded).hexdigest()[:32]


def layer_runs(layers: Sequence[LayerSpec]) -> list[tuple[LayerSpec, int]]:
    """Run-length coding of equal neighbours, in order."""
    runs: list[tuple[LayerSpec, int]] = []
    for spec in layers:
        if runs and runs[-1][0] == spec:
            runs[-1] = (spec, runs[-1][1] + 1)
        else:
            runs.append((spec, 1))
    return runs


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor-parallel coordinates. MLA KV is the same on every rank: use `Shard(0, 1)`."""

    rank: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 65_536 or not 0 <= self.rank < self.count:
            raise InvalidRequest(
                f"shard: rank must be 0 to count - 1 and count 1 to 65536, "
                f"got rank {self.rank} of {self.count}"
            )


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The name of one stored chunk. Only `Descriptor.key` builds it, from checked parts."""

    tenant: str
    identity: ModelIdentity
    shard: Shard
    chunk_hash: bytes


@dataclass(frozen=True)
class Descriptor:
    """The chunks of a prefix, the layout, and the order layers are consumed in; no bytes.

    The shape is ObjectCache's layer-ordered descriptor (arXiv 2605.22850): layer l of chunk i lands
    at `payload offset of l + i * slice size`, one contiguous payload per layer.
    """

    identity: ModelIdentity
    chunk_hashes: tuple[bytes, ...]
    tenant: str = "default"
    shard: Shard = field(default_factory=Shard)
    layer_order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        check_hashes(self.chunk_hashes)
        if self.chunk_count * self.layout.layer_count > SLICES_MAX:
            raise InvalidRequest(
                f"{self.chunk_count} chunks of {self.layout.layer_count} layers are more than "
                f"{SLICES_MAX} slices: split the prefix into several descriptors"
            )
        order = self.layer_order or tuple(range(self.layout.layer_count))
        check_layers("layer_order", order, self.layout)
        object.__setattr__(self, "layer_order", order)

    @property
    def layout(self) -> Layout:
        return self.identity.layout

    @property
    def chunk_count(self) -> int:
        return len(self.chunk_hashes)

    @cached_property
    def payload_offsets(self) -> tuple[int, ...]:
        """Where layer i's payload starts in a region laid out [layer][chunk], by layer index."""
        offsets, at = [], 0
        for size in self.layout.slice_sizes:
            offsets.append(at)
            at += size * self.chunk_count
        return tuple(offsets)

    @property
    def payload_size_bytes(self) -> int:
        """Bytes of all layers of all chunks."""
        return self.layout.chunk_size_bytes * self.chunk_count

    def key(self, chunk_index: int) -> ChunkKey:
        return ChunkKey(self.tenant, self.identity, self.shard, self.chunk_hashes[chunk_index])


def check_layers(name: str, layers: Sequence[int], layout: Layout) -> None:
    """Each layer in range and at most once."""
    if len(layers) > layout.layer_count or len(set(layers)) != len(layers):
        raise InvalidRequest(f"{name} holds a layer twice")
    for layer_index in layers:
        if not 0 <= layer_index < layout.layer_count:
            raise InvalidRequest(
                f"{name} holds layer {layer_index}; this layout has layers 0 to "
                f"{layout.layer_count - 1}"
            )
