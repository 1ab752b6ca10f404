"""redhare over TCP: one store that holds the unit, one that holds nothing, metadata in redis.

The store scatters into the region by itself. By layer: one `batch_get_into_multi_buffers` of a
layer's slices. By chunk: one of all chunks, each scattered over the layers.
"""

import os
from typing import Any

import numpy as np
from redhare import KvStore

from benchmarks.peers.peer import Bytes, Mark, Peer, RedisServer, check, free_port

_SPARE_BYTES = 64 << 20
_TTL_MS = 3_600_000


class Redhare(Peer):
    def start(self) -> dict[str, Any]:
        self._redis = RedisServer(self.directory)
        port, pids = self._redis.port, [os.getpid(), self._redis.pid]
        self._store = self._opened("server", port, 3 * self.unit.size_bytes + _SPARE_BYTES)
        return {"port": port, "pids": pids, "version": self._redis.version}

    def put(self) -> None:
        memory = self.unit.payload()
        self._prepare(memory)
        for keys, addresses, sizes in (*self._layers, self._chunks):
            stored = self._store.batch_put_from_multi_buffers(keys, addresses, sizes)
            check(not any(stored), f"batch_put_from_multi_buffers: {stored}")

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        self._store = self._opened("client", served["port"], _SPARE_BYTES)
        self._store.register_buffer(region.ctypes.data, region.nbytes)
        self._prepare(region)

    def fetch_layers(self, mark: Mark) -> None:
        for batch in self._layers:
            self._get(*batch)
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        self._get(*self._chunks)
        mark()

    def stop(self) -> None:
        if hasattr(self, "_store"):
            self._store.close()
        if hasattr(self, "_redis"):
            self._redis.stop()

    def _get(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> None:
        got = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
        check(not any(got), f"batch_get_into_multi_buffers: {got}")

    def _prepare(self, memory: Bytes) -> None:
        """Keys, addresses and sizes of all batches; `memory` is laid out [layer][chunk]."""
        unit = self.unit
        size = unit.slice_size_bytes
        at = memory.ctypes.data + size * np.arange(unit.layer_count * unit.chunk_count)
        addresses = at.reshape(unit.layer_count, unit.chunk_count)
        one, all_layers = (
            [[size]] * unit.chunk_count,
            [[size] * unit.layer_count] * unit.chunk_count,
        )
        self._layers = [
            (unit.slice_keys(index), row[:, None].tolist(), one)
            for index, row in enumerate(addresses)
        ]
        self._chunks = (unit.chunk_keys(), addresses.T.tolist(), all_layers)

    def _opened(self, name: str, port: int, capacity: int) -> Any:
        return KvStore(
            redis_url=f"redis://127.0.0.1:{port}",
            client_id=name,
            data_plane_addr=f"127.0.0.1:{free_port()}",
            capacity=capacity,
            transport="tcp",
            default_ttl_ms=_TTL_MS,
        )


PEER = Redhare
