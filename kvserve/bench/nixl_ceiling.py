"""The bare cases of NIXL, on the client's side: it asks for notifications, and no byte is moved."""

import os
import socket
from time import perf_counter
from types import TracebackType

from kvclient.region import address_of
from kvserve.bench.child import Child
from kvserve.bench.nixl_ceiling_server import READY, Target, bare_agent
from kvserve.bench.rounds import Timing
from kvserve.bench.socket_case import SocketCase
from kvserve.bench.tcp_ceiling import opening_for
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations

_RUN_S_MAX = 60.0


def nixl_ceiling_server() -> Child:
    """The server process, not started."""
    return Child("kvserve.bench.nixl_ceiling_server")


class NixlRead(SocketCase):
    """The server writes into the client's memory: from files, or constant bytes without them."""

    def __init__(
        self, server: Child, unit: WorkUnit, region: memoryview, files: ChunkLocations | None
    ) -> None:
        super().__init__(socket.create_connection(("127.0.0.1", int(server.hello["port"]))))
        self.name = "nixl_constant" if files is None else "nixl_files"
        self.label = "bare nixl, constant bytes" if files is None else "bare nixl, same files"
        self.server_pid = server.pid
        self._layer_count = unit.layer_count
        self._region = region
        self._agent = bare_agent()
        address = address_of(region)
        self._registered = self._agent.register_memory(
            [(address, len(region), 0, "")], "DRAM", ["UCX"]
        )
        metadata = self._agent.get_agent_metadata().hex()
        self._socket.sendall(Target(metadata, address, opening_for(unit, files)).encode())
        if self._socket.recv(len(READY), socket.MSG_WAITALL) != READY:
            raise ServerFault("the bare server of NIXL does not work")

    async def run(self) -> Timing:
        started = perf_counter()
        first_layer_s = 0.0
        self._socket.sendall(b"\n")
        landed = 0
        while landed < self._layer_count:
            found = sum(map(len, self._agent.get_new_notifs().values()))
            if not found:
                if perf_counter() - started > _RUN_S_MAX:
                    raise ServerFault("the bare server of NIXL has ended, or does not go on")
                os.sched_yield()
            landed += found
            if landed and not first_layer_s:
                first_layer_s = perf_counter() - started
        return Timing(perf_counter() - started, first_layer_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._agent.deregister_memory(self._registered, ["UCX"])
