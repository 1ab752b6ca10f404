"""redis: `redis-server` with redis-py and its hiredis parser, one connection.

By layer: one MGET of a layer's slices, the next one sent before the answer is read, as redis
advises for many keys (multi-key commands and pipelining). By chunk: GETs, `_AHEAD` of them in the
pipeline.
"""

from collections import deque
from typing import Any

import numpy as np
import redis

from benchmarks.peers.peer import Bytes, Mark, Peer, RedisServer, check

_AHEAD = 2


class Redis(Peer):
    def start(self) -> dict[str, Any]:
        self._server = RedisServer(self.directory)
        server = self._server
        return {"port": server.port, "pids": [server.pid], "version": server.version}

    def put(self) -> None:
        with redis.Redis(port=self._server.port) as client:
            for layer_index, layer in enumerate(self.unit.payload()):
                for key, data in zip(self.unit.slice_keys(layer_index), layer, strict=True):
                    client.set(key, data.tobytes())
            for key, chunk in zip(self.unit.chunk_keys(), self.unit.chunks(), strict=True):
                client.set(key, chunk.tobytes())

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        self._region = region
        self._connection = redis.Connection(port=served["port"])
        self._connection.connect()
        self._layer_keys = [self.unit.slice_keys(index) for index in range(self.unit.layer_count)]
        self._chunk_keys = self.unit.chunk_keys()

    def fetch_layers(self, mark: Mark) -> None:
        commands = (("MGET", *keys) for keys in self._layer_keys)
        for targets, values in zip(self._region, self._pipelined(commands), strict=True):
            for target, value in zip(targets, values, strict=True):
                target[:] = np.frombuffer(value, np.uint8)
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        commands = (("GET", key) for key in self._chunk_keys)
        layers = (self.unit.layer_count, self.unit.slice_size_bytes)
        for chunk, value in enumerate(self._pipelined(commands)):
            self._region[:, chunk] = np.frombuffer(value, np.uint8).reshape(layers)
        mark()

    def _pipelined(self, commands: Any) -> Any:
        waiting: deque[None] = deque()
        for command in commands:
            self._connection.send_command(*command)
            waiting.append(None)
            if len(waiting) == _AHEAD:
                waiting.popleft()
                yield self._answer()
        while waiting:
            waiting.popleft()
            yield self._answer()

    def _answer(self) -> Any:
        answer = self._connection.read_response()
        check(answer is not None, "a key is missing")
        return answer

    def stop(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop()


PEER = Redis
