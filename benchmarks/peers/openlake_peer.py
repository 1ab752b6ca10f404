"""OpenLake's KV store on one host: `openlaked` in KV mode and its client over shared memory.

The client gathers and scatters by itself, so both ways land in the region without a copy here. By
layer: one `get_batch` of a layer's slices. By chunk: one `get_batch` of all chunks, each scattered
over the layers. All slots of a daemon have one size, so each way has a daemon of its own.
"""

import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from openlake_client import Client

from benchmarks.peers.peer import Bytes, Mark, Peer, ServerProgram, check, free_port

_SLOT_HEADER_BYTES, _KEY_BYTES = 54, 54
_CLIENT_IDS = {"server": 2048, "client": 2050}  # of two ways each; OpenLake wants 2048 and above
_CONFIG = """
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{port}"
kv_agents = ["127.0.0.1:{port}"]
s3_addr = "127.0.0.1:{unused}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1
[[credentials]]
access_key = "benchmark"
secret_key = "benchmark"
[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{port}"
disk_count = 0
[kv_slab]
capacity_gb = 1
reserve_ttl_secs = 60
"""
_WAYS = ("layers", "chunks")
_VISIBLE_TIMEOUT_S = 10.0

Batch = tuple[list[bytes], list[list[int]], list[list[int]]]
"""Keys, and for each the addresses and sizes of its pieces."""


class OpenLake(Peer):
    def start(self) -> dict[str, Any]:
        self._servers: list[ServerProgram] = []
        self._ports = []
        for way in _WAYS:
            # It takes the port after its own as well.
            port, unused = free_port(and_next=True), free_port()
            config = self.directory / f"{way}.toml"
            config.write_text(_CONFIG.format(port=port, unused=unused), "utf-8")
            daemon = str(files("openlake_client") / "openlaked")
            self._servers.append(ServerProgram([daemon, "--config", str(config)], port))
            self._ports.append(port)
        return {"ports": self._ports, "pids": [server.pid for server in self._servers]}

    def put(self) -> None:
        memory = self.unit.payload()
        for way, client in self._clients("server", self._ports, memory).items():
            for batch in self._batches(way, memory):
                check(not any(client.put_batch(*batch)), "put_batch failed")
            client.close()

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        self._client_of = self._clients("client", served["ports"], region)
        self._layers, self._chunks = (self._batches(way, region) for way in _WAYS)
        self._wait_until_visible("layers", self._layers)
        self._wait_until_visible("chunks", self._chunks)

    def fetch_layers(self, mark: Mark) -> None:
        for batch in self._layers:
            check(not any(self._client_of["layers"].get_batch(*batch)), "get_batch failed")
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        for batch in self._chunks:
            check(not any(self._client_of["chunks"].get_batch(*batch)), "get_batch failed")
        mark()

    def stop(self) -> None:
        for server in getattr(self, "_servers", ()):
            server.stop()
            # Its slab, which it leaves when it is told to end.
            Path(f"/dev/shm/openlake_kv_{server.pid}_0").unlink(missing_ok=True)

    def _clients(self, side: str, ports: list[int], memory: Bytes) -> dict[str, Client]:
        sizes = (self.unit.slice_size_bytes, self.unit.chunk_size_bytes)
        clients = {}
        for index, (way, port, size) in enumerate(zip(_WAYS, ports, sizes, strict=True)):
            client = Client("local", client_id=_CLIENT_IDS[side] + index)
            client.register_memory(memory.ctypes.data, memory.nbytes)
            client.attach(f"127.0.0.1:{port}", 0, _SLOT_HEADER_BYTES + size)
            clients[way] = client
        return clients

    def _batches(self, way: str, memory: Bytes) -> list[Batch]:
        """`memory` is laid out [layer][chunk] on both sides."""
        unit = self.unit
        size = unit.slice_size_bytes
        at = memory.ctypes.data + size * np.arange(unit.layer_count * unit.chunk_count)
        addresses = at.reshape(unit.layer_count, unit.chunk_count)
        if way == "chunks":
            pieces = [[size] * unit.layer_count] * unit.chunk_count
            return [(_keys(unit.chunk_keys()), addresses.T.tolist(), pieces)]
        return [
            (_keys(unit.slice_keys(index)), row[:, None].tolist(), [[size]] * unit.chunk_count)
            for index, row in enumerate(addresses)
        ]

    def _wait_until_visible(self, way: str, batches: list[Batch]) -> None:
        """What has just been put may be refused for a moment."""
        deadline = time.monotonic() + _VISIBLE_TIMEOUT_S
        for batch in batches:
            while any(self._client_of[way].get_batch(*batch)):
                check(time.monotonic() < deadline, f"{way}: what was put cannot be read")
                time.sleep(0.1)


def _keys(names: list[str]) -> list[bytes]:
    return [name.encode().ljust(_KEY_BYTES, b"\0") for name in names]


PEER = OpenLake
