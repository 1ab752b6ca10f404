"""Long steps leave the loop, one at a time, and are never lost; short ones stay."""

import asyncio
import threading

import pytest

from kvserve.transfer.long_steps import CHUNKS_IN_PLACE_MAX, LongSteps

MANY = CHUNKS_IN_PLACE_MAX + 1


async def test_few_chunks_stay_on_the_loop_and_many_leave_it() -> None:
    steps = LongSteps()
    here = threading.get_ident()
    assert await steps.run(CHUNKS_IN_PLACE_MAX, threading.get_ident) == here
    others = {await steps.run(MANY, threading.get_ident) for _ in range(3)}
    assert len(others) == 1, "several that compute at once would hold the loop by Python's lock"
    assert here not in others
    steps.close()


async def test_what_a_step_raises_is_raised() -> None:
    steps = LongSteps()

    def fail() -> None:
        raise ValueError("no")

    for chunks in (1, MANY):
        with pytest.raises(ValueError, match="no"):
            await steps.run(chunks, fail)
    steps.close()


async def test_a_cancelled_wait_ends_after_the_step() -> None:
    """What the step acquires is then where its caller finds and releases it."""
    steps = LongSteps()
    started, may_end = threading.Event(), threading.Event()
    acquired: list[int] = []

    def acquire() -> None:
        started.set()
        assert may_end.wait(10)
        acquired.append(1)

    task = asyncio.create_task(steps.run(MANY, acquire))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert acquired == [1]
    steps.close()
