"""Descriptors over the wire: nothing lost, nothing bad let in, cheap for 10,000 chunks."""

import time
from collections.abc import Callable

import pytest

from kvserve.errors import InvalidRequest, MalformedMessage
from kvserve.format.messages import (
    DETAILS_MAX,
    descriptor_from_pb,
    descriptor_to_pb,
    parse,
    verdicts_from_pb,
    verdicts_to_pb,
)
from kvserve.model import (
    LAYERS_MAX,
    ChunkStatus,
    Descriptor,
    LayerKind,
    Layout,
    Shard,
    Verdict,
    attention,
    latent,
)
from kvserve.v1 import kvserve_pb2 as pb
from tests.unit.samples import HYBRID, descriptor_of, hash_of, identity_of

CHUNKS_MAX = 65536


def over_the_wire(descriptor: Descriptor) -> Descriptor:
    packed = descriptor_to_pb(descriptor).SerializeToString()
    return descriptor_from_pb(pb.Descriptor.FromString(packed), chunks_max=CHUNKS_MAX)


@pytest.mark.parametrize(
    "descriptor",
    [
        descriptor_of(),
        descriptor_of(chunks=1, layout=HYBRID),
        descriptor_of(tenant="t-1", shard=Shard(3, 8)),
        descriptor_of(layout=HYBRID, layer_order=(2, 0, 1)),
        descriptor_of(layout=HYBRID, layer_order=(1,)),
        Descriptor(identity_of(adapter="lora/a", salt="s"), (hash_of(1, 16), hash_of(2, 16))),
        Descriptor(
            identity_of(Layout("int4", 7, (attention(1, 3), latent(5)) * 30, axes="a,b")),
            (hash_of(1, 64),),
        ),
    ],
)
def test_round_trip_keeps_everything(descriptor: Descriptor) -> None:
    assert over_the_wire(descriptor) == descriptor


def test_natural_order_and_equal_layers_cost_nothing_on_the_wire() -> None:
    layout = Layout("bfloat16", 16, (attention(8, 128),) * 80)
    message = descriptor_to_pb(descriptor_of(layout=layout))
    assert len(message.identity.layout.layers) == 1
    assert not message.layer_order


def test_10_000_chunks_fit_1_mib_and_take_milliseconds() -> None:
    """F2: descriptor lists of 15,000 entries have blocked engines for 0.6 s."""
    layout = Layout("bfloat16", 16, (attention(8, 128),) * 32)
    descriptor = Descriptor(identity_of(layout), tuple(hash_of(n) for n in range(10_000)))
    packed = descriptor_to_pb(descriptor).SerializeToString()
    assert len(packed) <= 1 << 20
    times = []
    for _ in range(5):
        started = time.perf_counter()
        assert over_the_wire(descriptor).chunk_count == 10_000
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1


def good() -> pb.Descriptor:
    return descriptor_to_pb(descriptor_of(chunks=3))


def edited(edit: Callable[[pb.Descriptor], object]) -> pb.Descriptor:
    message = good()
    edit(message)
    return message


def _layers(message: pb.Descriptor) -> pb.LayerRun:
    return message.identity.layout.layers[0]


BROKEN: dict[str, tuple[Callable[[pb.Descriptor], object], str]] = {
    "no tenant": (lambda m: setattr(m, "tenant", ""), "tenant '' must be"),
    "tenant leaves": (lambda m: setattr(m, "tenant", "../x"), "tenant '../x' must be"),
    "tenant NUL": (lambda m: setattr(m, "tenant", "a\0"), "tenant .* must be"),
    "no identity": (lambda m: m.ClearField("identity"), "layout|identity"),
    "no model": (lambda m: setattr(m.identity, "model", ""), "identity.model must not be empty"),
    "model NUL": (lambda m: setattr(m.identity, "model", "a\0b"), "identity.model .* NUL"),
    "long model": (lambda m: setattr(m.identity, "model", "x" * 5000), "5000 bytes long"),
    "no revision": (lambda m: setattr(m.identity, "revision", ""), "revision must not be empty"),
    "adapter": (lambda m: setattr(m.identity, "adapter", "/a"), "identity.adapter"),
    "salt": (lambda m: setattr(m.identity, "salt", "a\n"), "identity.salt"),
    "no shard": (lambda m: m.ClearField("shard"), "shard: rank must be"),
    "shard rank": (lambda m: setattr(m.shard, "rank", 1), "shard: .* got rank 1 of 1"),
    "dtype": (lambda m: setattr(m.identity.layout, "dtype", "bf16"), "dtype 'bf16' is unknown"),
    "axes": (lambda m: setattr(m.identity.layout, "axes", "A"), "layout.axes must be"),
    "no tokens": (lambda m: setattr(m.identity.layout, "chunk_tokens", 0), "chunk_tokens must be"),
    "tokens": (
        lambda m: setattr(m.identity.layout, "chunk_tokens", 2**32 - 1),
        "chunk_tokens must be 1 to 65536, got 4294967295",
    ),
    "no layers": (lambda m: m.identity.layout.ClearField("layers"), "layout.layers must be 1"),
    "no kind": (lambda m: setattr(_layers(m), "kind", 0), "unknown layer kind 0"),
    "new kind": (lambda m: setattr(_layers(m), "kind", 77), "unknown layer kind 77"),
    "kind of other": (lambda m: setattr(_layers(m), "kind", 2), "kv_heads must be 0 for LATENT"),
    "heads": (lambda m: setattr(_layers(m), "kv_heads", 0), "kv_heads must be 1 to"),
    "huge slice": (
        lambda m: (setattr(_layers(m), "kv_heads", 1 << 20), setattr(_layers(m), "head_dim", 4096)),
        "a slice of .* bytes; must be 1 to",
    ),
    "opaque": (lambda m: setattr(_layers(m), "opaque_bytes", 2**64 - 1), "opaque_bytes must be 0"),
    "many layers": (
        lambda m: setattr(_layers(m), "count", LAYERS_MAX + 1),
        "layout.layers must be 1 to 4096",
    ),
    "layer bomb": (lambda m: setattr(_layers(m), "count", 2**32 - 1), "layers must be 1 to 4096"),
    "no hash size": (lambda m: setattr(m, "hash_size_bytes", 0), "not a multiple of hash_size"),
    "hash size": (lambda m: setattr(m, "hash_size_bytes", 31), "96 bytes, not a multiple of .* 31"),
    "short hashes": (lambda m: setattr(m, "hash_size_bytes", 8), "a chunk hash of 8 bytes"),
    "long hashes": (lambda m: setattr(m, "hash_size_bytes", 96), "a chunk hash of 96 bytes"),
    "no hashes": (lambda m: m.ClearField("chunk_hashes"), "chunk_hashes is empty"),
    "hash twice": (
        lambda m: setattr(m, "chunk_hashes", m.chunk_hashes[:64] + m.chunk_hashes[:32]),
        r"chunk_hashes\[2\] .* is in the descriptor twice",
    ),
    "order": (lambda m: m.layer_order.extend([0, 2]), "layer_order holds layer 2"),
    "order twice": (lambda m: m.layer_order.extend([0, 0]), "layer_order holds a layer twice"),
    "order bomb": (lambda m: m.layer_order.extend([0] * 100_000), "holds a layer twice"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_on_the_wire_is_an_invalid_request_that_names_it(name: str) -> None:
    edit, words = BROKEN[name]
    with pytest.raises(InvalidRequest, match=words) as caught:
        descriptor_from_pb(edited(edit), chunks_max=CHUNKS_MAX)
    assert len(str(caught.value)) < 1000


def test_the_unbroken_message_is_accepted() -> None:
    """Else the test above could not fail for the right reason."""
    assert descriptor_from_pb(good(), chunks_max=3) == descriptor_of(chunks=3)


def test_more_chunks_than_the_server_takes() -> None:
    with pytest.raises(InvalidRequest, match="descriptor names 3 chunks; this server takes 2"):
        descriptor_from_pb(good(), chunks_max=2)


def test_tiny_hashes_are_no_way_round_the_chunk_limit() -> None:
    message = edited(lambda m: setattr(m, "hash_size_bytes", 1))
    with pytest.raises(InvalidRequest, match="descriptor names 96 chunks"):
        descriptor_from_pb(message, chunks_max=50)


def test_a_run_of_no_layers_is_refused() -> None:
    def add_empty_run(message: pb.Descriptor) -> None:
        message.identity.layout.layers.add(kind=pb.LAYER_KIND_LATENT, head_dim=8)

    with pytest.raises(InvalidRequest, match="a run of 0 layers"):
        descriptor_from_pb(edited(add_empty_run), chunks_max=CHUNKS_MAX)


def test_enum_values_of_model_and_wire_are_the_same() -> None:
    assert {kind.name: int(kind) for kind in LayerKind} == {
        name.removeprefix("LAYER_KIND_"): value
        for name, value in pb.LayerKind.items()
        if value != pb.LAYER_KIND_UNSPECIFIED
    }
    assert {status.name: int(status) for status in ChunkStatus} == {
        name.removeprefix("CHUNK_STATUS_"): value
        for name, value in pb.ChunkStatus.items()
        if value != pb.CHUNK_STATUS_UNSPECIFIED
    }


class TestVerdicts:
    def test_statuses_and_details_round_trip(self) -> None:
        verdicts = [
            Verdict(ChunkStatus.HIT),
            Verdict(ChunkStatus.MISS_CORRUPT, "checksum"),
            Verdict(ChunkStatus.MISS_ABSENT),
            Verdict(ChunkStatus.DELETED, "gone"),
        ]
        packed, details = verdicts_to_pb(verdicts)
        assert packed == bytes([1, 4, 2, 32])
        assert verdicts_from_pb(packed, details, 4) == verdicts

    def test_details_are_bounded_to_the_first(self) -> None:
        verdicts = [Verdict(ChunkStatus.MISS_ERROR, f"error {n}") for n in range(1000)]
        _, details = verdicts_to_pb(verdicts)
        assert [detail.chunk_index for detail in details] == list(range(DETAILS_MAX))

    @pytest.mark.parametrize("count", [1, 3])
    def test_another_number_of_statuses_is_malformed(self, count: int) -> None:
        with pytest.raises(MalformedMessage, match=f"2 chunk statuses came for {count} chunks"):
            verdicts_from_pb(b"\1\1", (), count)

    @pytest.mark.parametrize("status", [0, 9, 255])
    def test_a_status_of_another_version_is_malformed(self, status: int) -> None:
        with pytest.raises(MalformedMessage, match=f"chunk status {status} is unknown"):
            verdicts_from_pb(bytes([status]), (), 1)

    def test_bytes_that_are_no_message_are_malformed(self) -> None:
        with pytest.raises(MalformedMessage, match="a FetchReply is not well-formed"):
            parse(pb.FetchReply, b"\x0a\xff")
        assert parse(pb.ChunkMiss, b"\x08\x05").chunk_index == 5
