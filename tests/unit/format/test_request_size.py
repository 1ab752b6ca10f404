"""What is no chunk hash is counted, by walking no further than the bound."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import MalformedMessage
from kvserve.format.messages import descriptor_to_pb
from kvserve.format.request_size import BESIDE_HASHES_BYTES_MAX, size_beside
from kvserve.model import LAYERS_MAX, Descriptor, Layout, ModelIdentity, opaque
from kvserve.v1 import kvserve_pb2 as pb
from tests.unit.samples import descriptor_of

FETCH, STORE = (1, 5), (1, 1, 5)


@given(chunks=st.integers(1, 300))
def test_chunk_hashes_count_for_nothing(chunks: int) -> None:
    message = descriptor_to_pb(descriptor_of(chunks=chunks))
    one = descriptor_to_pb(descriptor_of(chunks=1))
    fetch = [
        pb.FetchRequest(descriptor=it, layers=[1]).SerializeToString() for it in (message, one)
    ]
    store = [
        pb.StoreRequest(open=pb.StoreOpen(descriptor=it)).SerializeToString()
        for it in (message, one)
    ]
    # Only the fields that say how long the others are may grow, by a byte or two each.
    for (many, few), path in ((fetch, FETCH), (store, STORE)):
        grown = size_beside(many, path, 1 << 20) - size_beside(few, path, 1 << 20)
        assert 0 <= grown <= 6
        assert size_beside(few, path, 1 << 20) == len(few) - len(one.chunk_hashes)


def test_the_largest_honest_request_is_far_below_the_bound() -> None:
    layers = tuple(opaque((1 << 29) + n) for n in range(LAYERS_MAX))
    layout = Layout("float8_e4m3", 65_536, layers)
    identity = ModelIdentity("m" * 512, "r" * 512, layout, "a" * 512, "s" * 512)
    order = tuple(reversed(range(LAYERS_MAX)))
    descriptor = Descriptor(identity, (bytes(64),), tenant="t" * 64, layer_order=order)
    message = pb.FetchRequest(descriptor=descriptor_to_pb(descriptor), layers=order)
    beside = size_beside(message.SerializeToString(), FETCH, 1 << 30)
    assert beside < BESIDE_HASHES_BYTES_MAX * 0.9


@pytest.mark.parametrize(
    "raw",
    [
        b"\x48\x00" * 2_000_000,
        pb.FetchRequest(layers=[1] * 3_000_000).SerializeToString(),
        b"\x0a\x00" * 2_000_000,
        b"\x0a\x02\x2a\x00" * 1_000_000,
    ],
    ids=["unknown fields", "layers", "empty descriptors", "empty hashes"],
)
def test_the_walk_ends_at_the_bound(raw: bytes) -> None:
    started = time.thread_time()
    assert size_beside(raw, FETCH, BESIDE_HASHES_BYTES_MAX) > BESIDE_HASHES_BYTES_MAX
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize(
    "raw",
    [b"\x0a\x05\x2a", b"\x0a\x03\x2a\x09\x00\x00", b"\x80", b"\x09\x00", b"\x0b", b"\x0a\xff"],
)
def test_what_is_cut_short_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        size_beside(raw, FETCH, 1 << 20)


@given(st.binary(max_size=200))
def test_no_input_breaks_it(raw: bytes) -> None:
    try:
        beside = size_beside(raw, FETCH, 1 << 20)
    except MalformedMessage:
        return
    assert 0 <= beside <= len(raw)
