"""Blocking calls on the fs threads, many per job: tasks by the batch, never by the chunk."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

# Of file calls that take some 10 to 100 us each: a job is worth its hop, and several run at once.
_BATCH = 16
_T = TypeVar("_T")


async def in_batches(
    threads: Executor, call: Callable[[int], _T], indexes: Sequence[int]
) -> list[_T]:
    """`call` for each index, results in order.

    When this ends none of the calls runs any more, also when it is cancelled or a call raises: what
    they touch belongs to the caller again.
    """

    def batch_blocking(batch: Sequence[int]) -> list[_T]:
        return [call(index) for index in batch]

    loop = asyncio.get_running_loop()
    jobs: list[asyncio.Future[list[_T]]] = [
        loop.run_in_executor(threads, batch_blocking, indexes[at : at + _BATCH])
        for at in range(0, len(indexes), _BATCH)
    ]
    if not jobs:
        return []
    try:
        await asyncio.wait(jobs)
    except asyncio.CancelledError:
        await asyncio.wait(jobs)
        raise
    return [item for job in jobs for item in job.result()]
