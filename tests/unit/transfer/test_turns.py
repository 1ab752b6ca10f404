"""Frames take turns on the loop; lookups slow them down and never stop them (T15)."""

import asyncio

from kvserve.transfer.turns import Turns


async def turn_numbers(turns: Turns, frames: int) -> list[int]:
    """The turn of the loop in which each of `frames` waiting frames got through."""
    loop = asyncio.get_running_loop()
    number = 0
    done = False

    def count() -> None:
        nonlocal number
        number += 1
        if not done:
            loop.call_soon(count)

    count()

    async def frame() -> int:
        await turns.take()
        return number

    numbers = await asyncio.gather(*(frame() for _ in range(frames)))
    done = True
    return list(numbers)


async def test_one_frame_in_a_turn_in_order_of_arrival() -> None:
    numbers = await turn_numbers(Turns(), 10)
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 10, "two frames in one turn of the loop"


async def test_a_free_turn_costs_no_wait() -> None:
    turns = Turns()
    taking = turns.take()
    try:
        taking.send(None)
    except StopIteration:
        return
    raise AssertionError("it waited")


async def test_cancelled_frames_are_passed_over() -> None:
    turns = Turns()
    tasks = [asyncio.ensure_future(turns.take()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.wait_for(tasks[4], 1)
    assert repr(turns) == "<Turns 0 waiting, 0 small requests>"


async def test_small_requests_put_gaps_between_frames_but_stop_none() -> None:
    turns = Turns()
    loop = asyncio.get_running_loop()

    async def took_s(frames: int) -> float:
        begun = loop.time()
        for _ in range(frames):
            await turns.take()
        return loop.time() - begun

    with turns.held():
        assert await took_s(20) >= 19 * 0.0006
    while "0 small" not in repr(turns):
        await asyncio.sleep(0.001)
    assert await took_s(20) < 19 * 0.0006, "the pace is the same as with a lookup under way"
