"""Where a benchmark runs: a temporary directory, server processes over it, stored series."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvclient import AsyncClient, Region, SharedRegion
from kvclient.planes.choice import AUTO
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault
from kvserve.store.paths import fan_dirs, shard_dir
from kvserve.testing.server_process import ServerProcess


@dataclass(frozen=True, slots=True)
class Settings:
    """What a benchmark is asked to do. `root`: a directory on the file system to measure.

    `plane`: what kvserve's rows move payload over, as `AsyncClient` takes it.
    """

    unit: WorkUnit
    repeats: int
    root: Path | None = None
    plane: str = AUTO


class Workspace:
    """Everything below is removed on exit; `chunks` is the root of its servers."""

    def __init__(self, root: Path | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvserve-bench-", dir=root)
        self.directory = Path(self._directory.name)
        self.chunks = self.directory / "chunks"

    def server(self, settings: Sequence[str] = ()) -> ServerProcess:
        """A fresh server process, not started; one at a time."""
        return ServerProcess(self.chunks, settings=tuple(settings))

    async def store_series(self, stored: Sequence[tuple[WorkUnit, int]]) -> None:
        """Stores series through a server of their own, so that the measured one starts fresh."""
        with self.server() as server:
            async with AsyncClient(server.address, timeout_s=600.0) as client:
                for unit, series in stored:
                    source = touched(unit.size_bytes)
                    unit.fill(source, series)
                    async with client.store(unit.descriptor(series), source) as handle:
                        for layer_index in range(unit.layer_count):
                            await handle.store_layer(layer_index)
                        result = await handle.finish()
                    if not result.is_whole:
                        raise ServerFault(f"could not store series {series}: {result.verdicts[0]}")

    def make_fan_dirs(self, unit: WorkUnit) -> None:
        """Makes the directories that any tree older than some 10,000 chunks has."""
        for directory in fan_dirs(shard_dir(unit.descriptor(0).key(0))):
            (self.chunks / directory).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._directory.cleanup()


def settings_for(planes: Sequence[str]) -> list[str]:
    """What a server must be told so that it has these planes; all but nixl are on by default."""
    return ["server.nixl=true"] if "nixl" in planes else []


def empty_files(directory: Path) -> None:
    """Gives the memory of written files back, for the next round, and keeps the files themselves.

    ext4 makes new files slowly for some seconds after it deleted some, which would be measured.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def touched(size_bytes: int) -> memoryview:
    """Memory that has been written once: on a virtual machine the first touch is the slow one."""
    return memoryview(bytearray(b"\xff") * size_bytes)


def touched_region(size_bytes: int, plane: str) -> Region:
    """The same, as a region that the plane can use."""
    if plane != "shm":
        return Region(touched(size_bytes))
    region = SharedRegion(size_bytes)
    region.view[:] = b"\xff" * size_bytes
    return region
