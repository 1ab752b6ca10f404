"""LMCache's remote connectors, called as its remote backend calls them; no engine, no GPU.

`lm`: the server that comes with LMCache, one connection, one key after the other (it has no batch
and no pipeline). `fs`: a file for each key, the page cache warm, no other process; the keys of a
batch at once on its thread pool. Both allocate memory of LMCache's own for each key, so what comes
is placed in the region by a copy here. By layer: a key for each layer of a chunk, as with
`use_layerwise`. By chunk: a key for each chunk.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from benchmarks.peers.peer import Bytes, Mark, Peer, ServerProgram, Unit, check, free_port

_TOKENS = 16
_CPU_GIB = 1.0
_CHUNKS_AT_ONCE = 8
_TYPE = torch.bfloat16


class LmCache(Peer):
    def __init__(self, unit: Unit, directory: Path, *, kind: str) -> None:
        """`kind`: `lm` or `fs`."""
        super().__init__(unit, directory)
        self._kind = kind
        self._loop = asyncio.new_event_loop()
        keys = [CacheEngineKey("kv", 1, 0, chunk, _TYPE) for chunk in range(unit.chunk_count)]
        self._chunk_keys = keys
        by_chunk = [key.split_layers(unit.layer_count) for key in keys]
        self._layer_keys = [list(layer) for layer in zip(*by_chunk, strict=True)]

    def start(self) -> dict[str, Any]:
        if self._kind == "fs":
            return {"port": 0, "pids": []}
        self._port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(self._port)]
        self._server = ServerProgram(command, self._port, timeout_s=90.0)
        return {"port": self._port, "pids": [self._server.pid]}

    def put(self) -> None:
        self._open(getattr(self, "_port", 0))
        unit = self.unit
        width = unit.slice_size_bytes // _TYPE.itemsize // _TOKENS
        layer_shape = torch.Size([_TOKENS, 2, width // 2])
        chunk_shape = torch.Size([1, unit.layer_count, _TOKENS, width])
        for keys, layer in zip(self._layer_keys, unit.payload(), strict=True):
            for key, data in zip(keys, layer, strict=True):
                self._put(key, data, layer_shape, MemoryFormat.KV_T2D)
        for key, chunk in zip(self._chunk_keys, unit.chunks(), strict=True):
            self._put(key, chunk, chunk_shape, MemoryFormat.KV_MLA_FMT)
        # A put is not answered; what comes after it on the same connection is.
        check(
            self._loop.run_until_complete(self._connector.exists(self._chunk_keys[-1])),
            "a put was lost",
        )

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        self._region = region
        self._open(served["port"])

    def fetch_layers(self, mark: Mark) -> None:
        for targets, keys in zip(self._region, self._layer_keys, strict=True):
            for target, found in zip(targets, self._get(keys), strict=True):
                target[:] = np.frombuffer(found.byte_array, np.uint8)
                found.ref_count_down()
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        layers = (self.unit.layer_count, self.unit.slice_size_bytes)
        for first in range(0, self.unit.chunk_count, _CHUNKS_AT_ONCE):
            keys = self._chunk_keys[first : first + _CHUNKS_AT_ONCE]
            for chunk, found in enumerate(self._get(keys), first):
                self._region[:, chunk] = np.frombuffer(found.byte_array, np.uint8).reshape(layers)
                found.ref_count_down()
        mark()

    def stop(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop()

    def _open(self, port: int) -> None:
        unit = self.unit
        width = unit.slice_size_bytes // _TYPE.itemsize // _TOKENS
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=_TOKENS, local_cpu=False, max_local_cpu_size=_CPU_GIB
        )
        # As one tensor a layer (MLA): then a chunk's layers follow each other as in kvserve's.
        shape = (unit.layer_count, 1, _TOKENS, 1, width)
        metadata = LMCacheMetadata("kv", 1, 1, 0, 0, _TYPE, shape, use_mla=True, chunk_size=_TOKENS)
        self._memory = LocalCPUBackend(config, metadata, "cpu")
        if self._kind == "fs":
            files = str(self.directory / "files")
            self._connector = FSConnector(self._loop, self._memory, config, base_paths_str=files)
        else:
            self._connector = LMCServerConnector("127.0.0.1", port, self._loop, self._memory)

    def _put(self, key: Any, data: Bytes, shape: torch.Size, form: MemoryFormat) -> None:
        held = self._memory.allocate(shape, _TYPE, form)
        np.frombuffer(held.byte_array, np.uint8)[:] = data.reshape(-1)
        self._loop.run_until_complete(self._connector.put(key, held))
        held.ref_count_down()

    def _get(self, keys: list[Any]) -> list[Any]:
        found: list[Any] = self._loop.run_until_complete(self._get_all(keys))
        check(len(found) == len(keys) and None not in found, "a key is missing")
        return found

    async def _get_all(self, keys: list[Any]) -> list[Any]:
        if self._kind == "fs":
            found: list[Any] = await self._connector.batched_get_non_blocking("bench", keys)
            return found
        # Two at once would read each other's answers: this connector takes one at a time.
        return [await self._connector.get(key) for key in keys]


PEER = LmCache
