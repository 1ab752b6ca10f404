"""Blocking calls on the fs threads, many per job: tasks by the batch, never by the chunk."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

# Of file calls that take some 10 to 100 us each: a job is worth its hop, and several run at once.
_BATCH = 16
_BATCHES_MAX = 8
_T = TypeVar("_T")


async def quiet(jobs: Iterable["asyncio.Future[Any]"]) -> None:
    """Waits until none of the jobs runs, however often the waiting task is cancelled meanwhile.

    What the jobs touch (files, frames) belongs to the caller again only then. The cancellation is
    raised at the end.
    """
    cancelled: asyncio.CancelledError | None = None
    jobs = list(jobs)
    while pending := [job for job in jobs if not job.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def in_batches(
    threads: Executor, call: Callable[[int], _T], indexes: Sequence[int]
) -> list[_T]:
    """`call` for each index, results in order; at most `_BATCHES_MAX` jobs of it at once.

    When this ends none of the calls runs any more, also when it is cancelled or a call raises: what
    they touch belongs to the caller again.
    """

    def batch_blocking(batch: Sequence[int]) -> list[_T]:
        return [call(index) for index in batch]

    loop = asyncio.get_running_loop()
    results: list[_T] = []
    size = _BATCH * _BATCHES_MAX
    for start in range(0, len(indexes), size):
        part = indexes[start : start + size]
        jobs: list[asyncio.Future[list[_T]]] = [
            loop.run_in_executor(threads, batch_blocking, part[at : at + _BATCH])
            for at in range(0, len(part), _BATCH)
        ]
        await quiet(jobs)
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]
        for job in jobs:
            results.extend(job.result())
    return results
