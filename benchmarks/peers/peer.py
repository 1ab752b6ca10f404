"""What one peer is made of. Runs in the peer's own environment: needs numpy, never kvserve.

One class per peer serves in one process and fetches in another. Both are children of the benchmark
and answer its questions one at a time, see `child.py`.
"""

import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Mark = Callable[[], None]
"""Called once the first layer is whole; later calls change nothing."""

_POLL_S = 0.02
_TRIES = 20


@dataclass(frozen=True)
class Unit:
    """How much is moved. `source`: the file with the whole payload, laid out [layer][chunk]."""

    chunk_count: int
    layer_count: int
    slice_size_bytes: int
    source: str

    @property
    def chunk_size_bytes(self) -> int:
        return self.layer_count * self.slice_size_bytes

    @property
    def size_bytes(self) -> int:
        return self.chunk_count * self.chunk_size_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.layer_count, self.chunk_count, self.slice_size_bytes

    def payload(self) -> Bytes:
        """[layer][chunk][byte], as the client's region must be in the end."""
        return np.fromfile(self.source, np.uint8).reshape(self.shape)

    def chunks(self) -> Bytes:
        """[chunk][layer][byte]: each chunk in one piece."""
        return np.ascontiguousarray(self.payload().transpose(1, 0, 2))

    def slice_keys(self, layer_index: int) -> list[str]:
        """One key for each chunk of a layer."""
        return [f"kv/{layer_index:03d}/{chunk:04d}" for chunk in range(self.chunk_count)]

    def chunk_keys(self) -> list[str]:
        return [f"kv/all/{chunk:04d}" for chunk in range(self.chunk_count)]


class Peer:
    """One peer on one side. `start` and `put` run in the server process, the rest in the client.

    Attributes:
        directory: a directory of the run's own, the same for both sides.
    """

    def __init__(self, unit: Unit, directory: Path) -> None:
        self.unit = unit
        self.directory = directory

    def start(self) -> dict[str, Any]:
        """Starts serving.

        What the client needs to connect, `pids` of all that serves, and perhaps a `version`.
        """
        raise NotImplementedError

    def put(self) -> None:
        """Stores the unit both ways: a key for each slice, and one for each chunk."""
        raise NotImplementedError

    def begin(self) -> None:
        """Server: before each fetch, outside the clock."""

    def end(self) -> None:
        """Server: after each fetch, outside the clock."""

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        """Client: `served` is what `start` gave, `region` is where all fetches go."""
        raise NotImplementedError

    def fetch_layers(self, mark: Mark) -> None:
        """Client: the unit in layer order, by slices."""
        raise NotImplementedError

    def fetch_chunks(self, mark: Mark) -> None:
        """Client: the unit by whole chunks, each then in its place in every layer."""
        raise NotImplementedError

    def stop(self) -> None:
        """Either side; nothing of it may be left."""


class ServerProgram:
    """A server that is a program of its own, on a free port of 127.0.0.1."""

    def __init__(self, command: list[str], port: int, *, timeout_s: float = 30.0) -> None:
        """Returns once the port answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; its own log says why.
        """
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        deadline = time.monotonic() + timeout_s
        while not _answers(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RedisServer(ServerProgram):
    """`redis-server` as a cache in memory: no snapshots, no log."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        options = ["--save", "", "--appendonly", "no", "--dir", str(directory)]
        address = ["--bind", "127.0.0.1", "--port", str(self.port)]
        super().__init__(["redis-server", *address, *options], self.port)
        said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
        self.version = f"redis-server {said.stdout.partition('v=')[2].split()[0]}"


def free_port(*, and_next: bool = False) -> int:
    """`and_next`: the port after it is free too."""
    for _ in range(_TRIES):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port: int = taken.getsockname()[1]
        if not and_next or not _answers(port + 1):
            return port
    raise RuntimeError("no free port")


def check(ok: bool, what: str) -> None:
    """As `assert`, but also where assertions are off: a wrong answer must never be measured."""
    if not ok:
        raise RuntimeError(what)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
