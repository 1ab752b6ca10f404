"""The bare grpcio cases, on the client's side: what gRPC itself allows between two processes.

The client is grpc.aio on the benchmark's uvloop with kvclient's channel options, the server is
`ceiling_server` in a process of its own. Payload is read and dropped, or one constant object is
written: no copy into a region, no file, no checksum.
"""

import asyncio
from time import perf_counter
from types import TracebackType
from typing import Self

import grpc

from kvclient.channel import OPTIONS
from kvserve.bench.ceiling_server import OPENING, SERVICE, layer_frames
from kvserve.bench.child import Child
from kvserve.bench.rounds import Case, Timing
from kvserve.bench.unit import WorkUnit
from kvserve.config import LimitsConfig
from kvserve.errors import ServerFault


def frame_size_bytes(unit: WorkUnit) -> int:
    """The size of kvserve's frames for this unit: whole slices, one layer at most."""
    frame_size = int(LimitsConfig().frame_size_bytes)
    slices = max(1, frame_size // unit.slice_size_bytes)
    return min(frame_size, slices * unit.slice_size_bytes, unit.layer_size_bytes)


def ceiling_server() -> Child:
    """The server process, not started."""
    return Child("kvserve.bench.ceiling_server")


class CeilingClient:
    """One channel to a ceiling server."""

    def __init__(self, server: Child) -> None:
        self.pid = server.pid
        self._channel = grpc.aio.insecure_channel(str(server.hello["address"]), options=OPTIONS)
        self.read: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            f"/{SERVICE}/Read"
        )
        self.read_files: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = (
            self._channel.unary_stream(f"/{SERVICE}/ReadFiles")
        )
        self.write: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"/{SERVICE}/Write"
        )
        self.echo: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"/{SERVICE}/Echo"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()


class GrpcRead(Case):
    """Server to client: the ceiling of a fetch."""

    name = "grpc"
    label = "bare grpcio stream"
    requests = 1

    def __init__(self, client: CeilingClient, unit: WorkUnit) -> None:
        self._client = client
        self._unit = unit
        self._frame_size_bytes = frame_size_bytes(unit)
        self.server_pid = client.pid

    async def run(self) -> Timing:
        unit = self._unit
        opening = OPENING.pack(self._frame_size_bytes, unit.layer_size_bytes, unit.layer_count)
        started = perf_counter()
        first_layer_s = 0.0
        received = 0
        call = self._client.read(opening)
        while isinstance(message := await call.read(), bytes):  # else EOF
            received += len(message)
            if not first_layer_s and received >= unit.layer_size_bytes:
                first_layer_s = perf_counter() - started
        took_s = perf_counter() - started
        if received != unit.size_bytes:
            raise ServerFault(f"the bare stream brought {received} of {unit.size_bytes} bytes")
        return Timing(took_s, first_layer_s)


class GrpcWrite(Case):
    """Client to server: the ceiling of a store."""

    name = "grpc"
    label = "bare grpcio stream"
    requests = 1

    def __init__(self, client: CeilingClient, unit: WorkUnit) -> None:
        self._client = client
        self._unit = unit
        self._frame_size_bytes = frame_size_bytes(unit)
        self._frames = layer_frames(self._frame_size_bytes, unit.layer_size_bytes)
        self.server_pid = client.pid

    async def run(self) -> Timing:
        unit = self._unit
        opening = OPENING.pack(self._frame_size_bytes, unit.layer_size_bytes, unit.layer_count)
        started = perf_counter()
        call = self._client.write()
        replied = asyncio.create_task(self._first_reply_at(call))
        await call.write(opening)
        for _ in range(unit.layer_count):
            for frame in self._frames:
                await call.write(frame)
        await call.done_writing()
        first_layer_at = await replied
        answer = await call.read()
        took_s = perf_counter() - started
        if answer != b"all":
            raise ServerFault(f"the bare stream ended with {answer!r}")
        return Timing(took_s, first_layer_at - started)

    @staticmethod
    async def _first_reply_at(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> float:
        await call.read()
        return perf_counter()
