"""protobuf messages <-> model, used by both ends of the wire.

Decoding checks everything by building the model's classes, so a message from any client ends as a
valid object or as `InvalidRequest`.
"""

from collections.abc import Sequence
from itertools import compress, islice
from operator import attrgetter
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvserve.errors import InvalidRequest, MalformedMessage
from kvserve.model import (
    LAYERS_MAX,
    ChunkStatus,
    Descriptor,
    LayerKind,
    LayerSpec,
    Layout,
    ModelIdentity,
    Shard,
    Verdict,
    layer_runs,
)
from kvserve.v1 import kvserve_pb2 as pb

M = TypeVar("M", bound=Message)

_KINDS: Final = frozenset(map(int, LayerKind))

DETAILS_MAX: Final = 16

SERVICE: Final = "kvserve.v1.KvServe"

_PLAIN: Final = {int(status): Verdict(status) for status in ChunkStatus}


def descriptor_to_pb(descriptor: Descriptor) -> pb.Descriptor:
    layout = descriptor.layout
    natural = descriptor.layer_order == tuple(range(layout.layer_count))
    identity = descriptor.identity
    return pb.Descriptor(
        tenant=descriptor.tenant,
        identity=pb.ModelIdentity(
            model=identity.model,
            revision=identity.revision,
            layout=pb.Layout(
                dtype=layout.dtype,
                axes=layout.axes,
                chunk_tokens=layout.chunk_tokens,
                layers=[
                    pb.LayerRun(
                        kind=pb.LayerKind.Name(int(spec.kind)),
                        count=count,
                        kv_heads=spec.kv_heads,
                        head_dim=spec.head_dim,
                        opaque_bytes=spec.opaque_bytes,
                    )
                    for spec, count in layer_runs(layout.layers)
                ],
            ),
            adapter=identity.adapter,
            salt=identity.salt,
        ),
        shard=pb.Shard(rank=descriptor.shard.rank, count=descriptor.shard.count),
        hash_size_bytes=len(descriptor.chunk_hashes[0]),
        chunk_hashes=b"".join(descriptor.chunk_hashes),
        layer_order=() if natural else descriptor.layer_order,
    )


def descriptor_from_pb(message: pb.Descriptor, *, chunks_max: int) -> Descriptor:
    """Raises `InvalidRequest` for whatever breaks a rule, `chunks_max` included."""
    size, packed = message.hash_size_bytes, message.chunk_hashes
    if not size or len(packed) % size:
        raise InvalidRequest(
            f"chunk_hashes holds {len(packed)} bytes, not a multiple of hash_size_bytes {size}"
        )
    if len(packed) // size > chunks_max:
        raise InvalidRequest(
            f"descriptor names {len(packed) // size} chunks; this server takes {chunks_max}"
        )
    layout = message.identity.layout
    if len(layout.layers) > LAYERS_MAX or sum(run.count for run in layout.layers) > LAYERS_MAX:
        raise InvalidRequest(f"layout.layers must be 1 to {LAYERS_MAX}")
    layers: list[LayerSpec] = []
    for run in layout.layers:
        if not run.count:
            raise InvalidRequest("layout.layers: a run of 0 layers")
        if run.kind not in _KINDS:
            raise InvalidRequest(f"layout.layers: unknown layer kind {run.kind}")
        spec = LayerSpec(LayerKind(run.kind), run.kv_heads, run.head_dim, run.opaque_bytes)
        layers.extend([spec] * run.count)
    return Descriptor(
        identity=ModelIdentity(
            model=message.identity.model,
            revision=message.identity.revision,
            layout=Layout(
                dtype=layout.dtype,
                axes=layout.axes,
                chunk_tokens=layout.chunk_tokens,
                layers=tuple(layers),
            ),
            adapter=message.identity.adapter,
            salt=message.identity.salt,
        ),
        chunk_hashes=tuple(packed[at : at + size] for at in range(0, len(packed), size)),
        tenant=message.tenant,
        shard=Shard(message.shard.rank, message.shard.count),
        layer_order=tuple(message.layer_order),
    )


def verdicts_to_pb(verdicts: Sequence[Verdict]) -> tuple[bytes, list[pb.ChunkDetail]]:
    """One status byte a chunk, and the first `DETAILS_MAX` verdicts that have more to say."""
    # Without a step of Python for each of maybe 65,536 chunks: this runs on the event loop.
    messages = list(map(attrgetter("message"), verdicts))
    telling = compress(enumerate(messages), messages)
    details = [
        pb.ChunkDetail(chunk_index=index, message=message)
        for index, message in islice(telling, DETAILS_MAX)
    ]
    return bytes(map(attrgetter("status"), verdicts)), details


def verdicts_from_pb(
    packed: bytes, details: Sequence[pb.ChunkDetail], chunk_count: int
) -> list[Verdict]:
    """Raises `MalformedMessage` for another number of chunks or an unknown status."""
    if len(packed) != chunk_count:
        raise MalformedMessage(f"{len(packed)} chunk statuses came for {chunk_count} chunks")
    try:
        verdicts = [_PLAIN[value] for value in packed]
    except KeyError as error:
        raise MalformedMessage(f"chunk status {error} is unknown to this version") from None
    for detail in details:
        if detail.chunk_index < chunk_count:
            status = verdicts[detail.chunk_index].status
            verdicts[detail.chunk_index] = Verdict(status, detail.message)
    return verdicts


def chunk_status(value: int) -> ChunkStatus:
    """Raises `MalformedMessage` for a status that this version does not know."""
    try:
        return ChunkStatus(value)
    except ValueError as error:
        raise MalformedMessage(f"chunk status {value} is unknown to this version") from error


def parse(kind: type[M], raw: bytes) -> M:
    """Raises `MalformedMessage` if `raw` is no message of this kind."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise MalformedMessage(f"a {kind.__name__} is not well-formed: {error}") from error
