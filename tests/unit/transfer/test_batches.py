"""Blocking calls by the batch: in order, and none still running when the caller goes on."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvserve.transfer.batches import in_batches


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
