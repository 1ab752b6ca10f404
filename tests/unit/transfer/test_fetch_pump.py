"""The server's side of one fetch: frames in order, verified, bounded, and quiet at its end."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from kvserve.format.chunk_file import checksum, checksums_from
from kvserve.format.frames import FrameHeader
from kvserve.format.read_plan import growing_widths
from kvserve.fs.threads import FsThreads
from kvserve.model import ChunkStatus, Layout, Verdict, opaque
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.ports import Piece
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from kvserve.transfer.turns import Turns
from tests.unit.samples import HYBRID, frames_of, slice_of

LAYERS = range(HYBRID.layer_count)
TWELVE = Layout.uniform(layer_count=12, spec=opaque(100), dtype="uint8", chunk_tokens=4)


@dataclass
class Chunk:
    """One stored chunk in memory."""

    index: int
    slices: list[bytearray]
    checksums: tuple[int, ...]


def stored(index: int, layout: Layout = HYBRID) -> Chunk:
    sizes = layout.slice_sizes
    slices = [bytearray(slice_of(layer, index, size)) for layer, size in enumerate(sizes)]
    return Chunk(index, slices, tuple(checksum(data) for data in slices))


@dataclass
class MemorySource:
    """Slices from memory; what is not `is_cached` is read on a thread, once its gate is open.

    `gates` are by chunk; chunks without one have `gate`. `cached_pieces`: which of a slice's pieces
    of 60 bytes are cached, instead of `is_cached`.
    """

    is_cached: bool = True
    cached_pieces: set[int] | None = None
    faults: dict[tuple[int, int], Verdict] = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    running: int = 0
    held: list[int] = field(default_factory=list)
    reads: list[tuple[int, list[int]]] = field(default_factory=list)
    hanging: dict[int, Callable[[], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.gate.set()

    def read_cached(
        self, chunks: Sequence[Chunk | None], layer: int, offset: int, into: memoryview
    ) -> int:
        size = len(into) // len(chunks)
        for position, chunk in enumerate(chunks):
            if chunk is None:
                continue
            is_cached = self.is_cached
            if self.cached_pieces is not None:
                is_cached = offset // 60 in self.cached_pieces
            if not is_cached or (layer, chunk.index) in self.faults:
                return position
            start = position * size
            into[start : start + size] = chunk.slices[layer][offset : offset + size]
        return len(chunks)

    def read_blocking(self, chunk: Chunk, pieces: Sequence[Piece]) -> Verdict | None:
        with self.lock:
            self.running += 1
            self.reads.append((chunk.index, [layer for layer, _, _ in pieces]))
        assert self.gates.get(chunk.index, self.gate).wait(10)
        for layer, offset, into in pieces:
            into[:] = chunk.slices[layer][offset : offset + len(into)]
        with self.lock:
            self.running -= 1
        return next(
            (fault for layer, _, _ in pieces if (fault := self.faults.get((layer, chunk.index)))),
            None,
        )

    def reject_blocking(self, chunk: Chunk) -> None:
        self.rejected.append(chunk.index)

    def hold(self, chunk: Chunk) -> None:
        self.held.append(chunk.index)

    def release(self, chunk: Chunk) -> None:
        self.held.remove(chunk.index)

    def hangs(self, chunk: Chunk, verdict: Verdict, still: Callable[[], bool]) -> None:
        self.hanging[chunk.index] = still


@dataclass
class Frame:
    header: FrameHeader
    payload: memoryview
    is_in_place: bool = False


class RecordingPlane:
    """Keeps what a client would get; `open_frames` are made and not sent yet."""

    def __init__(self) -> None:
        self.sent: list[tuple[FrameHeader, bytes]] = []
        self.misses: list[tuple[int, Verdict]] = []
        self.open_frames = 0
        self.open_frames_max = 0

    async def head(self, verdicts: list[Verdict]) -> None:
        raise AssertionError("the service sends the head")

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> Frame:
        self.open_frames += 1
        self.open_frames_max = max(self.open_frames_max, self.open_frames)
        return Frame(header, memoryview(bytearray(payload_size_bytes)))

    async def send(self, frame: Frame) -> None:  # type: ignore[override]
        self.open_frames -= 1
        self.sent.append((frame.header, bytes(frame.payload)))
        await asyncio.sleep(0)

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        self.misses.append((chunk_index, verdict))

    def checksums(self) -> Iterator[tuple[tuple[int, int], int]]:
        """What the receiver is told of each slice, by layer and chunk."""
        for header, _ in self.sent:
            for position, value in enumerate(checksums_from(header.checksums)):
                yield (header.layer_index, header.first_chunk + position), value

    def slices(self) -> dict[tuple[int, int], bytes]:
        """What landed, by layer and chunk, put together from whole slices and pieces."""
        found: dict[tuple[int, int], bytearray] = {}
        for header, payload in self.sent:
            size = HYBRID.slice_sizes[header.layer_index]
            if header.slice_offset or len(payload) < size:
                at = found.setdefault((header.layer_index, header.first_chunk), bytearray())
                assert len(at) == header.slice_offset
                at += payload
                continue
            for position in range(len(payload) // size):
                key = (header.layer_index, header.first_chunk + position)
                assert key not in found, "a slice was sent twice"
                found[key] = bytearray(payload[position * size :][:size])
        return {key: bytes(data) for key, data in found.items()}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pump_of(
    source: MemorySource,
    plane: RecordingPlane,
    threads: Executor,
    chunks: Sequence[Chunk | None],
    *,
    frame_size_bytes: int = 1 << 20,
    staging_size_bytes: int = 64 << 20,
    reads_in_flight: int = 4,
    layout: Layout = HYBRID,
) -> FetchPump[Chunk]:
    return FetchPump(
        source,
        threads,
        plane,  # type: ignore[arg-type]
        layout=layout,
        chunks=chunks,
        staging=Staging(staging_size_bytes, frame_size_bytes),
        pace=ReadPace(reads_in_flight),
        turns=Turns(),
        widths=lambda _: growing_widths(),  # whatever this machine is busy with
    )


def whole(chunks: Sequence[int], layers: Sequence[int] = LAYERS) -> dict[tuple[int, int], bytes]:
    return {
        (layer, chunk): slice_of(layer, chunk, HYBRID.slice_sizes[layer])
        for layer in layers
        for chunk in chunks
    }


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "from disk"])
@pytest.mark.parametrize("frame_size_bytes", [7, 100, 256, 600, 1 << 20])
async def test_frames_are_those_of_the_plan_in_the_order_asked_for(
    threads: ThreadPoolExecutor, is_cached: bool, frame_size_bytes: int
) -> None:
    chunks = [stored(0), None, stored(2), stored(3)]
    plane = RecordingPlane()
    pump = pump_of(
        MemorySource(is_cached), plane, threads, chunks, frame_size_bytes=frame_size_bytes
    )
    await pump.run([2, 0, 1])
    wanted = [
        (header, bytes(payload))
        for layer in (2, 0, 1)
        for header, payload in frames_of(
            HYBRID, layer, [0, 2, 3], frame_size_bytes=frame_size_bytes
        )
    ]
    assert plane.sent == wanted
    assert plane.misses == []
    assert pump.faults == {}


async def test_no_chunks_no_frames(threads: ThreadPoolExecutor) -> None:
    plane = RecordingPlane()
    await pump_of(MemorySource(), plane, threads, [None, None]).run([0, 1, 2])
    assert plane.sent == []


class TestBadSlices:
    @pytest.mark.parametrize("frame_size_bytes", [60, 256, 1 << 20])
    @pytest.mark.parametrize("bad_layer", LAYERS)
    async def test_rot_in_page_cache_is_left_to_the_receiver(
        self, threads: ThreadPoolExecutor, frame_size_bytes: int, bad_layer: int
    ) -> None:
        """T5: it gets the checksums as stored, which do not match, for that slice only."""
        chunks = [stored(index) for index in range(4)]
        chunks[1].slices[bad_layer][-1] ^= 1
        source, plane = MemorySource(), RecordingPlane()
        await pump_of(source, plane, threads, chunks, frame_size_bytes=frame_size_bytes).run(LAYERS)
        assert (plane.misses, source.rejected) == ([], [])
        slices = plane.slices()
        expected = dict(plane.checksums())
        assert expected.keys() == slices.keys()
        wrong = [key for key, data in slices.items() if checksum(data) != expected[key]]
        assert wrong == [(bad_layer, 1)]

    @pytest.mark.parametrize("cached", [{0}, {1}, {0, 2}, {1, 2}, {0, 1, 2}, {2}])
    async def test_a_slice_whose_pieces_come_from_both_is_left_to_the_receiver(
        self, threads: ThreadPoolExecutor, cached: set[int]
    ) -> None:
        """Pieces of 60 bytes: what the server has not seen whole it cannot find wrong."""
        chunks = [stored(index) for index in range(2)]
        source, plane = MemorySource(cached_pieces=cached), RecordingPlane()
        await pump_of(source, plane, threads, chunks, frame_size_bytes=60).run(LAYERS)
        assert plane.misses == []
        assert plane.slices() == whole([0, 1])

    @pytest.mark.parametrize("frame_size_bytes", [60, 256, 1 << 20])
    @pytest.mark.parametrize("bad_layer", LAYERS)
    async def test_a_rotten_slice_takes_its_chunk_out_and_nobody_else(
        self, threads: ThreadPoolExecutor, frame_size_bytes: int, bad_layer: int
    ) -> None:
        """T5: never sent as good, reported once, set aside once; the others go on."""
        chunks = [stored(index) for index in range(4)]
        chunks[1].slices[bad_layer][-1] ^= 1
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        pump = pump_of(source, plane, threads, chunks, frame_size_bytes=frame_size_bytes)
        await pump.run(LAYERS)
        verdict = Verdict(ChunkStatus.MISS_CORRUPT, f"checksum of layer {bad_layer} does not match")
        assert plane.misses == [(1, verdict)]
        assert pump.faults == {1: verdict}
        assert source.rejected == [1]
        landed = plane.slices()
        before = {
            key: data
            for key, data in landed.items()
            if key[1] == 1 and key[0] != bad_layer and len(data) == HYBRID.slice_sizes[key[0]]
        }
        assert {key: landed[key] for key in landed if key[1] != 1} == whole([0, 2, 3])
        assert before == whole([1], range(bad_layer)), "good slices came before, none after"

    async def test_all_chunks_bad_ends_the_fetch_quietly(self, threads: ThreadPoolExecutor) -> None:
        chunks = [stored(index) for index in range(3)]
        for chunk in chunks:
            chunk.slices[0][0] ^= 1
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        await pump_of(source, plane, threads, chunks).run(LAYERS)
        assert plane.sent == []
        assert [index for index, _ in plane.misses] == [0, 1, 2]

    async def test_a_read_error_is_a_miss_and_no_reason_to_set_the_file_aside(
        self, threads: ThreadPoolExecutor
    ) -> None:
        error = Verdict(ChunkStatus.MISS_ERROR, "read 7: EIO")
        source, plane = MemorySource(faults={(1, 2): error}), RecordingPlane()
        await pump_of(source, plane, threads, [stored(index) for index in range(4)]).run(LAYERS)
        assert plane.misses == [(2, error)]
        assert source.rejected == []
        assert {k: v for k, v in plane.slices().items() if k[1] != 2} == whole([0, 1, 3])

    async def test_a_short_read_is_corrupt_and_set_aside(self, threads: ThreadPoolExecutor) -> None:
        short = Verdict(ChunkStatus.MISS_CORRUPT, "layer 0 is cut short")
        source, plane = MemorySource(faults={(0, 0): short}), RecordingPlane()
        await pump_of(source, plane, threads, [stored(0), stored(1)]).run(LAYERS)
        assert plane.misses == [(0, short)]
        assert source.rejected == [0]
        assert plane.slices() == whole([1])


class TestBounds:
    async def test_memory_is_bounded_by_the_staging_pool(self, threads: ThreadPoolExecutor) -> None:
        """Half of it is for what is read ahead; a frame is counted with 4 KiB at least."""
        plane = RecordingPlane()
        pump = pump_of(
            MemorySource(is_cached=False),
            plane,
            threads,
            [stored(index) for index in range(30)],
            frame_size_bytes=300,
            staging_size_bytes=8 * 4096,
        )
        await pump.run(LAYERS)
        assert 2 <= plane.open_frames_max <= 5
        assert plane.slices() == whole(range(30))

    async def test_with_memory_for_one_frame_it_still_ends(
        self, threads: ThreadPoolExecutor
    ) -> None:
        plane = RecordingPlane()
        pump = pump_of(
            MemorySource(is_cached=False),
            plane,
            threads,
            [stored(index) for index in range(5)],
            frame_size_bytes=100,
            staging_size_bytes=4096,
        )
        await pump.run(LAYERS)
        assert plane.open_frames_max == 1
        assert plane.slices() == whole(range(5))

    async def test_reads_of_a_slow_disk_overlap(self, threads: ThreadPoolExecutor) -> None:
        """As many as there may be, and no more."""
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        source.gate.clear()
        chunks = [stored(index) for index in range(10)]
        pump = pump_of(source, plane, threads, chunks, frame_size_bytes=256, reads_in_flight=3)
        task = asyncio.create_task(pump.run([0]))
        while source.running < 3:
            await asyncio.sleep(0)
        await still_running(task)
        assert source.running == 3
        source.gate.set()
        await task
        assert [header.first_chunk for header, _ in plane.sent] == list(range(10))


class TestSteps:
    async def test_the_first_layer_of_all_chunks_is_read_before_any_second(
        self, threads: ThreadPoolExecutor
    ) -> None:
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        chunks = [stored(index) for index in range(10)]
        await pump_of(source, plane, threads, chunks).run(LAYERS)
        first = [index for index, layers in source.reads[:10] if layers == [0]]
        assert sorted(first) == list(range(10))
        assert plane.slices() == whole(range(10))

    async def test_each_chunk_is_one_read_per_step(self, threads: ThreadPoolExecutor) -> None:
        """Of 1, 1, 2, 4, ... layers: twelve layers are five reads and not twelve."""
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        layers = list(range(12))
        chunks = [stored(0, TWELVE), stored(1, TWELVE)]
        await pump_of(source, plane, threads, chunks, layout=TWELVE).run(layers)
        of_first = [read for index, read in source.reads if index == 0]
        assert of_first == [[0], [1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


async def still_running(task: "asyncio.Task[None]") -> None:
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done, "it ended while a thread still reads"


class TestEnds:
    async def test_a_cancelled_fetch_ends_only_when_no_thread_reads(
        self, threads: ThreadPoolExecutor
    ) -> None:
        """Threads fill frames and use descriptors that are given back when `run` returns."""
        source = MemorySource(is_cached=False, gates={0: threading.Event()})
        source.gate.clear()
        chunks = [stored(index) for index in range(10)]
        pump = pump_of(source, RecordingPlane(), threads, chunks, frame_size_bytes=256)
        task = asyncio.create_task(pump.run(LAYERS))
        while source.running < 4:
            await asyncio.sleep(0)
        task.cancel()
        await still_running(task)
        source.gates[0].set()
        await still_running(task)
        source.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.running == 0

    async def test_a_client_that_went_away_ends_it_the_same_way(
        self, threads: ThreadPoolExecutor
    ) -> None:
        class Gone(RecordingPlane):
            async def send(self, frame: Frame) -> None:  # type: ignore[override]
                raise ConnectionError("the client went away")

        source = MemorySource(is_cached=False, gates={0: threading.Event()})
        source.gate.clear()
        chunks = [stored(index) for index in range(10)]
        pump = pump_of(source, Gone(), threads, chunks, frame_size_bytes=256)
        task = asyncio.create_task(pump.run(LAYERS))
        while source.running < 4:
            await asyncio.sleep(0)
        source.gates[0].set()
        await still_running(task)
        source.gate.set()
        with pytest.raises(ConnectionError):
            await task
        assert source.running == 0


class TestReadsThatHang:
    @pytest.fixture
    def fs_threads(self) -> Iterator[FsThreads]:
        with FsThreads(8, timeout_s=0.2) as threads:
            yield threads

    @staticmethod
    async def come_back(threads: FsThreads, *gates: threading.Event) -> None:
        for gate in gates:
            gate.set()
        while threads.hung:
            await asyncio.sleep(0.005)

    async def test_it_takes_its_chunk_out_and_keeps_what_it_touches(
        self, fs_threads: FsThreads
    ) -> None:
        gate = threading.Event()
        source, plane = MemorySource(is_cached=False, gates={1: gate}), RecordingPlane()
        chunks = [stored(index) for index in range(4)]
        pump = pump_of(source, plane, fs_threads, chunks, frame_size_bytes=256, reads_in_flight=2)
        await pump.run(LAYERS)
        assert plane.slices() == whole([0, 2, 3])
        assert [index for index, _ in plane.misses] == [1]
        assert pump.faults[1].status is ChunkStatus.MISS_TIMEOUT
        assert "did not end within 0.2 s" in pump.faults[1].message
        assert pump.has_read
        assert set(source.held) == {1}, "open as long as the read hangs"
        assert source.hanging[1]()
        await self.come_back(fs_threads, gate)
        assert source.held == []
        assert not source.hanging[1]()
        assert plane.slices() == whole([0, 2, 3])

    async def test_the_memory_of_its_frame_lives_as_long_as_it(self, fs_threads: FsThreads) -> None:
        """A gRPC frame's view does not own its bytes: a late read would write into anything."""
        frames: list[weakref.ref[Frame]] = []

        class Watching(RecordingPlane):
            def new_frame(
                self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
            ) -> Frame:
                frame = super().new_frame(
                    header, payload_size_bytes, may_be_in_place=may_be_in_place
                )
                frames.append(weakref.ref(frame))
                return frame

        def alive() -> int:
            gc.collect()
            return sum(frame() is not None for frame in frames)

        gate = threading.Event()
        source = MemorySource(is_cached=False, gates={1: gate})
        chunks = [stored(0), stored(1)]
        await pump_of(source, Watching(), fs_threads, chunks, frame_size_bytes=256).run([0])
        assert alive() == 1
        await self.come_back(fs_threads, gate)
        deadline = time.monotonic() + 10
        while alive():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def test_those_beside_it_in_its_frame_are_not_late(self, fs_threads: FsThreads) -> None:
        gate = threading.Event()
        source, plane = MemorySource(is_cached=False, gates={1: gate}), RecordingPlane()
        pump = pump_of(source, plane, fs_threads, [stored(index) for index in range(4)])
        await pump.run([0])
        assert plane.slices() == whole([0, 2, 3], [0])
        assert [index for index, _ in plane.misses] == [1]
        assert list(source.hanging) == [1]
        await self.come_back(fs_threads, gate)

    async def test_when_all_hang_it_ends_after_two_timeouts(self, fs_threads: FsThreads) -> None:
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        source.gate.clear()
        chunks = [stored(index) for index in range(60)]
        pump = pump_of(source, plane, fs_threads, chunks, frame_size_bytes=256, reads_in_flight=4)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await pump.run(LAYERS)
        assert loop.time() - began < 1.5
        assert plane.sent == []
        assert [index for index, _ in plane.misses] == list(range(60))
        assert len(source.held) == source.running <= 12
        assert not pump.has_read
        await self.come_back(fs_threads, source.gate)
        assert source.held == []

    async def test_a_cancelled_fetch_leaves_reads_behind_in_time(
        self, fs_threads: FsThreads
    ) -> None:
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        source.gate.clear()
        chunks = [stored(index) for index in range(10)]
        pump = pump_of(source, plane, fs_threads, chunks, frame_size_bytes=256)
        task = asyncio.create_task(pump.run(LAYERS))
        while source.running < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert sorted(source.held) == [0, 1, 2, 3]
        await self.come_back(fs_threads, source.gate)
        assert source.held == []

    async def test_setting_aside_that_hangs(self, fs_threads: FsThreads) -> None:
        chunks = [stored(0), stored(1)]
        chunks[0].slices[0][0] ^= 1
        source, plane = MemorySource(is_cached=False), RecordingPlane()
        may_end = threading.Event()
        source.reject_blocking = lambda chunk: may_end.wait(10) and None  # type: ignore[method-assign]
        await pump_of(source, plane, fs_threads, chunks).run(LAYERS)
        assert plane.misses[0][1].status is ChunkStatus.MISS_CORRUPT
        assert plane.slices() == whole([1])
        assert source.held == [0]
        await self.come_back(fs_threads, may_end)
        assert source.held == []
