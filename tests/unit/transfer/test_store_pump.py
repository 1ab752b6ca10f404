"""The server's side of one store: written, reported in order; one failure costs one chunk."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from kvserve.errors import InvalidRequest, Overloaded, StorageFull, StorageUnavailable
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.format.read_plan import staged_size_bytes
from kvserve.fs.threads import FsThreads
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.staging import Staging
from kvserve.transfer.store_pump import StorePump, failure_verdict
from kvserve.transfer.store_session import StoreSession
from tests.unit.samples import SMALL, frames_of, slice_of

NEEDED = [1, 2, 5]
STORED = Verdict(ChunkStatus.STORED)


class MemorySink:
    """One chunk's slices in memory; writes wait for `gate` and raise `error` if it is set."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.slices = [bytearray(size) for size in SMALL.slice_sizes]
        self.committed: list[int] | None = None
        self.error: Exception | None = None
        self.commit_error: Exception | None = None
        self.writes = 0
        self.is_abandoned = False
        self.abandoned: Callable[[], None] = lambda: None
        self.is_given_up = False

    def write_blocking(self, layer_index: int, slice_offset: int, data: memoryview) -> None:
        assert self.gate.wait(10)
        self.writes += 1
        if self.error is not None:
            raise self.error
        self.slices[layer_index][slice_offset : slice_offset + len(data)] = data

    def commit_blocking(self, slice_checksums: Sequence[int]) -> None:
        if self.commit_error is not None:
            raise self.commit_error
        self.committed = list(slice_checksums)

    def abandon_blocking(self) -> None:
        self.is_abandoned = True
        self.abandoned()

    def give_up(self) -> None:
        self.is_given_up = True

    def is_whole(self, index: int) -> bool:
        wanted = [slice_of(layer, index, size) for layer, size in enumerate(SMALL.slice_sizes)]
        return self.slices == wanted and self.committed == [checksum(data) for data in wanted]


class Store:
    """A pump over sinks in memory; `stored_layers` is what the client was told."""

    def __init__(self, threads: Executor, frames_in_flight: int = 4) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sinks = {index: MemorySink(self.gate) for index in NEEDED}
        self.stored_layers: list[int] = []
        self.staging = Staging(64 << 20, 1 << 20)
        self.share = self.staging.store()
        self.share.__enter__()
        self.pump = StorePump(
            StoreSession(SMALL, NEEDED, frame_size_bytes_max=1 << 20),
            self.sinks.__getitem__,
            threads,
            layer_stored=lambda layer_index: self._layer_stored(layer_index),
            frames_in_flight=frames_in_flight,
            share=self.share,
        )

    async def _layer_stored(self, layer_index: int) -> None:
        self.stored_layers.append(layer_index)

    async def send(self, layer_index: int, frame_size_bytes: int = 1 << 20) -> None:
        for header, payload in frames_of(
            SMALL, layer_index, NEEDED, frame_size_bytes=frame_size_bytes
        ):
            await self.pump.feed(header, payload)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("frame_size_bytes", [50, 256, 1 << 20])
async def test_what_was_sent_is_written_and_published(
    threads: ThreadPoolExecutor, frame_size_bytes: int
) -> None:
    store = Store(threads)
    for layer_index in (1, 0):
        await store.send(layer_index, frame_size_bytes)
    await store.pump.finish(may_publish=True)
    await store.pump.close()
    assert all(store.sinks[index].is_whole(index) for index in NEEDED)
    assert store.pump.verdicts == dict.fromkeys(NEEDED, STORED)
    assert store.stored_layers == [1, 0]


async def test_a_layer_is_reported_when_its_last_byte_is_written_and_not_before(
    threads: ThreadPoolExecutor,
) -> None:
    store = Store(threads)
    store.gate.clear()
    await store.send(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert store.stored_layers == []
    store.gate.set()
    while not store.stored_layers:
        await asyncio.sleep(0)
    assert store.stored_layers == [0], "without the next layer being sent"
    assert all(sink.committed is None for sink in store.sinks.values()), "written, not published"
    await store.pump.close()


async def test_a_slow_disk_holds_the_client_back(threads: ThreadPoolExecutor) -> None:
    """At most `frames_in_flight` frames are in memory; then `feed` waits."""
    store = Store(threads, frames_in_flight=2)
    store.gate.clear()
    sending = asyncio.create_task(store.send(0, frame_size_bytes=256))
    done, _ = await asyncio.wait([sending], timeout=0.05)
    assert not done, "three frames, room for two"
    store.gate.set()
    await sending
    await store.pump.finish(may_publish=True)
    await store.pump.close()
    assert store.stored_layers == [0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StorageFull("write 5: ENOSPC"), ChunkStatus.NO_SPACE),
        (StorageUnavailable("write 5: EIO"), ChunkStatus.STORE_ERROR),
        (Overloaded("out of file descriptors"), ChunkStatus.STORE_ERROR),
    ],
)
async def test_a_chunk_that_cannot_be_written_does_not_take_the_others_with_it(
    threads: ThreadPoolExecutor, error: Exception, status: ChunkStatus
) -> None:
    """T4, D3: no space for one chunk; the rest is stored."""
    store = Store(threads)
    store.sinks[2].error = error
    for layer_index in (0, 1):
        await store.send(layer_index)
    await store.pump.finish(may_publish=True)
    await store.pump.close()
    assert store.pump.verdicts == {1: STORED, 2: Verdict(status, str(error)), 5: STORED}
    assert store.sinks[2].committed is None
    assert store.sinks[2].writes == 1, "what failed once is not tried again"
    assert store.sinks[1].is_whole(1)
    assert store.sinks[5].is_whole(5)


async def test_without_space_the_last_chunk_makes_room_for_the_first(
    threads: ThreadPoolExecutor,
) -> None:
    """A prefix needs its first chunks: what was written of the last ones is removed for them."""
    store = Store(threads)
    await store.send(0)
    while not store.stored_layers:
        await asyncio.sleep(0)
    first, last = store.sinks[1], store.sinks[5]
    first.error = StorageFull("write 5: ENOSPC")
    last.abandoned = lambda: setattr(first, "error", None)
    await store.send(1)
    await store.pump.finish(may_publish=True)
    await store.pump.close()
    full = Verdict(ChunkStatus.NO_SPACE, "write 5: ENOSPC")
    assert store.pump.verdicts == {1: STORED, 2: STORED, 5: full}
    assert first.is_whole(1)
    assert last.is_abandoned
    assert last.committed is None


async def test_what_was_written_of_a_failed_chunk_is_removed_at_once(
    threads: ThreadPoolExecutor,
) -> None:
    """Not at the end of the store: prefill may take long, and others need the space."""
    store = Store(threads)
    store.sinks[2].error = StorageUnavailable("write 5: EIO")
    await store.send(0)
    while not store.stored_layers:
        await asyncio.sleep(0)
    assert [index for index in NEEDED if store.sinks[index].is_abandoned] == [2]
    await store.pump.close()


async def test_a_commit_that_fails_is_that_chunks_verdict(threads: ThreadPoolExecutor) -> None:
    store = Store(threads)
    store.sinks[5].commit_error = StorageFull("close 9: EDQUOT")
    for layer_index in (0, 1):
        await store.send(layer_index)
    await store.pump.finish(may_publish=True)
    await store.pump.close()
    assert store.pump.verdicts[5] == Verdict(ChunkStatus.NO_SPACE, "close 9: EDQUOT")
    assert store.pump.verdicts[1] == store.pump.verdicts[2] == STORED


async def test_ending_early_publishes_nothing(threads: ThreadPoolExecutor) -> None:
    store = Store(threads)
    await store.send(0)
    await store.pump.finish(may_publish=True)
    await store.pump.close()
    assert all(sink.committed is None for sink in store.sinks.values())
    for index in NEEDED:
        verdict = store.pump.verdicts[index]
        assert verdict.status is ChunkStatus.INCOMPLETE
        assert "the store ended early: 1 of 2 layers had come" in verdict.message


async def test_a_broken_rule_ends_it_before_anything_is_written(
    threads: ThreadPoolExecutor,
) -> None:
    store = Store(threads)
    with pytest.raises(InvalidRequest, match="layer 7 is out of range"):
        await store.pump.feed(FrameHeader(7, 1, 0, b""), memoryview(b"x"))
    await store.pump.close()
    assert all(sink.writes == 0 for sink in store.sinks.values())


async def test_close_waits_for_the_threads(threads: ThreadPoolExecutor) -> None:
    """B6: the writers and the frames' memory are the caller's again only then."""
    store = Store(threads)
    store.gate.clear()
    await store.send(0)
    closing = asyncio.create_task(store.pump.close())
    done, _ = await asyncio.wait([closing], timeout=0.05)
    assert not done, "a write is still running"
    store.gate.set()
    await closing
    assert all(sink.writes == 1 for sink in store.sinks.values())
    assert store.stored_layers == [], "nobody is told any more"


async def test_a_report_that_fails_while_close_is_cancelled_is_no_stray_error(
    threads: ThreadPoolExecutor,
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    gone, is_told = asyncio.Event(), asyncio.Event()

    async def tell(layer_index: int) -> None:
        is_told.set()
        await gone.wait()
        raise ConnectionError("the client is gone")

    async def close_and_cancel() -> None:
        store = Store(threads)
        store._layer_stored = tell  # type: ignore[method-assign]
        await store.send(0)
        await is_told.wait()
        closing = asyncio.create_task(store.pump.close())
        await asyncio.sleep(0)
        closing.cancel()
        gone.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    await close_and_cancel()
    await asyncio.sleep(0.01)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


class TestWritesThatHang:
    @pytest.fixture
    def fs_threads(self) -> Iterator[FsThreads]:
        with FsThreads(4, timeout_s=0.2) as threads:
            yield threads

    async def test_one_chunk_is_dropped_and_what_was_behind_it_is_written(
        self, fs_threads: FsThreads
    ) -> None:
        store = Store(fs_threads, frames_in_flight=2)
        store.sinks[2].gate = threading.Event()
        for layer_index in (0, 1):
            await store.send(layer_index, frame_size_bytes=600)
        await store.pump.finish(may_publish=True)
        await store.pump.close()
        late = store.pump.verdicts[2]
        assert late.status is ChunkStatus.STORE_ERROR
        assert "did not end within 0.2 s" in late.message
        assert store.pump.verdicts == {1: STORED, 2: late, 5: STORED}
        assert store.sinks[1].is_whole(1)
        assert store.sinks[5].is_whole(5)
        assert [store.sinks[index].is_given_up for index in NEEDED] == [False, True, False]
        assert store.stored_layers == [0, 1]
        store.sinks[2].gate.set()
        while fs_threads.hung:
            await asyncio.sleep(0.005)
        assert sum(sink.writes for sink in store.sinks.values()) >= 5
        assert store.stored_layers == [0, 1], "the thread that came back reports nothing"

    async def test_its_memory_counts_until_the_write_comes_back(
        self, fs_threads: FsThreads
    ) -> None:
        """Also when the store is over: the pool does not give it to others meanwhile."""
        store = Store(fs_threads)
        store.sinks[2].gate = threading.Event()
        for layer_index in (0, 1):
            await store.send(layer_index)
        await store.pump.finish(may_publish=True)
        await store.pump.close()
        assert store.pump.verdicts[2].status is ChunkStatus.STORE_ERROR
        hung_bytes = store.staging.hung_bytes
        frames = [staged_size_bytes(len(NEEDED) * size) for size in SMALL.slice_sizes]
        assert hung_bytes == sum(frames), "of both layers: two jobs hang"
        assert store.share.held_bytes == 0, "it is not counted twice"
        store.share.__exit__(None, None, None)
        assert (store.staging.used_bytes, store.staging.hung_bytes) == (0, hung_bytes)
        store.sinks[2].gate.set()
        while fs_threads.hung:
            await asyncio.sleep(0.005)
        assert store.staging.hung_bytes == 0

    async def test_memory_of_a_store_that_hangs_altogether_comes_back(
        self, fs_threads: FsThreads
    ) -> None:
        store = Store(fs_threads)
        store.gate.clear()

        async def send_all() -> None:
            for layer_index in (0, 1):
                await store.send(layer_index)
            await store.pump.finish(may_publish=True)

        with pytest.raises(StorageUnavailable):
            await send_all()
        await store.pump.close()
        store.share.__exit__(None, None, None)
        assert store.staging.used_bytes == 0
        assert store.staging.hung_bytes > 0
        store.gate.set()
        while fs_threads.hung:
            await asyncio.sleep(0.005)
        assert (store.staging.used_bytes, store.staging.hung_bytes) == (0, 0)

    async def test_a_second_chunk_ends_the_store(self, fs_threads: FsThreads) -> None:
        store = Store(fs_threads)
        store.gate.clear()
        await store.send(0)
        with pytest.raises(StorageUnavailable, match="did not end within"):
            await store.pump.finish(may_publish=True)
        await store.pump.close()
        assert sum(sink.is_given_up for sink in store.sinks.values()) >= 2
        store.gate.set()

    async def test_close_leaves_a_write_behind_in_time(self, fs_threads: FsThreads) -> None:
        store = Store(fs_threads)
        store.gate.clear()
        await store.send(0)
        while store.pump._queue:
            await asyncio.sleep(0)
        await asyncio.wait_for(store.pump.close(), 5)
        assert [sink.is_given_up for sink in store.sinks.values()] == [True, False, True]
        store.gate.set()
        while fs_threads.hung:
            await asyncio.sleep(0.005)
        assert [sink.writes for sink in store.sinks.values()] == [1, 0, 1]

    async def test_a_commit_that_hangs(self, fs_threads: FsThreads) -> None:
        store = Store(fs_threads)
        may_end = threading.Event()
        commit = store.sinks[1].commit_blocking

        def hang(slice_checksums: list[int]) -> None:
            may_end.wait(10)
            commit(slice_checksums)

        store.sinks[1].commit_blocking = hang  # type: ignore[method-assign]
        for layer_index in (0, 1):
            await store.send(layer_index)
        await store.pump.finish(may_publish=True)
        assert store.pump.verdicts[1].status is ChunkStatus.STORE_ERROR
        assert store.pump.verdicts[2] == store.pump.verdicts[5] == STORED
        assert store.sinks[1].is_given_up
        await store.pump.close()
        may_end.set()


def test_reasons_of_failures() -> None:
    assert failure_verdict(StorageFull("x")) == Verdict(ChunkStatus.NO_SPACE, "x")
    assert failure_verdict(StorageUnavailable("x")) == Verdict(ChunkStatus.STORE_ERROR, "x")
