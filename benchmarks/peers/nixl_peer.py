"""NIXL over UCX: the client reads the server's registered memory, scattered into its own.

No keys, no lookup, no allocation: both sides know every address before the first fetch. By layer: a
prepared READ of a layer's slices, each awaited. By chunk: one prepared READ of everything; nothing
is placed afterwards, since NIXL scatters by itself. The progress threads are off, as they spin
(on two cores they take one from the transfer); then the server polls while it is read from.
"""

import base64
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

from benchmarks.peers.peer import Bytes, Mark, Peer, Unit, check

_POLL_S = 0.001


class Nixl(Peer):
    def __init__(self, unit: Unit, directory: Path, *, target: str) -> None:
        """`target`: `polls` now and then, where the kernel copies, or `spins`, where it sends."""
        super().__init__(unit, directory)
        self._pause_s = _POLL_S if target == "polls" else 0.0
        self._resting = threading.Event()
        self._poller: threading.Thread | None = None

    def start(self) -> dict[str, Any]:
        self._memory = np.ones((self.unit.chunk_count, self.unit.chunk_size_bytes), np.uint8)
        self._agent = self._registered("server", self._memory)
        return {
            "pids": [os.getpid()],
            "address": self._memory.ctypes.data,
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
        }

    def put(self) -> None:
        self._memory[:] = self.unit.chunks().reshape(self._memory.shape)

    def begin(self) -> None:
        self._resting.clear()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def end(self) -> None:
        self._resting.set()
        if self._poller is not None:
            self._poller.join()

    def _poll(self) -> None:
        while (
            not self._resting.wait(self._pause_s) if self._pause_s else not self._resting.is_set()
        ):
            self._agent.get_new_notifs()

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        unit = self.unit
        self._region = region
        self._agent = self._registered("client", region)
        name = self._agent.add_remote_agent(base64.b64decode(served["agent"]))
        size, layers = unit.slice_size_bytes, unit.layer_count
        index = np.arange(layers * unit.chunk_count, dtype=np.uint64)
        layer, chunk = np.divmod(index, np.uint64(unit.chunk_count))
        ours = np.uint64(region.ctypes.data) + index * np.uint64(size)
        theirs = chunk * np.uint64(layers) + layer
        theirs = np.uint64(served["address"]) + theirs * np.uint64(size)
        local = self._agent.prep_xfer_dlist("", _descriptors(ours, size), "DRAM")
        remote = self._agent.prep_xfer_dlist(name, _descriptors(theirs, size), "DRAM")

        def read(first: int, count: int) -> Any:
            chosen = np.arange(first, first + count, dtype=np.int32)
            return self._agent.make_prepped_xfer("READ", local, chosen, remote, chosen)

        count = unit.chunk_count
        self._layers = [read(at, count) for at in range(0, len(index), count)]
        self._whole = read(0, len(index))

    def fetch_layers(self, mark: Mark) -> None:
        for handle in self._layers:
            self._read(handle)
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        self._read(self._whole)
        mark()

    def _read(self, handle: Any) -> None:
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        check(state == "DONE", f"the transfer ended as {state}")

    def _registered(self, name: str, memory: Bytes) -> Any:
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        return agent


def _descriptors(addresses: Any, size_bytes: int) -> Any:
    """Rows of address, length, device."""
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, size_bytes
    return rows


PEER = Nixl
