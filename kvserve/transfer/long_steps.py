"""Computing per chunk, off the event loop where there are many chunks.

A thread that computes keeps Python's lock for up to 5 ms at a time, and several such threads in
turn make the loop wait for all of them. So there is one thread for it, and requests take their
turns there. Requests of few chunks compute in place: a hop would cost more.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvserve.transfer.batches import quiet

CHUNKS_IN_PLACE_MAX: Final = 1024
_T = TypeVar("_T")


class LongSteps:
    """One per server. What may wait in line is bounded by the requests that are let in."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-steps")

    def __repr__(self) -> str:
        return f"<LongSteps {self._thread!r}>"

    async def run(self, chunk_count: int, step: Callable[[], _T]) -> _T:
        """What `step` returns; it does no I/O and costs about a microsecond a chunk.

        A step that was begun or waits is never given up: when this ends by a cancellation the step
        has run, so what it acquired is where it put it.
        """
        if chunk_count <= CHUNKS_IN_PLACE_MAX:
            return step()
        job = asyncio.get_running_loop().run_in_executor(self._thread, step)
        await quiet([job])
        return job.result()

    def close(self) -> None:
        """No further steps; does not wait for a running one."""
        self._thread.shutdown(wait=False)
