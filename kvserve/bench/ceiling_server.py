"""The bare grpcio server that kvserve is held against: `python -m kvserve.bench.ceiling_server`.

grpc.aio on uvloop with the server's own channel options, raw bytes, no protobuf, no file, no
checksum: a stream of one constant frame in either direction is what grpcio can do at best.
`ReadFiles` is the bare loop that the grpc plane is held against: each frame is read from the files.
"""

import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvserve.bench.child import answer_parent, run_child
from kvserve.bench.tcp_ceiling_server import Opening
from kvserve.config import LimitsConfig
from kvserve.frame_memory import keep_frame_memory
from kvserve.rpc.server import channel_options
from kvserve.transfer.planes.grpc import GrpcFrame

SERVICE = "kvserve.bench.Ceiling"
OPENING = struct.Struct("<QQQ")
"""Frame size, layer size (bytes) and layer count: the request of `Read`, the start of `Write`."""

_STOP_S = 1.0
_Context = grpc.aio.ServicerContext[Any, Any]


def layer_frames(frame_size_bytes: int, layer_size_bytes: int) -> list[bytes]:
    """Incompressible frames of one layer; like kvserve's, no frame reaches into the next layer."""
    whole, rest = divmod(layer_size_bytes, frame_size_bytes)
    frames = [os.urandom(frame_size_bytes)] * whole
    return [*frames, os.urandom(rest)] if rest else frames


class _Ceiling:
    """The rpcs. Frames are made before the clock of the client starts: `Read` keeps the last."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], list[bytes]] = {}
        self._fds: dict[str, int] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Read": grpc.unary_stream_rpc_method_handler(self.read),
                "ReadFiles": grpc.unary_stream_rpc_method_handler(self.read_files),
                "Write": grpc.stream_stream_rpc_method_handler(self.write),
                "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            },
        )

    async def read(self, request: bytes, context: _Context) -> None:
        frame_size, layer_size, layer_count = OPENING.unpack(request)
        if (frame_size, layer_size) not in self._frames:
            self._frames[frame_size, layer_size] = layer_frames(frame_size, layer_size)
        frames = self._frames[frame_size, layer_size]
        for _ in range(layer_count):
            for frame in frames:
                await context.write(frame)

    async def read_files(self, request: bytes, context: _Context) -> None:
        """Reads on the loop, as what is in page cache allows; files stay open to the end."""
        opening = Opening(**json.loads(request))
        for path in opening.paths:
            if path not in self._fds:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fds = [self._fds[path] for path in opening.paths]
        size = opening.slice_size_bytes
        for offset in opening.offsets:
            for first in range(0, opening.chunk_count, opening.slices_a_frame):
                of_frame = fds[first : first + opening.slices_a_frame]
                frame = GrpcFrame(b"", len(of_frame) * size)
                for fd, at in zip(of_frame, range(0, len(frame.payload), size), strict=True):
                    os.preadv(fd, (frame.payload[at : at + size],), offset)
                await context.write(frame.message)

    async def write(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        """Discards everything; one reply when the first layer is whole, one at the end."""
        # `read` instead of iterating over `requests`: one generator step less for every frame.
        _, layer_size, layer_count = OPENING.unpack(await context.read())
        received = 0
        while isinstance(message := await context.read(), bytes):  # else EOF
            before, received = received, received + len(message)
            if before < layer_size <= received:
                await context.write(b"first layer")
        await context.write(b"all" if received == layer_size * layer_count else b"too few")

    async def echo(self, request: bytes, context: _Context) -> bytes:
        return request


async def _serve() -> None:
    keep_frame_memory()
    options = channel_options(LimitsConfig().message_size_bytes_max)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((_Ceiling().handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await answer_parent({"address": f"127.0.0.1:{port}"})
    # Clients have gone; with no grace at all gRPC would complain to those that are just leaving.
    await server.stop(_STOP_S)


if __name__ == "__main__":
    run_child(_serve())
