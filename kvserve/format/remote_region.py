"""What a client says of its region before a transfer over nixl, right after its hello. Pure.

```
head       24 bytes: size of the metadata, number of spans, address and size of the region
metadata   NIXL's, of the agent that has registered the region and nothing else
spans      16 bytes each, as for shm: offset in the region and size
```

The metadata names the agent, how it is reached and by what keys its memory; it is opaque to us.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvserve.errors import MalformedMessage
from kvserve.format.records import SPANS_MAX, encode_spans

METADATA_SIZE_BYTES_MAX: Final = 256 << 10
_HEAD: Final = struct.Struct("<IIQQ")
REMOTE_REGION_SIZE_BYTES: Final = _HEAD.size
_END_MAX: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """The head, decoded."""

    metadata_size_bytes: int
    span_count: int
    address: int
    size_bytes: int


def encode_remote_region(
    address: int, size_bytes: int, metadata: bytes, spans: Sequence[tuple[int, int]]
) -> bytes:
    head = _HEAD.pack(len(metadata), len(spans), address, size_bytes)
    return head + metadata + encode_spans(spans)


def decode_remote_region(raw: bytes | memoryview) -> RemoteRegion:
    """Raises `MalformedMessage` for sizes that no client may send."""
    head = RemoteRegion(*_HEAD.unpack(raw))
    if not 0 < head.metadata_size_bytes <= METADATA_SIZE_BYTES_MAX:
        raise MalformedMessage(
            f"{head.metadata_size_bytes} bytes of metadata; must be 1 to {METADATA_SIZE_BYTES_MAX}"
        )
    if not 0 < head.span_count <= SPANS_MAX:
        raise MalformedMessage(f"{head.span_count} spans of a region; must be 1 to {SPANS_MAX}")
    if not head.size_bytes or head.address + head.size_bytes > _END_MAX:
        raise MalformedMessage(f"a region of {head.size_bytes} bytes at address {head.address}")
    return head
