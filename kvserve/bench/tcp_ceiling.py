"""The bare TCP cases, on the client's side: `recv_into` the region, frame by frame, and no more."""

import socket
from time import perf_counter

from kvserve.bench.child import Child
from kvserve.bench.grpc_ceiling import frame_size_bytes
from kvserve.bench.rounds import Timing
from kvserve.bench.socket_case import SocketCase
from kvserve.bench.tcp_ceiling_server import Opening
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations


def tcp_ceiling_server() -> Child:
    """The server process, not started."""
    return Child("kvserve.bench.tcp_ceiling_server")


def opening_for(unit: WorkUnit, files: ChunkLocations | None) -> Opening:
    """What a bare loop is to read, in frames of kvserve's size; without files, constant bytes."""
    offsets = [0] * unit.layer_count if files is None else list(files.geometry.slice_offsets)
    return Opening(
        chunk_count=unit.chunk_count,
        slice_size_bytes=unit.slice_size_bytes,
        slices_a_frame=frame_size_bytes(unit) // unit.slice_size_bytes or 1,
        offsets=offsets,
        paths=[] if files is None else list(files.paths),
    )


class TcpRead(SocketCase):
    """Server to client over one blocking connection: from files, or constant bytes without them."""

    def __init__(
        self, server: Child, unit: WorkUnit, region: memoryview, files: ChunkLocations | None
    ) -> None:
        super().__init__(socket.create_connection(("127.0.0.1", int(server.hello["port"]))))
        self.name = "tcp_constant" if files is None else "tcp_files"
        self.label = "bare TCP, constant bytes" if files is None else "bare TCP, same files"
        self.server_pid = server.pid
        self._layer_size_bytes = unit.layer_size_bytes
        self._region = region
        self._frame_size_bytes = frame_size_bytes(unit)
        self._opening = opening_for(unit, files).encode()

    async def run(self) -> Timing:
        started = perf_counter()
        first_layer_s = 0.0
        self._socket.sendall(self._opening)
        left = self._region
        first_layer_ends = len(left) - self._layer_size_bytes
        while left:
            got = self._socket.recv_into(
                left, min(self._frame_size_bytes, len(left)), socket.MSG_WAITALL
            )
            if not got:
                raise ServerFault("the bare TCP server has ended")
            left = left[got:]
            if not first_layer_s and len(left) <= first_layer_ends:
                first_layer_s = perf_counter() - started
        return Timing(perf_counter() - started, first_layer_s)
