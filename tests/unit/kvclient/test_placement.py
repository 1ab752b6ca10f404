"""Slices to memory: one after another, or scattered over an engine's blocks."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.placement import LayerMajor, Paged, as_placement
from kvclient.region import Region
from kvserve.errors import InvalidRequest
from kvserve.model import Span
from tests.unit.samples import HYBRID, SMALL, descriptor_of

SIZE = SMALL.slice_sizes[0]


def numbered(size: int) -> bytearray:
    """Every byte tells its address (mod 251)."""
    return bytearray(at % 251 for at in range(size))


class TestLayerMajor:
    def test_a_slice_is_at_the_payload_offset_plus_its_chunks(self) -> None:
        descriptor = descriptor_of(chunks=3, layout=HYBRID)
        buffer = bytearray(descriptor.payload_size_bytes)
        placement = LayerMajor(buffer, descriptor)
        for layer_index, size in enumerate(HYBRID.slice_sizes):
            for chunk_index in range(3):
                (view,) = placement.views(layer_index, chunk_index, 1, Span(0, size))
                view[:] = bytes([10 * layer_index + chunk_index + 1]) * size
        expected = b"".join(
            bytes([10 * layer + chunk + 1]) * size
            for layer, size in enumerate(HYBRID.slice_sizes)
            for chunk in range(3)
        )
        assert buffer == expected

    def test_consecutive_chunks_are_one_view(self) -> None:
        descriptor = descriptor_of(chunks=4)
        placement = LayerMajor(bytearray(descriptor.payload_size_bytes), descriptor)
        (view,) = placement.views(1, 1, 3, Span(0, SIZE))
        assert len(view) == 3 * SIZE

    def test_a_piece_of_a_slice(self) -> None:
        descriptor = descriptor_of(chunks=2)
        placement = LayerMajor(numbered(descriptor.payload_size_bytes), descriptor)
        (view,) = placement.views(1, 1, 1, Span(10, 20))
        start = 2 * SIZE + SIZE + 10
        assert bytes(view) == bytes(at % 251 for at in range(start, start + 10))

    def test_offset_shifts_everything(self) -> None:
        descriptor = descriptor_of(chunks=2)
        buffer = bytearray(descriptor.payload_size_bytes + 100)
        placement = LayerMajor(buffer, descriptor, offset_bytes=100)
        placement.views(0, 0, 1, Span(0, SIZE))[0][:] = b"x" * SIZE
        assert buffer[:100] == bytes(100)
        assert buffer[100 : 100 + SIZE] == b"x" * SIZE

    def test_some_layers_only_in_the_order_given(self) -> None:
        descriptor = descriptor_of(chunks=2, layout=HYBRID)
        size = 2 * (HYBRID.slice_sizes[2] + HYBRID.slice_sizes[0])
        buffer = bytearray(size)
        placement = LayerMajor(buffer, descriptor, layers=[2, 0])
        placement.views(2, 0, 2, Span(0, 100))[0][:] = b"c" * 200
        placement.views(0, 0, 2, Span(0, 256))[0][:] = b"a" * 512
        assert buffer == b"c" * 200 + b"a" * 512
        with pytest.raises(InvalidRequest, match="layer 1 has no place in this region"):
            placement.views(1, 0, 1, Span(0, 192))

    @pytest.mark.parametrize(
        ("size", "options", "words"),
        [
            (
                1023,
                {},
                "the region has 1023 bytes, but 2 layers of 2 chunks from offset 0 need 1024",
            ),
            (0, {}, "the region has 0 bytes"),
            (1024, {"offset_bytes": 1}, "from offset 1 need 1025"),
            (2048, {"offset_bytes": -1}, "from offset -1"),
            (511, {"layers": [1]}, "but 1 layers of 2 chunks from offset 0 need 512"),
            (1024, {"layers": [2]}, "layer 2 is out of range; this layout has layers 0 to 1"),
            (1024, {"layers": [-1]}, "layer -1 is out of range"),
        ],
    )
    def test_a_region_that_does_not_fit_is_refused(
        self, size: int, options: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=words):
            LayerMajor(bytearray(size), descriptor_of(chunks=2), **options)

    def test_a_region_of_just_the_size_is_enough(self) -> None:
        assert LayerMajor(bytearray(1024), descriptor_of(chunks=2)).region.size_bytes == 1024


class TestPaged:
    @given(
        st.integers(1, 4),
        st.sampled_from([1, 2, 4, 8]),
        st.data(),
    )
    def test_views_are_the_pieces_of_the_slices_in_byte_order(
        self, chunks: int, blocks_a_chunk: int, data: st.DataObject
    ) -> None:
        """Model: copy the slices into blocks by the doc's rule, read any span through views."""
        descriptor = descriptor_of(chunks=chunks)
        block = SIZE // blocks_a_chunk
        count = chunks * blocks_a_chunk
        order = data.draw(st.permutations(range(count + 2)))[:count]
        region = bytearray((count + 2) * block)
        slices = [bytes((chunk * 64 + at) % 256 for at in range(SIZE)) for chunk in range(chunks)]
        for n, place in enumerate(order):
            piece = slices[n // blocks_a_chunk][(n % blocks_a_chunk) * block :][:block]
            region[place * block : place * block + block] = piece
        placement = Paged(region, descriptor, [[], [place * block for place in order]])
        chunk_index = data.draw(st.integers(0, chunks - 1))
        start = data.draw(st.integers(0, SIZE - 1))
        stop = data.draw(st.integers(start + 1, SIZE))
        piece = b"".join(placement.views(1, chunk_index, 1, Span(start, stop)))
        assert piece == slices[chunk_index][start:stop]
        count_read = data.draw(st.integers(1, chunks - chunk_index))
        whole = b"".join(placement.views(1, chunk_index, count_read, Span(0, SIZE)))
        assert whole == b"".join(slices[chunk_index : chunk_index + count_read])

    def test_views_are_written_through(self) -> None:
        descriptor = descriptor_of(chunks=1)
        region = bytearray(4 * SIZE)
        placement = Paged(region, descriptor, [[3 * SIZE // 2, 0], []])
        for view in placement.views(0, 0, 1, Span(0, SIZE)):
            view[:] = b"k" * len(view)
        half = SIZE // 2
        assert region.count(b"k") == SIZE
        assert region[:half] == region[3 * half : 4 * half] == b"k" * half

    @pytest.mark.parametrize(
        ("addresses", "words"),
        [
            ([[0, 256]], "addresses for 1 layers, layout has 2"),
            ([[0, 256], [512, 768], []], "addresses for 3 layers, layout has 2"),
            ([[0], []], "layer 0: 1 block addresses do not divide 2 slices of 256 bytes"),
            ([[0, 256, 512], []], "layer 0: 3 block addresses do not divide 2 slices"),
            ([[128 * n for n in range(6)], []], "6 block addresses do not divide 2 slices of 256"),
            ([[], [0, 769]], "layer 1: the block of 256 bytes at 769 leaves the region of 1024"),
            ([[-1, 256], []], "layer 0: the block of 256 bytes at -1 leaves the region"),
            ([[0, 255], []], r"blocks overlap: 256 bytes at 0 \(layer 0\) and at 255"),
            ([[512, 512], []], r"blocks overlap: 256 bytes at 512 \(layer 0\) and at 512"),
            ([[0, 128, 300, 172], []], r"blocks overlap: 128 bytes at 128 \(layer 0\) and at 172"),
        ],
    )
    def test_addresses_that_do_not_fit_are_refused(
        self, addresses: list[list[int]], words: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=words):
            Paged(bytearray(1024), descriptor_of(chunks=2), addresses)

    def test_blocks_of_two_layers_that_overlap_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="overlap"):
            Paged(bytearray(1024), descriptor_of(chunks=2), [[0, 256], [256, 512]])

    def test_a_layer_without_blocks_has_no_views(self) -> None:
        placement = Paged(bytearray(1024), descriptor_of(chunks=2), [[0, 256], []])
        with pytest.raises(InvalidRequest, match="layer 1 has no blocks in this placement"):
            placement.views(1, 0, 1, Span(0, SIZE))

    def test_numpy_addresses(self) -> None:
        numpy = pytest.importorskip("numpy")
        addresses = numpy.array([[0, 256], [512, 768]], dtype=numpy.int64)
        placement = Paged(bytearray(1024), descriptor_of(chunks=2), addresses)
        assert len(placement.views(1, 0, 2, Span(0, SIZE))) == 2


@pytest.mark.parametrize(
    "make",
    [bytearray, lambda size: Region(bytearray(size)), lambda size: memoryview(bytearray(size))],
)
def test_a_plain_buffer_is_layer_major(make: Callable[[int], Any]) -> None:
    descriptor = descriptor_of()
    placement = as_placement(make(descriptor.payload_size_bytes), descriptor)
    assert isinstance(placement, LayerMajor)
    assert as_placement(placement, descriptor) is placement
