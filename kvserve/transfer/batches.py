"""Blocking calls on the fs threads, many per job: tasks by the batch, never by the chunk."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import chain
from operator import length_hint
from typing import Any, TypeVar

# Of file calls that take some 10 to 100 us each: a job is worth its hop, and several run at once.
_BATCH = 16
_JOBS_MAX = 8
# Of quick calls a job takes several batches: each job costs the loop some 50 us.
_JOB_S = 0.002
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
    """`call` for each index, results in order; at most `_JOBS_MAX` jobs of it at once.

    When this ends none of the calls runs any more, also when it is cancelled or a call raises: what
    they touch belongs to the caller again.
    """
    loop = asyncio.get_running_loop()
    results: dict[int, list[_T]] = {}
    # Shared by the jobs; Python's lock makes each take from it whole.
    starts = iter(range(0, len(indexes), _BATCH))

    def job_blocking() -> None:
        ends_at = time.monotonic() + _JOB_S
        for start in starts:
            results[start] = [call(index) for index in indexes[start : start + _BATCH]]
            if time.monotonic() >= ends_at:
                return

    while left := length_hint(starts):
        jobs = [loop.run_in_executor(threads, job_blocking) for _ in range(min(left, _JOBS_MAX))]
        await quiet(jobs)
        errors = [error for job in jobs if (error := job.exception()) is not None]
        if errors:
            raise errors[0]
    return list(chain.from_iterable(results[start] for start in sorted(results)))
