"""The grpc plane, server side: payload frames as messages of the rpc's own stream.

grpcio takes a message as one `bytes` object. So that file reads need no copy, the object is made
first and filled in place: `PyBytes_FromStringAndSize(NULL, n)` is CPython's documented way to get
bytes that may still be written, as long as nobody else has seen them. Each is filled before it is
handed to grpcio and never touched after.

This module does not import grpc: it writes messages through a callable.
"""

import ctypes
from collections.abc import Awaitable, Callable

from kvserve.format.frames import FrameHeader, encode_prefix
from kvserve.format.messages import verdicts_to_pb
from kvserve.model import Verdict
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.v1 import kvserve_pb2 as pb

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]


class GrpcFrame:
    """One gRPC message whose payload part is still writable through `payload`."""

    __slots__ = ("message", "payload")

    def __init__(self, prefix: bytes, payload_size_bytes: int) -> None:
        size = len(prefix) + payload_size_bytes
        self.message: bytes = _new_bytes(None, size)
        # The view does not own the memory: `message` must live as long as it, hence one object.
        memory = (ctypes.c_char * size).from_address(_address_of(self.message))
        view = memoryview(memory).cast("B")
        view[: len(prefix)] = prefix
        self.payload = view[len(prefix) :]


class GrpcFetchPlane:
    """Implements `FetchPlane` over `write`, which takes one serialized `FetchReply`."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write

    async def head(self, verdicts: list[Verdict]) -> None:
        statuses, details = verdicts_to_pb(verdicts)
        head = pb.FetchHead(chunk_statuses=statuses, details=details)
        await self._write(pb.FetchReply(head=head).SerializeToString())

    def new_frame(self, header: FrameHeader, payload_size_bytes: int) -> GrpcFrame:
        return GrpcFrame(encode_prefix(header, payload_size_bytes), payload_size_bytes)

    async def send(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, GrpcFrame)
        await self._write(frame.message)

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        miss = pb.ChunkMiss(
            chunk_index=chunk_index,
            status=pb.ChunkStatus.Name(int(verdict.status)),
            message=verdict.message,
        )
        await self._write(pb.FetchReply(miss=miss).SerializeToString())
