"""Which reads a fetch should make: the server's own plan beside the two simple ones.

The real pump and store read real chunk files; only the file system has a latency for each read, as
a parallel one has, and nothing of it is in page cache. The plane sends nowhere. All plans have the
same threads, the same staging memory and the same code: they differ in how many layers wide the
steps are. One layer each, the whole chunk at once, or 1, 1, 2, 4, 8, ...
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvserve.bench.unit import WorkUnit
from kvserve.config import Config, LimitsConfig, StoreConfig
from kvserve.errors import ServerFault
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.format.read_plan import growing_widths
from kvserve.frame_memory import keep_frame_memory
from kvserve.fs.threads import FsThreads
from kvserve.model import Verdict
from kvserve.open_tree import OpenTree, open_tree_blocking
from kvserve.store.chunk_store import ChunkStore
from kvserve.store.open_chunks import OpenChunk
from kvserve.testing.slow_fs import SlowFileSystem
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from kvserve.transfer.turns import Turns

LATENCIES_MS: Final = (0.0, 0.3, 1.0, 5.0)
RATIO_MAX: Final = 1.10
OURS: Final = "1, 1, 2, 4, ... layers"
PLANS: Final[dict[str, Callable[[Callable[[], int]], Iterator[int]]]] = {
    "one layer a read": lambda _: repeat(1),
    "the whole chunk": lambda _: repeat(1 << 20),
    OURS: growing_widths,
}


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """`reads_in_flight`, `staging_size_bytes`: the same for every plan."""

    unit: WorkUnit
    repeats: int
    latencies_ms: Sequence[float] = LATENCIES_MS
    reads_in_flight: int = StoreConfig().io_threads
    staging_size_bytes: int = int(LimitsConfig().staging_size_bytes)


@dataclass(slots=True)
class PlanTimes:
    """One plan at one latency, milliseconds of every round."""

    plan: str
    latency_ms: float
    first_layer_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)

    @property
    def first_layer_median_ms(self) -> float:
        return median(self.first_layer_ms)

    @property
    def total_median_ms(self) -> float:
        return median(self.total_ms)


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ours to the better of the two others."""

    latency_ms: float
    first_layer: float
    total: float

    @property
    def passed(self) -> bool:
        return self.first_layer <= RATIO_MAX and self.total <= RATIO_MAX


@dataclass(frozen=True, slots=True)
class ReadReport:
    settings: ReadSettings
    times: Sequence[PlanTimes]

    def ratios(self) -> list[Ratios]:
        found = []
        for latency_ms in self.settings.latencies_ms:
            here = {it.plan: it for it in self.times if it.latency_ms == latency_ms}
            ours = here.pop(OURS)
            first = min(it.first_layer_median_ms for it in here.values())
            total = min(it.total_median_ms for it in here.values())
            found.append(
                Ratios(latency_ms, ours.first_layer_median_ms / first, ours.total_median_ms / total)
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": "readplan",
            "unit": {**asdict(self.settings.unit), "size_bytes": self.settings.unit.size_bytes},
            "repeats": self.settings.repeats,
            "reads_in_flight": self.settings.reads_in_flight,
            "staging_size_bytes": self.settings.staging_size_bytes,
            "times": [
                {
                    **asdict(it),
                    "first_layer_median_ms": it.first_layer_median_ms,
                    "total_median_ms": it.total_median_ms,
                }
                for it in self.times
            ],
            "ratios": [{**asdict(it), "passed": it.passed} for it in self.ratios()],
            "ratio_max": RATIO_MAX,
        }


class NullFrame:
    """A frame in the pool's memory that goes nowhere."""

    __slots__ = ("buffer", "payload")

    is_in_place = False

    def __init__(self, buffer: memoryview, payload_size_bytes: int) -> None:
        self.buffer = buffer
        self.payload = buffer[:payload_size_bytes]


class NullPlane:
    """Implements `FetchPlane`: notes when the first layer was complete, and how much came."""

    def __init__(self, staging: Staging, layer_size_bytes: int) -> None:
        self._staging = staging
        self._layer_size_bytes = layer_size_bytes
        self.size_bytes = 0
        self.first_layer_at = 0.0

    async def head(self, verdicts: list[Verdict]) -> None:
        raise AssertionError("the service sends the head")

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> NullFrame:
        return NullFrame(self._staging.take(payload_size_bytes), payload_size_bytes)

    async def send(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, NullFrame)
        self.size_bytes += len(frame.payload)
        self._staging.give(frame.buffer)
        if self.size_bytes >= self._layer_size_bytes and not self.first_layer_at:
            self.first_layer_at = time.perf_counter()
        await asyncio.sleep(0)

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        raise ServerFault(f"chunk {chunk_index}: {verdict.message}")


async def bench_readplan(
    settings: ReadSettings, root: Path, step: Callable[[str], None]
) -> ReadReport:
    """Runs all plans in turn in every round; `root` must be empty and is left as it gets."""
    keep_frame_memory()
    fs = SlowFileSystem()
    loop = asyncio.get_running_loop()
    times = [PlanTimes(plan, ms) for ms in settings.latencies_ms for plan in PLANS]
    # Of each row its own: the latency of a real server's tree does not change from fetch to fetch.
    paces = [ReadPace(settings.reads_in_flight) for _ in times]
    config = Config(store=StoreConfig(root=str(root)))
    staging = Staging(settings.staging_size_bytes, int(config.limits.frame_size_bytes))
    with FsThreads(settings.reads_in_flight, timeout_s=60.0) as threads:
        tree = await loop.run_in_executor(threads, open_tree_blocking, config, fs)
        step("store")
        chunks = await loop.run_in_executor(threads, _stored_blocking, tree, settings.unit)
        fetched = _Fetched(tree.store, threads, staging, chunks, settings.unit)
        try:
            for round_number in range(-1, settings.repeats):
                for row, pace in zip(times, paces, strict=True):
                    step(f"{row.plan}, {row.latency_ms:g} ms")
                    fs.latency_s = row.latency_ms / 1000
                    first_ms, total_ms = await _fetch(fetched, row.plan, pace)
                    if round_number >= 0:  # the first round warms up
                        row.first_layer_ms.append(first_ms)
                        row.total_ms.append(total_ms)
        finally:
            fs.latency_s = 0.0
            tree.store.open_chunks.release_all(chunks)
            await loop.run_in_executor(threads, _close_blocking, tree)
    return ReadReport(settings, times)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What every fetch has in common."""

    store: ChunkStore
    threads: FsThreads
    staging: Staging
    chunks: Sequence[OpenChunk]
    unit: WorkUnit


def _stored_blocking(tree: OpenTree, unit: WorkUnit) -> list[OpenChunk]:
    store = tree.store
    descriptor = unit.descriptor(0)
    where = store.locate(descriptor)
    store.ensure_namespace_blocking(descriptor.key(0))
    layers = [memoryview(unit.layer_bytes(0, layer)) for layer in range(unit.layer_count)]
    chunks = []
    for index in range(unit.chunk_count):
        writer = store.writer(where, index)
        slices = [
            layer[index * unit.slice_size_bytes :][: unit.slice_size_bytes] for layer in layers
        ]
        for layer_index, data in enumerate(slices):
            writer.write_blocking(layer_index, 0, data)
        writer.commit_blocking([checksum(data) for data in slices])
        chunk = store.open_blocking(where, index)
        if isinstance(chunk, Verdict):
            raise ServerFault(f"chunk {index} was stored and is a miss: {chunk}")
        chunks.append(chunk)
    return chunks


def _close_blocking(tree: OpenTree) -> None:
    tree.store.open_chunks.close_idle_blocking()
    tree.owner.release_blocking()


async def _fetch(fetched: _Fetched, plan: str, pace: ReadPace) -> tuple[float, float]:
    """Milliseconds to the first layer and in all."""
    unit = fetched.unit
    plane = NullPlane(fetched.staging, unit.layer_size_bytes)
    pump = FetchPump(
        fetched.store,
        fetched.threads,
        plane,
        layout=unit.descriptor(0).identity.layout,
        chunks=fetched.chunks,
        staging=fetched.staging,
        pace=pace,
        turns=Turns(),
        widths=PLANS[plan],
    )
    began = time.perf_counter()
    await pump.run(range(unit.layer_count))
    ended = time.perf_counter()
    if plane.size_bytes != unit.size_bytes:
        raise ServerFault(f"{plane.size_bytes} of {unit.size_bytes} bytes came")
    return (plane.first_layer_at - began) * 1000, (ended - began) * 1000
