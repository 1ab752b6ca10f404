"""Memory that a client on the same host shares, and where in it the payload of a transfer is.

Memory must be sealed against shrinking, and of ordinary pages: a page that is gone, or a huge one
that the host has no more of, would kill the server with SIGBUS. It is touched by the event loop
only, a frame at a time, so a transfer that has ended touches it no more.
"""

import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest
from kvserve.format.records import (
    REGION_SIZE_BYTES,
    SPAN_SIZE_BYTES,
    decode_region,
    decode_spans,
)
from kvserve.model import Descriptor
from kvserve.transfer.planes.data_port import forget_memory


class PayloadOrder:
    """Where in a transfer's payload each frame is: layers in the order asked for, chunks in each.

    `layers`: none means all, in the descriptor's order.
    """

    def __init__(self, descriptor: Descriptor, layers: Sequence[int] = ()) -> None:
        self._slice_sizes = descriptor.layout.slice_sizes
        starts: dict[int, int] = {}
        at = 0
        for layer_index in layers or descriptor.layer_order:
            if layer_index >= descriptor.layout.layer_count:
                break  # the service refuses it
            starts[layer_index] = at
            at += self._slice_sizes[layer_index] * descriptor.chunk_count
        self._starts: Mapping[int, int] = starts
        self.size_bytes = at

    def at(self, layer_index: int, first_chunk: int, slice_offset: int) -> int:
        """The first byte of the frame that starts there.

        Raises:
            InvalidRequest: the layer is not in the payload.
        """
        start = self._starts.get(layer_index)
        if start is None:
            raise InvalidRequest(f"layer {layer_index} is not in the payload")
        return start + first_chunk * self._slice_sizes[layer_index] + slice_offset


class PayloadSpans:
    """A payload in spans of a client's memory, one after another. The spans must be checked."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._offsets = offsets
        self._sizes = sizes
        self._ends = list(accumulate(sizes))

    def pieces(self, at: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Offset and size in the memory of each piece of a part of the payload."""
        if at + size_bytes > self._ends[-1]:
            raise InvalidRequest(
                f"a frame of {size_bytes} bytes at byte {at} of the payload, which has "
                f"{self._ends[-1]}"
            )
        index = bisect_right(self._ends, at)
        within = at - (self._ends[index - 1] if index else 0)
        while size_bytes:
            size = min(size_bytes, self._sizes[index] - within)
            yield self._offsets[index] + within, size
            size_bytes -= size
            index, within = index + 1, 0


class SharedPayload:
    """A payload in spans of shared memory."""

    def __init__(self, memory: memoryview, spans: PayloadSpans) -> None:
        self._memory = memory
        self._spans = spans

    def close(self) -> None:
        """Lets go of the memory, which can then be unmapped."""
        self._memory.release()

    def place(self, at: int, size_bytes: int) -> memoryview | None:
        """Where a part of the payload, from its byte `at` on, is; None if it is in several."""
        start, size = next(self._spans.pieces(at, size_bytes))
        return self._memory[start : start + size] if size == size_bytes else None

    def write(self, at: int, payload: memoryview) -> None:
        """Copies a part of the payload, from its byte `at` on, to its place."""
        for start, size in self._spans.pieces(at, len(payload)):
            self._memory[start : start + size] = payload[:size]
            payload = payload[size:]

    def read(self, at: int, into: memoryview) -> None:
        """Copies a part of the payload, from its byte `at` on, out of its place."""
        for start, size in self._spans.pieces(at, len(into)):
            into[:size] = self._memory[start : start + size]
            into = into[size:]


async def receive_shared(connection: DataSocket, size_bytes: int) -> SharedPayload:
    """What the client says right after its hello: where the `size_bytes` of the payload are.

    Raises:
        InvalidRequest: it is no memory that a server may touch, or not of that size.
    """
    raw = memoryview(bytearray(REGION_SIZE_BYTES))
    await connection.receive([raw])
    head = decode_region(raw)
    spans = memoryview(bytearray(SPAN_SIZE_BYTES * head.span_count))
    await connection.receive([spans])
    if head.has_memory:
        forget_memory(connection)
        fd = await connection.receive_fd()
        if fd is None:
            raise InvalidRequest("shared memory was announced and did not come")
        try:
            connection.memory = _map(fd, head.memory_size_bytes)
        finally:
            os.close(fd)
    return _shared(connection, spans, size_bytes)


def shared_again(connection: DataSocket, region: bytes, size_bytes: int) -> SharedPayload:
    """The same in memory that came over the connection before; `region`: as on the connection.

    Raises:
        InvalidRequest: it is no such region.
    """
    head = decode_region(region[:REGION_SIZE_BYTES].ljust(REGION_SIZE_BYTES, b"\0"))
    spans = memoryview(region)[REGION_SIZE_BYTES:]
    if head.has_memory or len(spans) != SPAN_SIZE_BYTES * head.span_count:
        raise InvalidRequest(f"a region of {head.span_count} spans in {len(region)} bytes")
    return _shared(connection, spans, size_bytes)


def _shared(connection: DataSocket, spans: memoryview, size_bytes: int) -> SharedPayload:
    if not isinstance(connection.memory, mmap.mmap):
        raise InvalidRequest("no shared memory came over this connection")
    offsets, sizes = decode_spans(spans)
    # Before anything holds the memory: the traceback of a refusal would keep it.
    spans_of_payload = checked_spans(offsets, sizes, len(connection.memory), size_bytes)
    return SharedPayload(memoryview(connection.memory), spans_of_payload)


def checked_spans(
    offsets: Sequence[int], sizes: Sequence[int], memory_size_bytes: int, payload_size_bytes: int
) -> PayloadSpans:
    """Raises `InvalidRequest` for spans outside of the memory, or not of the payload's size."""
    for offset, size in zip(offsets, sizes, strict=True):
        if not size or offset + size > memory_size_bytes:
            raise InvalidRequest(
                f"a span of {size} bytes at {offset} in a region of {memory_size_bytes} bytes"
            )
    if sum(sizes) != payload_size_bytes:
        raise InvalidRequest(f"spans for {sum(sizes)} bytes, the payload has {payload_size_bytes}")
    return PayloadSpans(offsets, sizes)


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    """Raises `InvalidRequest` for what is no memory file, may shrink, or is smaller than said."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest("shared memory must be a memfd: it has no seals") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidRequest("shared memory must be sealed against shrinking (F_SEAL_SHRINK)")
    page_size = os.fstatvfs(fd).f_bsize
    if page_size != mmap.PAGESIZE:
        raise InvalidRequest(f"shared memory must have ordinary pages, not of {page_size} bytes")
    found = os.fstat(fd).st_size
    if not 0 < size_bytes <= found:
        raise InvalidRequest(f"shared memory of {found} bytes was announced as {size_bytes}")
    try:
        return mmap.mmap(fd, size_bytes)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"shared memory cannot be mapped for writing: {error}") from error
