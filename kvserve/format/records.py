"""What travels on a data connection: a hello, then records, little-endian. Pure.

```
hello    8 bytes magic, 32 bytes secret     client -> server, before every transfer but a fetch
                                            whose request has named the connection
region   16 bytes, spans                    client -> server, shm only, after the hello (or in that
                                            request); for nixl: `remote_region.py`
first    24 bytes head, `FetchReply`        server -> client, instead of a hello: in that fetch
reply
record   24 bytes head, extra, payload      the sender of the payload -> its receiver
taken    24 bytes head                      server -> client, store over shm or nixl
```

A record's head has a fixed size, so that a receiver knows where the payload belongs before a byte
of it is read, and lets the kernel put it there. `extra` is the checksums of a frame, or the text of
a miss.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
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
    LANDED = 4
    """Fetch over shm or nixl: as PAYLOAD, but the payload is in its place already."""
    OFFERED = 5
    """Store over shm or nixl: as PAYLOAD, but the payload is in the client's memory."""
    TAKEN = 6
    """Its answer: the oldest frame without one is copied, its bytes are the client's again."""
    QUIET = 7
    """Nixl, a transfer that ended early: the last record; nothing is read or written any more."""
    FIRST_REPLY = 8
    """Fetch over a connection that the request named: the payload is the first `FetchReply`."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The fixed part, decoded."""

    kind: RecordKind
    extra_size_bytes: int
    layer_index: int
    first_chunk: int
    payload_size_bytes: int
    slice_offset: int


def encode_frame(
    header: FrameHeader, payload_size_bytes: int, kind: RecordKind = RecordKind.PAYLOAD
) -> bytes:
    """Head and checksums: what goes right in front of the payload."""
    head = _HEAD.pack(
        kind,
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


def encode_taken() -> bytes:
    return _HEAD.pack(RecordKind.TAKEN, 0, 0, 0, 0, 0)


def encode_quiet() -> bytes:
    return _HEAD.pack(RecordKind.QUIET, 0, 0, 0, 0, 0)


def encode_first_reply(reply: bytes) -> bytes:
    """What goes in front of the first `FetchReply`."""
    return _HEAD.pack(RecordKind.FIRST_REPLY, 0, 0, 0, len(reply), 0)


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


SPANS_MAX: Final = 65_536
_REGION: Final = struct.Struct("<BxxxIQ")
"""whether a descriptor of the memory follows, number of spans, size of the memory."""
REGION_SIZE_BYTES: Final = _REGION.size
SPAN_SIZE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class RegionHead:
    """Where the payload of a transfer over shm is. Then come `span_count` spans of 16 bytes: offset
    in the memory and size, which together are the payload of all layers asked for, in their order
    (store: of all layers, in the descriptor's order, with the chunks that are not needed).

    With `has_memory`, one more byte comes with the memory's file descriptor (SCM_RIGHTS); without
    it, the memory is the one that came over this connection before.
    """

    has_memory: bool
    span_count: int
    memory_size_bytes: int


def encode_region(head: RegionHead, spans: Sequence[tuple[int, int]]) -> bytes:
    packed = _REGION.pack(head.has_memory, head.span_count, head.memory_size_bytes)
    return packed + encode_spans(spans)


def encode_spans(spans: Sequence[tuple[int, int]]) -> bytes:
    return struct.pack(f"<{2 * len(spans)}Q", *chain.from_iterable(spans))


def decode_region(raw: bytes | memoryview) -> RegionHead:
    """Raises `MalformedMessage` for more spans than any client may send."""
    has_memory, span_count, size = _REGION.unpack(raw)
    if not 0 < span_count <= SPANS_MAX:
        raise MalformedMessage(f"{span_count} spans of a region; must be 1 to {SPANS_MAX}")
    return RegionHead(bool(has_memory), span_count, size)


def decode_spans(raw: bytes | memoryview) -> tuple[list[int], list[int]]:
    """Offsets and sizes."""
    numbers = struct.unpack(f"<{len(raw) // 8}Q", raw)
    return list(numbers[0::2]), list(numbers[1::2])
