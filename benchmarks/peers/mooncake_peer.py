"""Mooncake Store over TCP: `mooncake_master`, one process that lends memory, one that lends none.

Zero-copy calls into the registered region, in batches, as Mooncake advises. By layer: one
`batch_get_into` of a layer's slices. By chunk: one `batch_get_into_multi_buffers` of all chunks,
each scattered over the layers.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from benchmarks.peers.peer import Bytes, Mark, Peer, ServerProgram, check, free_port

_BUFFER_BYTES = 64 << 20
_LEASE_MS = 3_600_000  # nothing expires during a run


class Mooncake(Peer):
    def start(self) -> dict[str, Any]:
        port, metrics = free_port(), free_port()
        master = str(Path(sys.executable).with_name("mooncake_master"))
        options = [f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
        options += [f"--default_kv_lease_ttl={_LEASE_MS}", "--metrics_host=127.0.0.1"]
        self._master = ServerProgram([master, *options], port)
        self._port = port
        # Room for the unit both ways, and as much again for what the allocator wants.
        self._store = self._connected(port, lent_bytes=4 * self.unit.size_bytes + _BUFFER_BYTES)
        return {"port": port, "pids": [os.getpid(), self._master.pid]}

    def put(self) -> None:
        payload, chunks = self.unit.payload(), self.unit.chunks()
        for memory in (payload, chunks):
            self._register(memory)
        for index, layer in enumerate(payload):
            keys = self.unit.slice_keys(index)
            sizes = [self.unit.slice_size_bytes] * len(keys)
            self._put(keys, [row.ctypes.data for row in layer], sizes)
        keys = self.unit.chunk_keys()
        sizes = [self.unit.chunk_size_bytes] * len(keys)
        self._put(keys, [chunk.ctypes.data for chunk in chunks], sizes)
        for memory in (payload, chunks):
            self._store.unregister_buffer(memory.ctypes.data)

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        unit = self.unit
        self._store = self._connected(served["port"], lent_bytes=0)
        self._register(region)
        at = region.ctypes.data + unit.slice_size_bytes * np.arange(
            unit.layer_count * unit.chunk_count
        )
        self._addresses = at.reshape(unit.layer_count, unit.chunk_count)
        self._layers = [
            (unit.slice_keys(index), row.tolist()) for index, row in enumerate(self._addresses)
        ]
        self._slice_sizes = [unit.slice_size_bytes] * unit.chunk_count
        self._pieces = [[unit.slice_size_bytes] * unit.layer_count] * unit.chunk_count
        self._chunks = (unit.chunk_keys(), self._addresses.T.tolist())

    def fetch_layers(self, mark: Mark) -> None:
        for keys, addresses in self._layers:
            got = self._store.batch_get_into(keys, addresses, self._slice_sizes)
            check(got == self._slice_sizes, f"batch_get_into: {got}")
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        got = self._store.batch_get_into_multi_buffers(*self._chunks, self._pieces)
        check(set(got) == {self.unit.chunk_size_bytes}, f"batch_get_into_multi_buffers: {got}")
        mark()

    def stop(self) -> None:
        if hasattr(self, "_store"):
            self._store.close()
        if hasattr(self, "_master"):
            self._master.stop()

    def _put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        stored = self._store.batch_put_from(keys, addresses, sizes)
        check(not any(stored), f"batch_put_from: {stored}")

    def _register(self, memory: Bytes) -> None:
        failed = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
        check(failed == 0, f"register_buffer: {failed}")

    def _connected(self, port: int, *, lent_bytes: int) -> Any:
        store = MooncakeDistributedStore()
        failed = store.setup(
            f"127.0.0.1:{free_port()}",
            "P2PHANDSHAKE",
            lent_bytes,
            _BUFFER_BYTES,
            "tcp",
            "",
            f"127.0.0.1:{port}",
        )
        check(failed == 0, f"setup: {failed}")
        return store


PEER = Mooncake
