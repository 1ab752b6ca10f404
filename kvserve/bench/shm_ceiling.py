"""The bare case of shared memory, on the client's side: one event a frame, no byte is moved."""

import socket
from time import perf_counter

from kvclient import SharedRegion
from kvserve.bench.child import Child
from kvserve.bench.rounds import Timing
from kvserve.bench.shm_ceiling_server import EVENT, MEMORY_SIZE
from kvserve.bench.socket_case import SocketCase
from kvserve.bench.tcp_ceiling import opening_for
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations


def shm_ceiling_server() -> Child:
    """The server process, not started."""
    return Child("kvserve.bench.shm_ceiling_server")


class ShmRead(SocketCase):
    """The server reads the files straight into the client's memory."""

    name = "shm_files"
    label = "bare shm, same files"

    def __init__(
        self, server: Child, unit: WorkUnit, region: SharedRegion, files: ChunkLocations
    ) -> None:
        super().__init__(socket.socket(socket.AF_UNIX))
        self.server_pid = server.pid
        self._unit = unit
        self._opening = opening_for(unit, files).encode()
        self._socket.connect(f"\0{server.hello['name']}")
        socket.send_fds(self._socket, [MEMORY_SIZE.pack(unit.size_bytes)], [region.fd])

    async def run(self) -> Timing:
        unit = self._unit
        started = perf_counter()
        first_layer_s = 0.0
        self._socket.sendall(self._opening)
        landed = 0
        while landed < unit.chunk_count * unit.layer_count:
            event = self._socket.recv(EVENT.size, socket.MSG_WAITALL)
            if len(event) < EVENT.size:
                raise ServerFault("the bare server of shared memory has ended")
            landed += EVENT.unpack(event)[0]
            if not first_layer_s and landed >= unit.chunk_count:
                first_layer_s = perf_counter() - started
        return Timing(perf_counter() - started, first_layer_s)
