"""What travels on a data connection: a hello, then records, little-endian. Pure.

```
hello    8 bytes magic, 32 bytes secret     client -> server, before every transfer
record   24 bytes head, extra, payload      the sender of the payload -> its receiver
```

A record's head has a fixed size, so that a receiver knows where the payload belongs before a byte
of it is read, and lets the kernel put it there. `extra` is the checksums of a frame, or the text of
a miss.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvserve.errors import MalformedMessage
from kvserve.format.frames import FrameHeader
from kvserve.model import Verdict

HELLO_MAGIC: Final = b"kvdata1\n"
SECRET_SIZE_BYTES: Final = 32
HELLO_SIZE_BYTES: Final = len(HELLO_MAGIC) + SECRET_SIZE_BYTES

_HEAD: Final = struct.Struct("<BxHIIIQ")
"""kind, extra size, layer index, first chunk, payload size, slice offset."""
HEAD_SIZE_BYTES: Final = _HEAD.size
EXTRA_SIZE_BYTES_MAX: Final = 0xFFFF
_MESSAGE_SIZE_BYTES_MAX: Final = 2048


class RecordKind(IntEnum):
    """Values are on the wire."""

    PAYLOAD = 1
    """A frame; `extra` holds its checksums."""
    MISS = 2
    """Fetch: chunk `first_chunk` is a miss from here on; `slice_offset` is its status."""
    FINISH = 3
    """Store: everything has been sent; publish."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The fixed part, decoded."""

    kind: RecordKind
    extra_size_bytes: int
    layer_index: int
    first_chunk: int
    payload_size_bytes: int
    slice_offset: int


def encode_frame(header: FrameHeader, payload_size_bytes: int) -> bytes:
    """Head and checksums: what goes right in front of the payload."""
    head = _HEAD.pack(
        RecordKind.PAYLOAD,
        len(header.checksums),
        header.layer_index,
        header.first_chunk,
        payload_size_bytes,
        header.slice_offset,
    )
    return head + header.checksums


def encode_miss(chunk_index: int, verdict: Verdict) -> bytes:
    text = verdict.message.encode()[:_MESSAGE_SIZE_BYTES_MAX]
    return _HEAD.pack(RecordKind.MISS, len(text), 0, chunk_index, 0, verdict.status) + text


def encode_finish() -> bytes:
    return _HEAD.pack(RecordKind.FINISH, 0, 0, 0, 0, 0)


def decode_head(raw: bytes | bytearray | memoryview) -> RecordHead:
    """Raises `MalformedMessage` for a kind that this version does not know."""
    kind, extra_size, layer_index, first_chunk, payload_size, slice_offset = _HEAD.unpack(raw)
    try:
        known = RecordKind(kind)
    except ValueError as error:
        raise MalformedMessage(f"a record of unknown kind {kind} on the data connection") from error
    return RecordHead(known, extra_size, layer_index, first_chunk, payload_size, slice_offset)


def decode_text(raw: memoryview) -> str:
    """The text of a miss; it may have been cut inside a character."""
    return bytes(raw).decode("utf-8", "replace")
