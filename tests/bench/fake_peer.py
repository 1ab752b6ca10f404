"""A peer that needs nothing but numpy: the unit in a file that both processes read."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import Bytes, Mark, Peer, Unit


class Fake(Peer):
    def __init__(self, unit: Unit, directory: Path, *, fault: str) -> None:
        """`fault`: `none`, `start`, `wrong bytes`, `dies` and `breaks` (on the third fetch)."""
        super().__init__(unit, directory)
        self._fault = fault
        self._fetches = 0

    def start(self) -> dict[str, Any]:
        if self._fault == "start":
            raise RuntimeError("the port is taken")
        return {"pids": [os.getpid()], "version": "fake 1.0"}

    def put(self) -> None:
        payload = self.unit.payload()
        if self._fault == "wrong bytes":
            payload[1, 0, 0] ^= 1
        payload.tofile(self.directory / "held")

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        print("libraries print what they like")
        self._region = region

    def fetch_layers(self, mark: Mark) -> None:
        self._fetches += 1
        if self._fetches == 3 and self._fault == "dies":
            os._exit(7)
        if self._fetches == 3 and self._fault == "breaks":
            raise RuntimeError("the lease is over")
        held = np.fromfile(self.directory / "held", np.uint8).reshape(self.unit.shape)
        for target, layer in zip(self._region, held, strict=True):
            target[:] = layer
            mark()

    def fetch_chunks(self, mark: Mark) -> None:
        self.fetch_layers(mark)


PEER = Fake
