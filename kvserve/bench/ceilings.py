"""The ceilings in the benchmark's own process: memory and page cache, without any server.

They move the same slices to the same places as kvserve does, one call a slice, with every view made
before the clock starts.
"""

import os
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Self

from kvserve.bench.rounds import Case, Timing
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import empty_files
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.store.locations import ChunkLocations


def slices_by_layer(unit: WorkUnit, region: memoryview) -> list[list[memoryview]]:
    """`[layer][chunk]` views into a region that is laid out that way."""
    size, layer_size = unit.slice_size_bytes, unit.layer_size_bytes
    return [
        [region[at : at + size] for at in range(start, start + layer_size, size)]
        for start in range(0, unit.size_bytes, layer_size)
    ]


class Memcpy(Case):
    """Copies `[chunk][layer]` to `[layer][chunk]`: what the reordering alone costs."""

    name = "memcpy"
    label = "memcpy"

    def __init__(self, unit: WorkUnit, region: memoryview) -> None:
        # Written once so that it has memory of its own, not the kernel's page of zeros.
        source = memoryview(bytearray(b"\xa5") * unit.size_bytes)
        size = unit.slice_size_bytes
        self._moves = [
            [
                (target, source[at : at + size])
                for target, at in zip(
                    targets,
                    range(layer_index * size, unit.size_bytes, unit.layer_count * size),
                    strict=True,
                )
            ]
            for layer_index, targets in enumerate(slices_by_layer(unit, region))
        ]

    async def run(self) -> Timing:
        started = perf_counter()
        first_layer_s = 0.0
        for moves in self._moves:
            for target, source in moves:
                target[:] = source
            first_layer_s = first_layer_s or perf_counter() - started
        return Timing(perf_counter() - started, first_layer_s)


class PageCacheRead(Case):
    """`preadv` of kvserve's own chunk files in layer order, files open: no process in between."""

    name = "page_cache"
    label = "page cache, preadv"

    def __init__(self, unit: WorkUnit, region: memoryview, files: ChunkLocations) -> None:
        self._stack = ExitStack()
        fds: list[int] = []
        for path in files.paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            self._stack.callback(os.close, fds[-1])
        self._reads = [
            [(fd, [target], offset) for fd, target in zip(fds, targets, strict=True)]
            for targets, offset in zip(
                slices_by_layer(unit, region), files.geometry.slice_offsets, strict=True
            )
        ]
        self._size_bytes = unit.size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def run(self) -> Timing:
        started = perf_counter()
        first_layer_s = 0.0
        done = 0
        for reads in self._reads:
            for fd, target, offset in reads:
                done += os.preadv(fd, target, offset)
            first_layer_s = first_layer_s or perf_counter() - started
        took_s = perf_counter() - started
        assert done == self._size_bytes, f"read {done} of {self._size_bytes} bytes"
        return Timing(took_s, first_layer_s)


class PageCacheWrite(Case):
    """`pwrite` in layer order into new files of the chunk file's shape, closed and renamed.

    No header, no checksum, no fsync, one directory.
    """

    name = "page_cache"
    label = "page cache, pwrite"

    def __init__(
        self, unit: WorkUnit, region: memoryview, geometry: ChunkGeometry, directory: Path
    ) -> None:
        self._parent = directory
        self._rounds = count()
        self._directory = directory
        self._names = [f"{index:05d}" for index in range(unit.chunk_count)]
        self._writes = list(zip(slices_by_layer(unit, region), geometry.slice_offsets, strict=True))
        self._size_bytes = unit.size_bytes

    async def prepare(self) -> None:
        self._directory = self._parent / str(next(self._rounds))
        self._directory.mkdir(parents=True)

    async def run(self) -> Timing:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        final = [f"{self._directory}/{name}" for name in self._names]
        temporary = [f"{path}.tmp" for path in final]
        done = 0
        first_layer_s = 0.0
        started = perf_counter()
        fds = [os.open(path, flags, 0o640) for path in temporary]
        for slices, offset in self._writes:
            for fd, source in zip(fds, slices, strict=True):
                done += os.pwrite(fd, source, offset)
            first_layer_s = first_layer_s or perf_counter() - started
        for fd, source_path, target_path in zip(fds, temporary, final, strict=True):
            os.close(fd)
            os.rename(source_path, target_path)
        took_s = perf_counter() - started
        assert done == self._size_bytes, f"wrote {done} of {self._size_bytes} bytes"
        return Timing(took_s, first_layer_s)

    async def clean_up(self) -> None:
        empty_files(self._directory)
