"""The grpc plane, server side: payload frames as messages of the rpc's own stream.

Also what every plane has, since the rpc is the control path of all of them: the replies.

grpcio takes a message as one `bytes` object. So that file reads need no copy, the object is made
first and filled in place: `PyBytes_FromStringAndSize(NULL, n)` is CPython's documented way to get
bytes that may still be written, as long as nobody else has seen them. Each is filled before it is
handed to grpcio and never touched after.

This module does not import grpc: it reads and writes messages through callables.
"""

import ctypes
from collections.abc import AsyncIterator, Awaitable, Callable

from kvserve.errors import InvalidRequest
from kvserve.format.frames import FrameHeader, decode_frame, encode_prefix
from kvserve.format.messages import verdicts_to_pb
from kvserve.format.request_size import parse_bounded
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.planes.base import IncomingFrame, OutgoingFrame
from kvserve.v1 import kvserve_pb2 as pb

Read = Callable[[], Awaitable[object]]
"""The rpc's next request as bytes; anything else is the end."""
Write = Callable[[bytes], Awaitable[None]]

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]


class GrpcFrame:
    """One gRPC message whose payload part is still writable through `payload`."""

    __slots__ = ("message", "payload")

    is_in_place = False

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

    name = "grpc"

    def __init__(self, write: Write) -> None:
        self._write = write

    async def head(self, verdicts: list[Verdict]) -> None:
        await self._write(fetch_head(verdicts, self.name, None))

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> GrpcFrame:
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


def fetch_head(verdicts: list[Verdict], plane: str, data: pb.DataOffer | None) -> bytes:
    """The first reply of a fetch on any plane."""
    statuses, details = verdicts_to_pb(verdicts)
    head = pb.FetchHead(chunk_statuses=statuses, details=details, plane=plane, data=data)
    return pb.FetchReply(head=head).SerializeToString()


class GrpcStorePlane:
    """Implements `StorePlane` over one Store rpc; other planes replace where frames come from."""

    name = "grpc"

    def __init__(self, read: Read, write: Write, frame_size_bytes_max: int) -> None:
        self.is_finished = False
        self._read = read
        self._write = write
        self._frame_size_bytes_max = frame_size_bytes_max

    async def needs(self, statuses: list[ChunkStatus]) -> None:
        await self._say_needs(statuses, None)

    async def frames(self) -> AsyncIterator[IncomingFrame]:
        while isinstance(message := await self._read(), bytes):  # else the end
            frame = decode_frame(message)
            if frame is None:
                kind = parse_bounded(pb.StoreRequest, message).WhichOneof("message")
                if kind == "finish":
                    self.is_finished = True
                    return
                raise InvalidRequest(f"a store takes payload frames after `open`, got {kind}")
            yield *frame, _nothing

    async def layer_stored(self, layer_index: int) -> None:
        stored = pb.LayerStored(layer_index=layer_index)
        await self._write(pb.StoreReply(layer_stored=stored).SerializeToString())

    async def result(self, verdicts: list[Verdict]) -> None:
        chunk_statuses, details = verdicts_to_pb(verdicts)
        result = pb.StoreResult(chunk_statuses=chunk_statuses, details=details)
        await self._write(pb.StoreReply(result=result).SerializeToString())

    async def _say_needs(self, statuses: list[ChunkStatus], data: pb.DataOffer | None) -> None:
        needs = pb.StoreNeeds(
            chunk_statuses=bytes(statuses),
            frame_size_bytes_max=self._frame_size_bytes_max,
            plane=self.name,
            data=data,
        )
        await self._write(pb.StoreReply(needs=needs).SerializeToString())


def _nothing() -> None:
    """A message's memory goes with the message."""
