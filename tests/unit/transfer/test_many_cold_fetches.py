"""Many large cold fetches at once: their memory is the pool's, whatever they ask for."""

import asyncio
import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvserve.bench.measure import memory
from kvserve.bench.readplan import NullPlane
from kvserve.bench.unit import WorkUnit
from kvserve.config import LimitsConfig
from kvserve.format.chunk_file import checksum
from kvserve.model import Verdict
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.ports import Piece
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from kvserve.transfer.turns import Turns

FETCHES = 64
UNIT = WorkUnit()
LAYERS = 8
SLICE = bytes(range(256)) * (UNIT.slice_size_bytes // 256)
SLACK_BYTES = 48 << 20


@dataclass(frozen=True)
class Chunk:
    checksums: "array[int]"


class ColdSource:
    """Every slice of every chunk is the same, and none is in page cache."""

    def read_cached(
        self, chunks: Sequence[Chunk | None], layer: int, offset: int, into: memoryview
    ) -> int:
        return 0

    def read_blocking(self, chunk: Chunk, pieces: Sequence[Piece]) -> Verdict | None:
        for _, offset, into in pieces:
            into[:] = SLICE[offset : offset + len(into)]
        return None

    def reject_blocking(self, chunk: Chunk) -> None:
        raise AssertionError("no chunk is bad")

    def hold(self, chunk: Chunk) -> None:
        raise AssertionError("no call hangs")

    release = hold

    def hangs(self, chunk: Chunk, verdict: Verdict, still: Callable[[], bool]) -> None:
        raise AssertionError("no call hangs")


async def most_resident(task: "asyncio.Future[list[None]]") -> int:
    """Bytes, sampled until the task has ended."""
    most = 0
    while not task.done():
        most = max(most, (await asyncio.to_thread(memory, os.getpid())).resident_bytes)
        await asyncio.wait([task], timeout=0.02)
    return most


async def test_64_fetches_of_32_mib_stay_within_the_pool() -> None:
    fetched_bytes = LAYERS * UNIT.layer_size_bytes
    limits = LimitsConfig()
    assert fetched_bytes == 32 << 20
    assert FETCHES * fetched_bytes >= 4 * limits.staging_size_bytes
    staging = Staging(limits.staging_size_bytes, limits.frame_size_bytes)
    layout = UNIT.descriptor(0).identity.layout
    chunk = Chunk(array("Q", [checksum(SLICE)] * UNIT.layer_count))
    pace, turns = ReadPace(16), Turns()
    planes = [NullPlane(staging, UNIT.layer_size_bytes) for _ in range(FETCHES)]
    with ThreadPoolExecutor(16) as threads:
        pumps = [
            FetchPump(
                ColdSource(),
                threads,
                plane,
                layout=layout,
                chunks=[chunk] * UNIT.chunk_count,
                staging=staging,
                pace=pace,
                turns=turns,
            )
            for plane in planes
        ]
        before = (await asyncio.to_thread(memory, os.getpid())).resident_bytes
        running = asyncio.gather(*(pump.run(range(LAYERS)) for pump in pumps))
        most = await most_resident(running)
        await running
    assert [plane.size_bytes for plane in planes] == [fetched_bytes] * FETCHES
    assert FETCHES * limits.frame_size_bytes < staging.used_bytes_max <= staging.size_bytes
    assert staging.used_bytes == 0
    assert most - before <= staging.size_bytes + SLACK_BYTES
