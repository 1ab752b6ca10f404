"""The server's rules for the frames of one store: each broken rule is refused and said."""

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import InvalidRequest
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.model import Layout, opaque
from kvserve.transfer.store_session import SliceWrite, StoreSession
from tests.unit.samples import HYBRID, SMALL, frames_of, slice_of

SIZE = SMALL.slice_sizes[0]


def sums(*slices: bytes) -> bytes:
    return b"".join(checksum(data).to_bytes(8, "little") for data in slices)


def feed_layer(
    session: StoreSession,
    layer_index: int,
    needed: Sequence[int],
    *,
    frame_size_bytes: int = 1 << 20,
    layout: object = SMALL,
) -> tuple[list[SliceWrite], list[bool]]:
    """All frames of one layer; the writes, and for each frame whether it completed the layer."""
    writes: list[SliceWrite] = []
    completes: list[bool] = []
    frames = frames_of(layout, layer_index, needed, frame_size_bytes=frame_size_bytes)  # type: ignore[arg-type]
    for header, payload in frames:
        wanted, is_complete = session.feed(header, payload)
        writes += wanted
        completes.append(is_complete)
    return writes, completes


class TestGoodStores:
    @given(
        st.sets(st.integers(0, 9), min_size=1, max_size=4).map(sorted),
        st.permutations(range(3)),
        st.integers(1, 700),
    )
    def test_every_byte_of_every_needed_slice_is_written_once(
        self, needed: list[int], order: list[int], frame_size_bytes: int
    ) -> None:
        """Layers in any order, frames of any size, only the needed chunks."""
        session = StoreSession(HYBRID, needed, frame_size_bytes_max=1 << 20)
        files: dict[tuple[int, int], bytearray] = {}
        for number, layer_index in enumerate(order):
            assert not session.is_complete
            writes, completes = feed_layer(
                session, layer_index, needed, frame_size_bytes=frame_size_bytes, layout=HYBRID
            )
            assert completes == [False] * (len(completes) - 1) + [True]
            assert session.is_complete == (number == 2)
            for write in writes:
                at = files.setdefault((write.layer_index, write.chunk_index), bytearray())
                assert write.slice_offset == len(at)
                at += write.data
        assert files == {
            (layer, chunk): slice_of(layer, chunk, HYBRID.slice_sizes[layer])
            for layer in range(3)
            for chunk in needed
        }
        for position, chunk in enumerate(needed):
            assert list(session.checksums_of(position)) == [
                checksum(slice_of(layer, chunk, HYBRID.slice_sizes[layer])) for layer in range(3)
            ]

    def test_writes_are_views_into_the_frame(self) -> None:
        session = StoreSession(SMALL, [0], frame_size_bytes_max=1 << 20)
        (header, payload) = next(frames_of(SMALL, 0, [0]))
        writes, _ = session.feed(header, payload)
        assert writes[0].data.obj is payload.obj

    def test_a_frame_may_end_one_slice_and_begin_the_next(self) -> None:
        """The wire contract counts consecutive bytes; cuts need not fall on slices."""
        session = StoreSession(SMALL, [0, 1], frame_size_bytes_max=1 << 20)
        one, other = slice_of(0, 0, SIZE), slice_of(0, 1, SIZE)
        both = memoryview(one + other)
        assert session.feed(FrameHeader(0, 0, 0, b""), both[:100])[1] is False
        writes, is_complete = session.feed(FrameHeader(0, 0, 100, sums(one)), both[100:300])
        assert [(write.chunk_index, write.slice_offset) for write in writes] == [(0, 100), (1, 0)]
        assert not is_complete
        assert session.feed(FrameHeader(0, 1, 44, sums(other)), both[300:])[1] is True

    def test_nothing_needed_is_complete_at_once(self) -> None:
        assert StoreSession(SMALL, [], frame_size_bytes_max=1 << 20).is_complete

    def test_repr_says_how_far_it_came(self) -> None:
        """It is the text of an INCOMPLETE verdict."""
        session = StoreSession(SMALL, [3, 5], frame_size_bytes_max=1 << 20)
        feed_layer(session, 1, [3, 5])
        session.feed(FrameHeader(0, 3, 0, b""), memoryview(slice_of(0, 3, SIZE))[:100])
        assert repr(session) == "<StoreSession 1/2 layers, layer 0 at chunk 0/2 + 100 B>"


def first_chunk_wrong(session: StoreSession) -> None:
    session.feed(FrameHeader(0, 0, 0, b""), memoryview(bytes(SIZE)))


def chunk_skipped(session: StoreSession) -> None:
    data = slice_of(0, 5, SIZE)
    session.feed(FrameHeader(0, 5, 0, sums(data)), memoryview(data))


def slice_offset_wrong(session: StoreSession) -> None:
    session.feed(FrameHeader(0, 3, 8, b""), memoryview(bytes(8)))


def slice_continued_elsewhere(session: StoreSession) -> None:
    data = memoryview(slice_of(0, 3, SIZE))
    session.feed(FrameHeader(0, 3, 0, b""), data[:100])
    session.feed(FrameHeader(0, 3, 96, b""), data[96:200])


def slice_sent_again(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(data)), memoryview(data))
    session.feed(FrameHeader(0, 3, 0, sums(data)), memoryview(data))


def too_much_in_the_last_frame(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE) + slice_of(0, 5, SIZE)
    header = FrameHeader(0, 3, 0, sums(data[:SIZE], data[SIZE:], b"x"))
    session.feed(header, memoryview(data + b"x"))


def layer_too_short(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(data)), memoryview(data))
    feed_layer(session, 1, [3, 5])


def layers_interleaved(session: StoreSession) -> None:
    for layer_index in (0, 1):
        data = slice_of(layer_index, 3, SIZE)
        session.feed(FrameHeader(layer_index, 3, 0, sums(data)), memoryview(data))


def layer_twice(session: StoreSession) -> None:
    feed_layer(session, 0, [3, 5])
    feed_layer(session, 0, [3, 5])


def layer_twice_at_the_end(session: StoreSession) -> None:
    feed_layer(session, 0, [3, 5])
    feed_layer(session, 1, [3, 5])
    feed_layer(session, 1, [3, 5])


def layer_out_of_range(session: StoreSession) -> None:
    session.feed(FrameHeader(2, 3, 0, b""), memoryview(bytes(8)))


def layer_far_out_of_range(session: StoreSession) -> None:
    session.feed(FrameHeader(2**32 - 1, 3, 0, b""), memoryview(b""))


def checksum_wrong(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(data[::-1])), memoryview(data))


def checksum_wrong_in_pieces(session: StoreSession) -> None:
    data = memoryview(slice_of(0, 3, SIZE))
    session.feed(FrameHeader(0, 3, 0, b""), data[:100])
    session.feed(FrameHeader(0, 3, 100, sums(b"other")), data[100:])


def one_byte_changed(session: StoreSession) -> None:
    data = bytearray(slice_of(0, 3, SIZE))
    good = sums(bytes(data))
    data[17] ^= 4
    session.feed(FrameHeader(0, 3, 0, good), memoryview(data))


def checksums_missing(session: StoreSession) -> None:
    session.feed(FrameHeader(0, 3, 0, b""), memoryview(slice_of(0, 3, SIZE)))


def second_checksum_missing(session: StoreSession) -> None:
    one, other = slice_of(0, 3, SIZE), slice_of(0, 5, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(one)), memoryview(one + other))


def checksum_cut_short(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(data)[:7]), memoryview(data))


def too_many_checksums(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(data, data)), memoryview(data))


def checksum_in_the_middle(session: StoreSession) -> None:
    data = slice_of(0, 3, SIZE)
    session.feed(FrameHeader(0, 3, 0, sums(data)), memoryview(data)[:100])


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (
            first_chunk_wrong,
            "layer 0: a frame for chunk 0 at byte 0 came, chunk 3 at byte 0 of 256",
        ),
        (chunk_skipped, "a frame for chunk 5 at byte 0 came, chunk 3 at byte 0 of 256 was next"),
        (slice_offset_wrong, "a frame for chunk 3 at byte 8 came, chunk 3 at byte 0"),
        (slice_continued_elsewhere, "chunk 3 at byte 96 came, chunk 3 at byte 100"),
        (slice_sent_again, "a frame for chunk 3 at byte 0 came, chunk 5 at byte 0"),
        (
            too_much_in_the_last_frame,
            "payload size is wrong: 1 bytes after the last needed chunk; a slice is 256 bytes",
        ),
        (
            layer_too_short,
            "layer 1 came before layer 0 was complete: payload size is wrong, 1 slices are missing",
        ),
        (layers_interleaved, "layer 1 came before layer 0 was complete"),
        (layer_twice, "layer 0 was sent twice"),
        (layer_twice_at_the_end, "layer 1 was sent twice"),
        (layer_out_of_range, "layer 2 is out of range; this layout has layers 0 to 1"),
        (layer_far_out_of_range, "layer 4294967295 is out of range"),
        (checksum_wrong, "layer 0 of chunk 3: the payload does not match its checksum"),
        (checksum_wrong_in_pieces, "layer 0 of chunk 3: the payload does not match its checksum"),
        (one_byte_changed, "layer 0 of chunk 3: the payload does not match its checksum"),
        (checksums_missing, "layer 0: a slice came without its checksum"),
        (second_checksum_missing, "layer 0: a slice came without its checksum"),
        (checksum_cut_short, "layer 0: a slice came without its checksum"),
        (too_many_checksums, "16 bytes of checksums for 1 slices that end in the frame"),
        (checksum_in_the_middle, "8 bytes of checksums for 0 slices that end in the frame"),
    ],
)
def test_a_broken_rule_is_refused_and_said(
    break_it: Callable[[StoreSession], None], words: str
) -> None:
    session = StoreSession(SMALL, [3, 5], frame_size_bytes_max=1 << 20)
    with pytest.raises(InvalidRequest, match=words):
        break_it(session)


def test_a_payload_that_nobody_needs_is_refused() -> None:
    session = StoreSession(SMALL, [], frame_size_bytes_max=1 << 20)
    with pytest.raises(InvalidRequest, match="the server needs no chunk of this store"):
        session.feed(FrameHeader(0, 0, 0, b""), memoryview(bytes(8)))


@given(
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 300) | st.just(2**64 - 1),
    st.binary(max_size=24),
    st.binary(max_size=600),
)
def test_no_frame_raises_anything_else(
    layer: int, chunk: int, offset: int, checksums: bytes, payload: bytes
) -> None:
    session = StoreSession(SMALL, [3, 5], frame_size_bytes_max=1 << 20)
    for _ in range(2):
        try:
            writes, _ = session.feed(
                FrameHeader(layer, chunk, offset, checksums), memoryview(payload)
            )
        except InvalidRequest:
            return
        assert all(0 <= write.slice_offset < SIZE for write in writes)


def test_slices_that_have_not_come_take_no_memory() -> None:
    """A descriptor of 4 million slices costs its sender 2 MB; it must not cost the server more."""
    layout = Layout("uint8", 1, (opaque(1),) * 64)
    tracemalloc.start()
    session = StoreSession(layout, range(65_536), frame_size_bytes_max=1 << 20)
    session.feed(FrameHeader(0, 0, 0, sums(b"x") * 256), memoryview(b"x" * 256))
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 256 << 10
