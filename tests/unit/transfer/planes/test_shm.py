"""Spans of shared memory: every part of a payload in its place, whatever the pieces."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import InvalidRequest
from kvserve.format.records import (
    REGION_SIZE_BYTES,
    RegionHead,
    decode_region,
    decode_spans,
    encode_region,
)
from kvserve.transfer.planes.shared_memory import PayloadSpans, SharedPayload


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_parts_land_in_their_spans_and_are_read_there(sizes: list[int], random: Random) -> None:
    """Spans in any order with holes between them; the payload in parts of any size."""
    places = list(range(len(sizes)))
    random.shuffle(places)
    offsets, at = [0] * len(sizes), 0
    for place in places:
        at += random.randint(0, 5)
        offsets[place] = at
        at += sizes[place]
    memory = bytearray(b"\xaa") * (at + 3)
    expected = bytearray(memory)
    payload = random.randbytes(sum(sizes))
    start = 0
    for offset, size in zip(offsets, sizes, strict=True):
        expected[offset : offset + size] = payload[start : start + size]
        start += size
    target = SharedPayload(memoryview(memory), PayloadSpans(offsets, sizes))
    cuts = sorted({0, len(payload), *(random.randint(0, len(payload)) for _ in range(4))})
    parts = [(a, payload[a:b]) for a, b in pairwise(cuts)]
    random.shuffle(parts)
    for begin, part in parts:
        target.write(begin, memoryview(part))
    assert memory == expected
    for begin, part in parts:
        into = bytearray(len(part))
        target.read(begin, memoryview(into))
        assert into == part
    for begin in (1, len(payload) + 1, 2**64):
        with pytest.raises(InvalidRequest, match=f"bytes at byte {begin} of the payload"):
            target.read(begin, memoryview(bytearray(len(payload))))
    target.close()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1))
def test_spans_on_the_wire(spans: list[tuple[int, int]]) -> None:
    head = RegionHead(has_memory=True, span_count=len(spans), memory_size_bytes=7)
    raw = encode_region(head, spans)
    assert decode_region(raw[:REGION_SIZE_BYTES]) == head
    offsets, sizes = decode_spans(raw[REGION_SIZE_BYTES:])
    assert list(zip(offsets, sizes, strict=True)) == spans
