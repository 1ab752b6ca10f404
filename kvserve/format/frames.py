"""The payload frame's protobuf envelope, encoded and decoded by hand around the payload.

protobuf's own `bytes` field copies the payload twice on each side. So the hot path builds only the
bytes in front of the payload (`payload` is the last field, number 15) and reads a received frame
through a memoryview. The bytes are identical to what the generated classes make of the same values;
`tests/unit/test_frames.py` holds both against each other.
"""

from dataclasses import dataclass
from typing import Final

from kvserve.errors import MalformedMessage

PAYLOAD_FIELD_IN_ENVELOPE: Final = 2
"""Number of `payload` in both `FetchReply` and `StoreRequest`."""

_ENVELOPE_TAG: Final = bytes([PAYLOAD_FIELD_IN_ENVELOPE << 3 | 2])
_LAYER_TAG, _CHUNK_TAG, _OFFSET_TAG = b"\x0d", b"\x15", b"\x19"
_CHECKSUMS_TAG, _PAYLOAD_TAG = b"\x22", b"\x7a"
_FIELDS_MAX: Final = 32
"""In a frame that is read: five are known, and each costs the loop a microsecond."""
PREFIX_SIZE_BYTES_MAX: Final = 64
"""Bound of the envelope without the checksums."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Where a frame's payload belongs. `checksums`: 8 bytes little-endian per slice that ends."""

    layer_index: int
    first_chunk: int
    slice_offset: int
    checksums: bytes


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_prefix(header: FrameHeader, payload_size_bytes: int) -> bytes:
    """The bytes that go right in front of `payload_size_bytes` of payload."""
    inner = bytearray()
    # proto3 leaves out fields that are zero.
    if header.layer_index:
        inner += _LAYER_TAG + header.layer_index.to_bytes(4, "little")
    if header.first_chunk:
        inner += _CHUNK_TAG + header.first_chunk.to_bytes(4, "little")
    if header.slice_offset:
        inner += _OFFSET_TAG + header.slice_offset.to_bytes(8, "little")
    if header.checksums:
        inner += _CHECKSUMS_TAG + _varint(len(header.checksums)) + header.checksums
    if payload_size_bytes:
        inner += _PAYLOAD_TAG + _varint(payload_size_bytes)
    return _ENVELOPE_TAG + _varint(len(inner) + payload_size_bytes) + inner


def decode_frame(message: bytes) -> tuple[FrameHeader, memoryview] | None:
    """Header and payload (a view into `message`), or None if this is another kind of message.

    Accepts what any protobuf writer may make of a frame: fields in any order, unknown fields.

    Raises:
        MalformedMessage: the message is not well-formed.
    """
    if not message.startswith(_ENVELOPE_TAG):
        return None
    view = memoryview(message)
    size, at = read_varint(view, 1)
    if at + size != len(view):
        raise MalformedMessage("a payload frame's envelope does not end with the message")
    numbers = {(1, 5): 0, (2, 5): 0, (3, 1): 0}
    checksums, payload = b"", view[:0]
    fields = 0
    while at < len(view):
        fields += 1
        if fields > _FIELDS_MAX:
            raise MalformedMessage(f"a payload frame has more than {_FIELDS_MAX} fields")
        tag, at = read_varint(view, at)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            _, at = read_varint(view, at)
            continue
        if wire_type == 2:
            size, at = read_varint(view, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise MalformedMessage(f"a payload frame has wire type {wire_type} in field {field}")
        if at + size > len(view):
            raise MalformedMessage(f"a payload frame is cut short in field {field}")
        value = view[at : at + size]
        at += size
        if (field, wire_type) in numbers:
            numbers[field, wire_type] = int.from_bytes(value, "little")
        elif field == 4 and wire_type == 2:
            checksums = bytes(value)
        elif field == 15 and wire_type == 2:
            payload = value
    header = FrameHeader(numbers[1, 5], numbers[2, 5], numbers[3, 1], checksums)
    return header, payload


def read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """A protobuf varint and where it ends. Raises `MalformedMessage`."""
    value = shift = 0
    while shift < 64:
        if at >= len(view):
            raise MalformedMessage("the message is cut short")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedMessage("the message has a number of more than 64 bits")
