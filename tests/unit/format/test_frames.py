"""The hand-made envelope is protobuf's, byte for byte, and no input breaks the decoder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import MalformedMessage
from kvserve.format.frames import (
    PREFIX_SIZE_BYTES_MAX,
    FrameHeader,
    decode_frame,
    encode_prefix,
)
from kvserve.v1 import kvserve_pb2 as pb

headers = st.builds(
    FrameHeader,
    layer_index=st.just(0) | st.integers(0, 2**32 - 1),
    first_chunk=st.just(0) | st.integers(0, 2**32 - 1),
    slice_offset=st.just(0) | st.integers(0, 2**64 - 1),
    checksums=st.integers(0, 40).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n)),
)
# Around 128 bytes and 16 KiB a varint of the size grows by a byte.
payloads = st.binary(max_size=300) | st.integers(16_300, 16_500).map(bytes)


def message_of(header: FrameHeader, payload: bytes) -> pb.PayloadFrame:
    return pb.PayloadFrame(
        layer_index=header.layer_index,
        first_chunk=header.first_chunk,
        slice_offset=header.slice_offset,
        checksums=header.checksums,
        payload=payload,
    )


def envelope(inner: bytes) -> bytes:
    """`inner` as field 2 of a FetchReply, by protobuf itself (unknown fields pass unchanged)."""
    size, varint = len(inner), bytearray()
    while size > 0x7F:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    return b"\x12" + bytes(varint) + bytes([size]) + inner


@pytest.mark.parametrize("kind", [pb.FetchReply, pb.StoreRequest])
@given(header=headers, payload=payloads)
def test_encoding_is_identical_to_the_generated_class(
    kind: type[pb.FetchReply | pb.StoreRequest], header: FrameHeader, payload: bytes
) -> None:
    by_hand = encode_prefix(header, len(payload)) + payload
    assert by_hand == kind(payload=message_of(header, payload)).SerializeToString()


@given(header=headers, payload=payloads)
def test_decoding_gives_back_what_protobuf_wrote(header: FrameHeader, payload: bytes) -> None:
    message = pb.FetchReply(payload=message_of(header, payload)).SerializeToString()
    decoded = decode_frame(message)
    assert decoded is not None
    assert (decoded[0], bytes(decoded[1])) == (header, payload)


def test_payload_is_a_view_and_no_copy() -> None:
    message = encode_prefix(FrameHeader(1, 2, 3, b""), 1000) + bytes(1000)
    decoded = decode_frame(message)
    assert decoded is not None
    assert decoded[1].obj is message


@given(header=headers)
def test_prefix_size_is_bounded(header: FrameHeader) -> None:
    largest = 64 << 20
    assert len(encode_prefix(header, largest)) - len(header.checksums) <= PREFIX_SIZE_BYTES_MAX


FIELDS = [
    b"\x0d\x05\0\0\0",  # layer_index 5
    b"\x15\x06\0\0\0",  # first_chunk 6
    b"\x19\x07\0\0\0\0\0\0\0",  # slice_offset 7
    b"\x22\x08CHECKSUM",
    b"\x7a\x03abc",
]
UNKNOWN = [
    b"\x28\x96\x01",  # field 5, varint
    b"\x31" + bytes(8),  # field 6, eight bytes
    b"\x3a\x02zz",  # field 7, bytes
    b"\xfd\x07" + bytes(4),  # field 127, four bytes
]


@given(st.permutations(FIELDS + UNKNOWN))
def test_fields_in_any_order_and_unknown_ones_are_accepted(parts: list[bytes]) -> None:
    message = envelope(b"".join(parts))
    reference = pb.FetchReply.FromString(message).payload
    decoded = decode_frame(message)
    assert decoded is not None
    header, payload = decoded
    assert header == FrameHeader(5, 6, 7, b"CHECKSUM")
    assert header == FrameHeader(
        reference.layer_index, reference.first_chunk, reference.slice_offset, reference.checksums
    )
    assert bytes(payload) == reference.payload == b"abc"


def test_a_repeated_field_counts_as_its_last_value() -> None:
    decoded = decode_frame(envelope(b"\x0d\x01\0\0\0\x0d\x02\0\0\0\x7a\x01a\x7a\x02bc"))
    assert decoded is not None
    assert (decoded[0].layer_index, bytes(decoded[1])) == (2, b"bc")


@pytest.mark.parametrize("inner", [b"\x09" + b"\x05" + bytes(7), b"\x1d\x05\0\0\0"])
def test_a_number_of_another_wire_type_is_an_unknown_field(inner: bytes) -> None:
    assert pb.FetchReply.FromString(envelope(inner)).payload == pb.PayloadFrame.FromString(inner)
    decoded = decode_frame(envelope(inner))
    assert decoded is not None
    assert decoded[0] == FrameHeader(0, 0, 0, b"")


def test_an_empty_frame_is_all_zeros() -> None:
    assert decode_frame(envelope(b"")) == (FrameHeader(0, 0, 0, b""), memoryview(b""))


@pytest.mark.parametrize(
    "message",
    [
        pb.FetchReply(head=pb.FetchHead(chunk_statuses=b"\1\2")),
        pb.FetchReply(miss=pb.ChunkMiss(chunk_index=3)),
        pb.StoreRequest(open=pb.StoreOpen()),
        pb.FetchReply(),
    ],
    ids=["head", "miss", "open", "empty"],
)
def test_other_kinds_of_message_are_none_of_its_business(
    message: pb.FetchReply | pb.StoreRequest,
) -> None:
    assert decode_frame(message.SerializeToString()) is None


@given(header=headers, payload=st.binary(min_size=1, max_size=50), data=st.data())
def test_a_truncated_frame_is_malformed(
    header: FrameHeader, payload: bytes, data: st.DataObject
) -> None:
    message = encode_prefix(header, len(payload)) + payload
    cut = data.draw(st.integers(1, len(message) - 1))
    with pytest.raises(MalformedMessage, match=r"cut short|does not end with the message"):
        decode_frame(message[:cut])


def test_a_frame_with_bytes_after_it_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="envelope does not end with the message"):
        decode_frame(envelope(FIELDS[0]) + b"\0")


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (b"\x7a\x05abc", "cut short in field 15"),
        (b"\x0d\x01", "cut short in field 1"),
        (b"\x19" + bytes(7), "cut short in field 3"),
        (b"\x7a", "cut short"),
        (b"\x28\x80", "cut short"),
        (b"\x28" + b"\xff" * 10, "a number of more than 64 bits"),
        (b"\x2b", "wire type 3 in field 5"),
        (b"\x2f", "wire type 7 in field 5"),
        (b"\x7a" + b"\xff" * 9 + b"\x01", "cut short in field 15"),
    ],
)
def test_malformed_inner_fields_are_named(inner: bytes, words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        decode_frame(envelope(inner))


@given(st.binary(max_size=100))
def test_no_input_raises_anything_else(noise: bytes) -> None:
    for message in (noise, b"\x12" + noise, envelope(noise)):
        try:
            decode_frame(message)
        except MalformedMessage:
            continue


@given(header=headers, payload=st.binary(max_size=40), data=st.data())
def test_a_damaged_frame_is_decoded_or_refused_never_worse(
    header: FrameHeader, payload: bytes, data: st.DataObject
) -> None:
    message = bytearray(encode_prefix(header, len(payload)) + payload)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    try:
        decode_frame(bytes(message))
    except MalformedMessage:
        return


def test_a_frame_of_a_million_fields_is_refused_at_once() -> None:
    """Unknown fields of two bytes each would hold the event loop for a second."""
    with pytest.raises(MalformedMessage, match="more than 32 fields"):
        decode_frame(envelope(b"\x48\x00" * 1_000_000))
