"""Blocking calls by the batch: in order, and none still running when the caller goes on."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs.threads import FsThreads
from kvserve.transfer.batches import Late, in_batches


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


async def test_results_are_in_the_order_of_the_indexes(threads: ThreadPoolExecutor) -> None:
    indexes = [*range(999, -1, -1), 5, 5]
    assert await in_batches(threads, lambda index: index * 2, indexes) == [
        index * 2 for index in indexes
    ]


async def test_no_indexes_make_no_job(threads: ThreadPoolExecutor) -> None:
    assert await in_batches(threads, lambda index: index, []) == []


async def test_jobs_are_far_fewer_than_calls(threads: ThreadPoolExecutor) -> None:
    """F1: a descriptor costs tasks by the batch, never by the chunk."""
    calls: list[int] = []
    submitted: list[object] = []
    submit = threads.submit

    class Counting(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            submitted.append(args)
            return submit(*args, **kwargs)

    await in_batches(Counting(1), calls.append, range(10_000))
    assert sorted(calls) == list(range(10_000))
    assert len(submitted) <= 10_000 / 16 + 8


async def test_when_a_call_raises_the_others_have_ended(threads: ThreadPoolExecutor) -> None:
    ended: list[int] = []
    may_end = threading.Event()

    def call(index: int) -> None:
        if index == 0:
            may_end.set()
            raise ValueError("the first")
        assert may_end.wait(10)
        ended.append(index)

    with pytest.raises(ValueError, match="the first"):
        await in_batches(threads, call, range(100))
    rest = sorted(ended)
    assert rest == list(range(16, 100)), "only the batch that failed stops early"


async def test_a_cancelled_wait_ends_only_when_no_call_runs(threads: ThreadPoolExecutor) -> None:
    """B6: what the calls write into belongs to the caller again."""
    started, may_end = threading.Event(), threading.Event()
    running: list[bool] = []

    def call(index: int) -> None:
        running.append(True)
        started.set()
        assert may_end.wait(10)
        running.pop()

    task = asyncio.create_task(in_batches(threads, call, [1]))
    await asyncio.get_running_loop().run_in_executor(threads, started.wait, 10)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done, "the call still runs"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running == []


class Hanging:
    """A call that hangs for some indexes until `may_end`; `given` counts what was handed out."""

    def __init__(self, *hang: int) -> None:
        self.hang = set(hang)
        self.may_end = threading.Event()
        self.calls: list[int] = []
        self.given: list[int] = []
        self.taken_back: list[int] = []

    def call(self, index: int) -> int:
        self.calls.append(index)
        if index in self.hang:
            self.may_end.wait(30)
        self.given.append(index)
        return index

    def late(self, index: int, late: Late) -> int:
        return -1 if late.hangs is not None and late.hangs() else -2


TIMEOUT_S = 0.2


class TestCallsThatHang:
    @pytest.fixture
    def fs_threads(self) -> Iterator[FsThreads]:
        with FsThreads(8, timeout_s=TIMEOUT_S) as threads:
            yield threads

    @staticmethod
    async def settled(threads: FsThreads, calls: Hanging) -> None:
        calls.may_end.set()
        while threads.hung:
            await asyncio.sleep(0.005)

    async def test_one_that_hangs_is_late_and_those_behind_it_get_another_try(
        self, fs_threads: FsThreads
    ) -> None:
        calls = Hanging(20)
        found = await in_batches(
            fs_threads, calls.call, range(300), late=calls.late, take_back=calls.taken_back.append
        )
        assert found == [*range(20), -1, *range(21, 300)]
        assert sorted(calls.calls) == list(range(300)), "each once"
        assert calls.taken_back == []
        await self.settled(fs_threads, calls)
        assert calls.taken_back == [20], "by its thread"

    @pytest.mark.parametrize(
        ("fine", "threads_lost"),
        [((), 8), ((0,), 16)],
        ids=["a mount", "one chunk answers"],
    )
    async def test_when_all_hang_it_ends_in_time(
        self, fs_threads: FsThreads, fine: tuple[int, ...], threads_lost: int
    ) -> None:
        """Without a second round where the first had no answer at all."""
        calls = Hanging(*(set(range(1000)) - set(fine)))
        began = time.monotonic()
        found = await in_batches(fs_threads, calls.call, range(1000), late=calls.late)
        assert time.monotonic() - began < 2 * TIMEOUT_S + 1
        assert found.count(-1) == len(calls.calls) - len(fine) == threads_lost
        assert found.count(-2) == 1000 - threads_lost - len(fine)
        await self.settled(fs_threads, calls)
        assert len(calls.calls) == threads_lost + len(fine), "who comes back does not go on"

    async def test_without_late_it_raises_and_takes_back(self, fs_threads: FsThreads) -> None:
        calls = Hanging(150)
        with pytest.raises(StorageUnavailable, match="did not end within"):
            await in_batches(fs_threads, calls.call, range(200), take_back=calls.taken_back.append)
        await self.settled(fs_threads, calls)
        assert sorted(calls.taken_back) == sorted(calls.given)

    async def test_cancelled_it_ends_in_time_and_takes_back(self, fs_threads: FsThreads) -> None:
        calls = Hanging(150)
        task = asyncio.create_task(
            in_batches(
                fs_threads,
                calls.call,
                range(200),
                late=calls.late,
                take_back=calls.taken_back.append,
            )
        )
        while 150 not in calls.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, TIMEOUT_S + 1)
        await self.settled(fs_threads, calls)
        assert sorted(calls.taken_back) == sorted(calls.given)

    async def test_a_call_that_raises_takes_back_too(self, fs_threads: FsThreads) -> None:
        calls = Hanging()

        def call(index: int) -> int:
            if index == 170:
                raise ValueError("one")
            return calls.call(index)

        with pytest.raises(ValueError, match="one"):
            await in_batches(fs_threads, call, range(200), take_back=calls.taken_back.append)
        assert sorted(calls.taken_back) == sorted(calls.given)
