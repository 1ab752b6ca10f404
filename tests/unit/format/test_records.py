"""Records of a data connection: what is packed is what is read, and garbage is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import MalformedMessage
from kvserve.format.frames import FrameHeader
from kvserve.format.plan import SLICES_A_FRAME_MAX
from kvserve.format.records import (
    EXTRA_SIZE_BYTES_MAX,
    HEAD_SIZE_BYTES,
    RecordHead,
    RecordKind,
    decode_head,
    decode_text,
    encode_finish,
    encode_frame,
    encode_miss,
)
from kvserve.model import ChunkStatus, Verdict

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(U32, U32, U64, st.integers(0, SLICES_A_FRAME_MAX), st.integers(0, 64 << 20))
def test_frames(layer: int, chunk: int, offset: int, slices: int, size: int) -> None:
    header = FrameHeader(layer, chunk, offset, b"CHECKSUM" * slices)
    raw = encode_frame(header, size)
    assert decode_head(raw[:HEAD_SIZE_BYTES]) == RecordHead(
        RecordKind.PAYLOAD, 8 * slices, layer, chunk, size, offset
    )
    assert raw[HEAD_SIZE_BYTES:] == header.checksums


def test_the_most_checksums_of_a_frame_fit() -> None:
    assert 8 * SLICES_A_FRAME_MAX <= EXTRA_SIZE_BYTES_MAX


@pytest.mark.parametrize("text", ["", "rot", "ä" * 5000])
def test_misses(text: str) -> None:
    raw = encode_miss(7, Verdict(ChunkStatus.MISS_CORRUPT, text))
    head = decode_head(raw[:HEAD_SIZE_BYTES])
    assert head == RecordHead(
        RecordKind.MISS, len(raw) - HEAD_SIZE_BYTES, 0, 7, 0, ChunkStatus.MISS_CORRUPT
    )
    assert text.startswith(decode_text(memoryview(raw)[HEAD_SIZE_BYTES:]))


def test_a_text_cut_inside_a_character() -> None:
    assert decode_text(memoryview("ä".encode()[:1])) == "\ufffd"


def test_finish() -> None:
    assert decode_head(encode_finish()).kind is RecordKind.FINISH


@pytest.mark.parametrize("kind", [0, 9, 255])
def test_unknown_kinds(kind: int) -> None:
    with pytest.raises(MalformedMessage, match=f"unknown kind {kind}"):
        decode_head(bytes([kind]) + encode_finish()[1:])
