"""A slice is good only if every byte of it is, however it is cut into frames."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.format.chunk_file import checksum
from kvserve.format.verify import SliceVerifier


def feed(verifier: SliceVerifier, data: bytes, cuts: list[int], expected: int) -> bool:
    """Feeds `data` cut at `cuts`; the verdict at its end, with every earlier piece taken."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    for start, stop in pairwise(edges):
        is_good = verifier.check(
            memoryview(data)[start:stop],
            slice_offset=start,
            ends_slice=stop == len(data),
            expected=expected,
        )
        if stop < len(data):
            assert is_good, "an unfinished slice is not judged"
    return is_good


slices = st.binary(min_size=1, max_size=200)
cuts_lists = st.lists(st.integers(1, 199), max_size=5)


@given(slices, cuts_lists)
def test_a_good_slice_is_good_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    assert feed(SliceVerifier(), data, cuts, checksum(data))


@given(slices, cuts_lists, st.data())
def test_one_flipped_bit_is_found_however_it_is_cut(
    data: bytes, cuts: list[int], draw: st.DataObject
) -> None:
    damaged = bytearray(data)
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert not feed(SliceVerifier(), bytes(damaged), cuts, checksum(data))


@given(st.lists(st.tuples(slices, cuts_lists, st.booleans()), max_size=6))
def test_one_slice_does_not_colour_the_next(
    sequence: list[tuple[bytes, list[int], bool]],
) -> None:
    verifier = SliceVerifier()
    for data, cuts, is_good in sequence:
        expected = checksum(data) if is_good else checksum(data) ^ 1
        assert feed(verifier, data, cuts, expected) is is_good


def test_a_slice_given_up_in_the_middle_is_forgotten() -> None:
    """A chunk that turns bad has no more frames; the next chunk starts afresh."""
    verifier = SliceVerifier()
    half, whole = memoryview(b"half"), Random(1).randbytes(100)
    assert verifier.check(half, slice_offset=0, ends_slice=False, expected=0)
    assert feed(verifier, whole, [50], checksum(whole))


@pytest.mark.parametrize(
    ("data", "known"),
    [
        (b"", 0x2D06800538D394C2),  # the reference implementation's value of nothing at all
        (b"kvserve", 0xAA7D45ACBDFA5CB9),
        (bytes(64), 0x2FFB6918C12C256E),
        (bytes(range(256)) * 16, 0xEB4B7C3707879151),
    ],
)
def test_the_checksum_is_xxh3_64_with_seed_0(data: bytes, known: int) -> None:
    """On disks and on the wire: never to change."""
    assert checksum(data) == known
    assert checksum(bytearray(data)) == checksum(memoryview(data)) == known
