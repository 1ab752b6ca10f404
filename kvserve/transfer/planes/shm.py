"""The shm plane, server side: a fetch into memory that a client on the same host shares.

The client passes its memory as a file descriptor and says where in it the payload goes. A frame is
read into a buffer of the server's own, verified there, and copied once, while it is in the CPU's
cache; only its head travels.

Why not read straight into the shared memory: the client can write there too. The server would then
verify bytes that may change under it, and set good chunks aside as damaged because of somebody's
wild pointer. And a thread that hangs in a read would hold the client's memory. So it is touched by
the event loop only, for the time of one copy, and a cancelled fetch is quiet at once.

Memory must be sealed against shrinking: a page that is gone would kill the server with SIGBUS.
"""

import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import TracebackType

from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest
from kvserve.format.frames import FrameHeader
from kvserve.format.records import (
    REGION_SIZE_BYTES,
    SPAN_SIZE_BYTES,
    RecordKind,
    decode_region,
    decode_spans,
    encode_frame,
)
from kvserve.model import Descriptor, Verdict
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.transfer.planes.data_port import DataPort, Expected, forget_memory
from kvserve.transfer.planes.grpc import Write
from kvserve.transfer.planes.tcp import TcpFetchPlane, TcpFrame
from kvserve.v1 import kvserve_pb2 as pb


class Target:
    """Where the payload goes: spans of shared memory, one after another."""

    def __init__(self, memory: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """The spans must have been checked."""
        self._memory = memory
        self._offsets = offsets
        self._sizes = sizes
        self._ends = list(accumulate(sizes))

    @property
    def size_bytes(self) -> int:
        return self._ends[-1]

    def close(self) -> None:
        """Lets go of the memory, which can then be unmapped."""
        self._memory.release()

    def write(self, at: int, payload: memoryview) -> None:
        """Copies a part of the payload, from its byte `at` on, to its place."""
        index = bisect_right(self._ends, at)
        within = at - (self._ends[index - 1] if index else 0)
        while payload:
            start = self._offsets[index] + within
            size = min(len(payload), self._sizes[index] - within)
            self._memory[start : start + size] = payload[:size]
            payload = payload[size:]
            index, within = index + 1, 0


class ShmFrame(TcpFrame):
    """A frame that knows where in the payload it belongs."""

    __slots__ = ("at",)

    at: int


class ShmFetchPlane(TcpFetchPlane):
    """Implements `FetchPlane`."""

    name = "shm"

    def __init__(
        self, write: Write, port: DataPort, descriptor: Descriptor, layers: Sequence[int]
    ) -> None:
        super().__init__(write, port)
        self._slice_sizes = descriptor.layout.slice_sizes
        self._starts, self._size_bytes = layer_starts(descriptor, layers)
        self._target: Target | None = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._target is not None:
            self._target.close()
        await super().__aexit__(kind, error, traceback)

    def _offer(self, expected: Expected) -> pb.DataOffer:
        return pb.DataOffer(address=self._port.unix_address, secret=expected.secret)

    async def head(self, verdicts: list[Verdict]) -> None:
        await super().head(verdicts)
        if self._connection is not None:
            self._target = await _receive_target(self._connection)
            if self._target.size_bytes != self._size_bytes:
                raise InvalidRequest(
                    f"spans for {self._target.size_bytes} bytes, the payload has {self._size_bytes}"
                )

    def new_frame(self, header: FrameHeader, payload_size_bytes: int) -> ShmFrame:
        head = encode_frame(header, payload_size_bytes, RecordKind.LANDED)
        frame = ShmFrame(head, self._port.buffers.take(), payload_size_bytes)
        size = self._slice_sizes[header.layer_index]
        start = self._starts[header.layer_index]
        frame.at = start + header.first_chunk * size + header.slice_offset
        return frame

    async def send(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, ShmFrame)
        assert self._connection is not None, "a frame without a hit"
        assert self._target is not None, "a frame without a target"
        self._target.write(frame.at, frame.payload)
        self._port.buffers.give(frame.buffer)
        await self._connection.send((frame.head,))


def layer_starts(descriptor: Descriptor, layers: Sequence[int]) -> tuple[Mapping[int, int], int]:
    """Where each layer's payload starts, layers in the order asked for, and the size of all."""
    starts: dict[int, int] = {}
    at = 0
    for layer_index in layers or descriptor.layer_order:
        if layer_index >= descriptor.layout.layer_count:
            break  # the service refuses it
        starts[layer_index] = at
        at += descriptor.layout.slice_sizes[layer_index] * descriptor.chunk_count
    return starts, at


async def _receive_target(connection: DataSocket) -> Target:
    """What the client says right after its hello."""
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
    if not isinstance(connection.memory, mmap.mmap):
        raise InvalidRequest("no shared memory came over this connection")
    offsets, sizes = decode_spans(spans)
    # Before anything holds the memory: the traceback of a refusal would keep it.
    check_spans(offsets, sizes, len(connection.memory))
    return Target(memoryview(connection.memory), offsets, sizes)


def check_spans(offsets: Sequence[int], sizes: Sequence[int], memory_size_bytes: int) -> None:
    for offset, size in zip(offsets, sizes, strict=True):
        if not size or offset + size > memory_size_bytes:
            raise InvalidRequest(
                f"a span of {size} bytes at {offset} in a region of {memory_size_bytes} bytes"
            )


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    """Raises `InvalidRequest` for what is no memory file, may shrink, or is smaller than said."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest("shared memory must be a memfd: it has no seals") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidRequest("shared memory must be sealed against shrinking (F_SEAL_SHRINK)")
    found = os.fstat(fd).st_size
    if not 0 < size_bytes <= found:
        raise InvalidRequest(f"shared memory of {found} bytes was announced as {size_bytes}")
    try:
        return mmap.mmap(fd, size_bytes)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"shared memory cannot be mapped for writing: {error}") from error
