"""The client's rules for the frames of one fetch: what counts as landed, and what is refused."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.fetch_session import FetchSession, LayerEvent
from kvclient.placement import LayerMajor, Paged
from kvserve.errors import ServerFault
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.model import ChunkStatus, Descriptor, Verdict
from tests.unit.samples import HYBRID, SMALL, descriptor_of, frames_of, slice_of

SIZE = SMALL.slice_sizes[0]
HIT = Verdict(ChunkStatus.HIT)
ABSENT = Verdict(ChunkStatus.MISS_ABSENT)
CORRUPT = Verdict(ChunkStatus.MISS_CORRUPT, "rot")


class Fetch:
    """A session over a zeroed region, fed as a server would."""

    def __init__(
        self, descriptor: Descriptor, verdicts: Sequence[Verdict], layers: Sequence[int] = ()
    ) -> None:
        self.descriptor = descriptor
        self.layers = tuple(layers) or descriptor.layer_order
        self.region = bytearray(descriptor.payload_size_bytes)
        placement = LayerMajor(self.region, descriptor)
        self.session = FetchSession(descriptor, self.layers, placement)
        self.events = self.session.head(list(verdicts))

    def send(
        self, layer_index: int, chunks: Sequence[int], *, frame_size_bytes: int = 1 << 20
    ) -> None:
        frames = frames_of(
            self.descriptor.layout, layer_index, chunks, frame_size_bytes=frame_size_bytes
        )
        for header, payload in frames:
            self.events += self.session.frame(header, payload)

    def send_damaged(self, layer_index: int, chunk_index: int) -> None:
        header, payload = next(frames_of(self.descriptor.layout, layer_index, [chunk_index]))
        self.events += self.session.frame(header, memoryview(bytes(payload)[::-1]))

    def miss(self, chunk_index: int) -> None:
        self.events += self.session.miss(chunk_index, CORRUPT)

    def landed(self, layer_index: int, chunk_index: int) -> bytes:
        size = self.descriptor.layout.slice_sizes[layer_index]
        start = self.descriptor.payload_offsets[layer_index] + chunk_index * size
        return bytes(self.region[start : start + size])

    def is_landed(self, layer_index: int, chunk_index: int) -> bool:
        size = self.descriptor.layout.slice_sizes[layer_index]
        return self.landed(layer_index, chunk_index) == slice_of(layer_index, chunk_index, size)


class TestGoodFetches:
    @given(st.data(), st.integers(1, 700), st.permutations(range(3)))
    def test_every_hit_lands_in_its_place_and_every_layer_ends_in_order(
        self, data: st.DataObject, frame_size_bytes: int, order: list[int]
    ) -> None:
        hits = data.draw(st.lists(st.booleans(), min_size=1, max_size=6))
        descriptor = descriptor_of(len(hits), HYBRID)
        fetch = Fetch(descriptor, [HIT if hit else ABSENT for hit in hits], order)
        present = [index for index, hit in enumerate(hits) if hit]
        missing = tuple(index for index, hit in enumerate(hits) if not hit)
        if present:
            assert fetch.events == []
            assert not fetch.session.is_finished
            for layer_index in order:
                fetch.send(layer_index, present, frame_size_bytes=frame_size_bytes)
        assert fetch.events == [LayerEvent(layer, missing) for layer in order]
        assert fetch.session.is_finished
        for layer_index in range(3):
            for chunk_index in range(len(hits)):
                if hits[chunk_index]:
                    assert fetch.is_landed(layer_index, chunk_index)
                else:
                    assert not any(fetch.landed(layer_index, chunk_index)), "a miss has no bytes"
        sizes = sum(HYBRID.slice_sizes)
        assert fetch.session.landed_bytes == len(present) * sizes

    def test_a_layer_is_done_at_its_last_byte_and_not_before(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT])
        data = memoryview(slice_of(0, 0, SIZE) + slice_of(0, 1, SIZE))
        sums = [
            checksum(data[:SIZE]).to_bytes(8, "little"),
            checksum(data[SIZE:]).to_bytes(8, "little"),
        ]
        assert fetch.session.frame(FrameHeader(0, 0, 0, sums[0]), data[:SIZE]) == []
        assert fetch.session.frame(FrameHeader(0, 1, 0, b""), data[SIZE:-1]) == []
        assert fetch.session.frame(FrameHeader(0, 1, SIZE - 1, sums[1]), data[-1:]) == [
            LayerEvent(0, ())
        ]

    def test_only_the_layers_asked_for(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT], layers=[1])
        fetch.send(1, [0, 1])
        assert fetch.events == [LayerEvent(1, ())]
        assert fetch.session.is_finished

    @given(st.integers(1, 300), st.permutations(range(6)))
    def test_paged_blocks_get_the_same_bytes(self, frame_size_bytes: int, order: list[int]) -> None:
        """Two blocks a chunk, three chunks, scattered."""
        descriptor = descriptor_of(3)
        block = SIZE // 2
        region = bytearray(2 * 6 * block)
        addresses = [[(layer * 6 + at) * block for at in order] for layer in range(2)]
        session = FetchSession(descriptor, (0, 1), Paged(region, descriptor, addresses))
        session.head([HIT] * 3)
        for layer in range(2):
            for frame in frames_of(SMALL, layer, range(3), frame_size_bytes=frame_size_bytes):
                session.frame(*frame)
        assert session.is_finished
        for layer in range(2):
            for number in range(6):
                at = addresses[layer][number]
                whole = slice_of(layer, number // 2, SIZE)
                half = whole[:block] if number % 2 == 0 else whole[block:]
                assert region[at : at + block] == half

    def test_all_misses_end_every_layer_at_once(self) -> None:
        fetch = Fetch(descriptor_of(2), [ABSENT, CORRUPT])
        assert fetch.events == [LayerEvent(0, (0, 1)), LayerEvent(1, (0, 1))]
        assert fetch.session.is_finished
        assert fetch.session.verdicts == [ABSENT, CORRUPT]


class TestMisses:
    def test_a_chunk_that_turns_bad_delays_nobody(self) -> None:
        """Its frames stop, the layer ends without it, and so do all later ones."""
        fetch = Fetch(descriptor_of(3), [HIT] * 3)
        fetch.send(0, [0])
        fetch.miss(1)
        fetch.send(0, [2])
        fetch.send(1, [0, 2])
        assert fetch.events == [LayerEvent(0, (1,)), LayerEvent(1, (1,))]
        assert fetch.session.verdicts == [HIT, CORRUPT, HIT]
        assert all(fetch.is_landed(layer, chunk) for layer in (0, 1) for chunk in (0, 2))

    def test_the_last_hit_turning_bad_ends_the_layer(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT])
        fetch.send(0, [0])
        fetch.miss(1)
        assert fetch.events == [LayerEvent(0, (1,))]

    def test_the_only_hit_turning_bad_ends_everything(self) -> None:
        fetch = Fetch(descriptor_of(1), [HIT])
        fetch.miss(0)
        assert fetch.session.is_finished
        assert fetch.session.verdicts == [CORRUPT]

    def test_a_chunk_turning_bad_in_the_middle_of_its_slice(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT])
        first = next(frames_of(SMALL, 0, [0], frame_size_bytes=100))
        assert fetch.session.frame(*first) == []
        fetch.miss(0)
        fetch.send(0, [1], frame_size_bytes=100)
        assert fetch.events == [LayerEvent(0, (0,))]
        assert fetch.is_landed(0, 1)

    @pytest.mark.parametrize("chunk_index", [1, 2, 99])
    def test_a_miss_of_what_was_no_hit_is_the_servers_fault(self, chunk_index: int) -> None:
        fetch = Fetch(descriptor_of(3), [HIT, ABSENT, HIT])
        if chunk_index == 2:
            fetch.miss(2)
        with pytest.raises(ServerFault, match=f"chunk {chunk_index} as a miss, it was no hit"):
            fetch.miss(chunk_index)


class TestDamageOnTheWay:
    def test_a_slice_with_a_wrong_checksum_is_a_miss(self) -> None:
        fetch = Fetch(descriptor_of(3), [HIT] * 3)
        fetch.send(0, [0])
        fetch.send_damaged(0, 1)
        fetch.send(0, [2])
        assert fetch.events == [LayerEvent(0, (1,))]
        assert fetch.session.verdicts[1] == Verdict(
            ChunkStatus.MISS_CORRUPT, "layer 0 does not match its checksum on arrival"
        )
        assert fetch.session.verdicts[0] is fetch.session.verdicts[2] is HIT

    def test_later_slices_of_it_are_no_error(self) -> None:
        """The server cannot know and goes on sending them."""
        fetch = Fetch(descriptor_of(3), [HIT] * 3)
        fetch.send_damaged(0, 0)
        fetch.send(0, [1, 2])
        fetch.send(1, [0, 1, 2])
        assert fetch.events == [LayerEvent(0, (0,)), LayerEvent(1, (0,))]
        assert fetch.session.is_finished

    @pytest.mark.parametrize("checksums", [b"", bytes(7), bytes(16)])
    def test_checksums_for_other_slices_than_came_are_a_fault_of_the_server(
        self, checksums: bytes
    ) -> None:
        fetch = Fetch(descriptor_of(1), [HIT])
        with pytest.raises(ServerFault, match=f"layer 0: {len(checksums)} bytes of checksums"):
            fetch.session.frame(FrameHeader(0, 0, 0, checksums), memoryview(slice_of(0, 0, SIZE)))
        assert not fetch.session.is_finished

    def test_later_slices_of_the_last_chunk_are_no_error_either(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT])
        fetch.send(0, [0])
        fetch.send_damaged(0, 1)
        fetch.send(1, [0])
        fetch.send(1, [1])
        assert fetch.events == [LayerEvent(0, (1,)), LayerEvent(1, (1,))]

    def test_one_damaged_chunk_of_one_is_a_miss_and_no_error(self) -> None:
        fetch = Fetch(descriptor_of(1), [HIT])
        fetch.send_damaged(0, 0)
        fetch.send(1, [0])
        assert fetch.session.verdicts[0].status is ChunkStatus.MISS_CORRUPT

    def test_the_server_may_find_the_same_chunk_bad_later(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT])
        fetch.send_damaged(0, 0)
        fetch.send(0, [1])
        fetch.miss(0)
        fetch.send(1, [1])
        assert fetch.session.is_finished


def frame_of(layer_index: int, chunk_index: int) -> tuple[FrameHeader, memoryview]:
    return next(frames_of(SMALL, layer_index, [chunk_index]))


def before_the_head(fetch: Fetch) -> None:
    placement = LayerMajor(fetch.region, fetch.descriptor)
    FetchSession(fetch.descriptor, fetch.layers, placement).frame(*frame_of(0, 0))


def two_heads(fetch: Fetch) -> None:
    fetch.session.head([HIT] * 3)


def next_layer_too_early(fetch: Fetch) -> None:
    fetch.send(0, [0, 1])
    fetch.send(1, [0])


def layer_not_asked_for(fetch: Fetch) -> None:
    fetch.send(1, [0])


def frame_after_the_end(fetch: Fetch) -> None:
    fetch.send(0, [0, 1, 2])
    fetch.send(1, [0, 1, 2])
    fetch.send(1, [0])


def chunk_order(fetch: Fetch) -> None:
    fetch.send(0, [1])
    fetch.send(0, [0])


def chunk_twice(fetch: Fetch) -> None:
    fetch.send(0, [0])
    fetch.send(0, [0])


def chunk_out_of_range(fetch: Fetch) -> None:
    fetch.send(0, [3])


def slice_beyond_the_descriptor(fetch: Fetch) -> None:
    fetch.send(0, [2, 3])


def middle_of_a_slice(fetch: Fetch) -> None:
    fetch.session.frame(FrameHeader(0, 0, 10, b""), memoryview(bytes(10)))


def hole_in_a_slice(fetch: Fetch) -> None:
    fetch.session.frame(FrameHeader(0, 0, 0, b""), memoryview(bytes(10)))
    fetch.session.frame(FrameHeader(0, 0, 20, b""), memoryview(bytes(10)))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (before_the_head, "outside the layers that were asked for"),
        (two_heads, "the server sent two heads"),
        (next_layer_too_early, "layer 1 came, layer 0 was next"),
        (layer_not_asked_for, "layer 1 came, layer 0 was next"),
        (frame_after_the_end, "outside the layers that were asked for"),
        (chunk_order, "chunk 0 at byte 0 came, chunk 2 at byte 0 was next"),
        (chunk_twice, "chunk 0 at byte 0 came, chunk 1 at byte 0 was next"),
        (chunk_out_of_range, "chunk 3 came twice, as a miss, or is not asked for"),
        (slice_beyond_the_descriptor, "chunk 3 came twice, as a miss, or is not asked for"),
        (middle_of_a_slice, "chunk 0 at byte 10 came, chunk 0 at byte 0 was next"),
        (hole_in_a_slice, "chunk 0 at byte 20 came, chunk 0 at byte 10 was next"),
    ],
)
def test_frames_out_of_order_are_the_servers_fault(break_it: object, words: str) -> None:
    fetch = Fetch(descriptor_of(3), [HIT] * 3)
    with pytest.raises(ServerFault, match=words):
        break_it(fetch)  # type: ignore[operator]


class TestHolesInTheRules:
    """What a broken server could do and still be believed: the region would hold other bytes."""

    def test_a_frame_that_ends_inside_its_second_slice(self) -> None:
        fetch = Fetch(descriptor_of(2), [HIT, HIT])
        data = memoryview(slice_of(0, 0, SIZE) + slice_of(0, 1, SIZE))
        sums = [checksum(part).to_bytes(8, "little") for part in (data[:SIZE], data[SIZE:])]
        try:
            fetch.session.frame(FrameHeader(0, 0, 0, sums[0]), data[: SIZE + 100])
            fetch.session.frame(FrameHeader(0, 1, 100, sums[1]), data[SIZE + 100 :])
        except ServerFault:
            return
        assert fetch.is_landed(0, 1), "verified, reported as landed, and not in the region"

    def test_a_slice_continued_in_another_chunk(self) -> None:
        descriptor = descriptor_of(2)
        fetch = Fetch(descriptor, [HIT, HIT])
        fetch.region[:] = b"\xff" * len(fetch.region)
        zero = bytes(SIZE)
        fetch.session.frame(FrameHeader(0, 0, 0, b""), memoryview(zero)[:100])
        seal = checksum(zero).to_bytes(8, "little")
        with pytest.raises(ServerFault):
            fetch.session.frame(FrameHeader(0, 1, 100, seal), memoryview(zero)[100:])
