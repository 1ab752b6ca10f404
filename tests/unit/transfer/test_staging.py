"""One bounded pool: fair, loads first, never stuck; what hangs is counted and not used again."""

import asyncio
from contextlib import ExitStack

import pytest

from kvserve.transfer.staging import Share, Staging

FRAME = 1 << 16
SIZE = 16 * FRAME


@pytest.fixture
def staging() -> Staging:
    return Staging(SIZE, FRAME)


async def waits(task: "asyncio.Task[None]") -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()


def fill(shares: list[Share]) -> None:
    for share in shares:
        share.take(FRAME)


class TestFairness:
    async def test_one_fetch_alone_gets_half_and_its_first_frame(self, staging: Staging) -> None:
        with staging.load() as share:
            assert share.most_bytes == share.room_bytes == SIZE // 2 + FRAME
            await share.take_first(FRAME)
            assert share.room_bytes == SIZE // 2
            share.take(share.room_bytes)
            assert share.room_bytes == 0
        assert staging.used_bytes == 0

    async def test_the_half_is_divided_between_fetches(self, staging: Staging) -> None:
        with ExitStack() as stack:
            shares = [stack.enter_context(staging.load()) for _ in range(4)]
            assert {share.most_bytes for share in shares} == {3 * FRAME}
            for share in shares:
                await share.take_first(FRAME)
                share.take(share.room_bytes)
            assert [share.held_bytes for share in shares] == [3 * FRAME] * 4
            assert staging.used_bytes == 12 * FRAME

    async def test_who_came_when_there_was_more_holds_nobody_up(self, staging: Staging) -> None:
        """A client that does not read keeps what it has; others still get first frames."""
        with ExitStack() as stack:
            greedy = stack.enter_context(staging.load())
            greedy.take(greedy.room_bytes)
            others = [stack.enter_context(staging.load()) for _ in range(7)]
            for share in others:
                await asyncio.wait_for(share.take_first(FRAME), 1)
                assert share.room_bytes == 0
            greedy.give(4 * FRAME)
            assert others[0].room_bytes == FRAME

    async def test_first_frames_are_waited_for_in_order(self, staging: Staging) -> None:
        with ExitStack() as stack:
            holders = [stack.enter_context(staging.load()) for _ in range(16)]
            fill(holders)
            first, second = (stack.enter_context(staging.load()) for _ in range(2))
            tasks = [asyncio.create_task(share.take_first(FRAME)) for share in (first, second)]
            await waits(tasks[0])
            holders[0].give(FRAME)
            await asyncio.wait_for(tasks[0], 1)
            await waits(tasks[1])
            assert holders[1].room_bytes == 0, "nobody widens while somebody waits"
            holders[1].give(FRAME)
            await asyncio.wait_for(tasks[1], 1)
            assert staging.used_bytes == staging.used_bytes_max == SIZE

    async def test_one_that_is_cancelled_gives_way(self, staging: Staging) -> None:
        with ExitStack() as stack:
            holders = [stack.enter_context(staging.load()) for _ in range(16)]
            fill(holders)
            large, small = (stack.enter_context(staging.load()) for _ in range(2))
            stuck = asyncio.create_task(large.take_first(4 * FRAME))
            behind = asyncio.create_task(small.take_first(FRAME))
            await asyncio.sleep(0)
            holders[0].give(FRAME)
            await waits(behind)
            stuck.cancel()
            await asyncio.wait_for(behind, 1)
            with pytest.raises(asyncio.CancelledError):
                await stuck

    async def test_a_frame_larger_than_the_pool_is_taken_alone(self, staging: Staging) -> None:
        with staging.load() as share:
            await asyncio.wait_for(share.take_first(2 * SIZE), 1)


class TestLoadsFirst:
    async def test_stores_get_a_smaller_part(self, staging: Staging) -> None:
        with staging.load() as load, staging.store() as store:
            assert store.most_bytes == 3 * FRAME
            assert load.most_bytes == 9 * FRAME

    async def test_no_store_takes_a_second_frame_while_a_fetch_waits(
        self, staging: Staging
    ) -> None:
        with ExitStack() as stack:
            store = stack.enter_context(staging.store())
            store.take(FRAME)
            assert store.room_bytes == 2 * FRAME
            holders = [stack.enter_context(staging.load()) for _ in range(15)]
            fill(holders)
            load = stack.enter_context(staging.load())
            task = asyncio.create_task(load.take_first(FRAME))
            await waits(task)
            assert store.room_bytes == 0
            store.give(FRAME)
            await asyncio.wait_for(task, 1)


class TestCallsThatHang:
    async def test_what_they_hold_is_not_given_away(self, staging: Staging) -> None:
        with staging.load() as share:
            share.take(8 * FRAME)
            share.hangs(6 * FRAME)
            assert share.held_bytes == 2 * FRAME
            assert staging.hung_bytes == 6 * FRAME
            assert share.room_bytes == FRAME, "of the half two are used and six hang"
            await asyncio.to_thread(share.came_back, 6 * FRAME)
            assert staging.hung_bytes == 0
            assert share.room_bytes == 7 * FRAME


class TestBuffers:
    def test_the_last_one_is_used_first(self, staging: Staging) -> None:
        one, another = staging.take(FRAME), staging.take(FRAME - 1)
        assert len(one) == len(another) == FRAME
        assert staging.take(1).nbytes == 4096
        staging.give(one)
        staging.give(another)
        assert staging.take(FRAME) is another
        assert staging.take(FRAME) is one

    async def test_those_kept_and_those_in_use_are_within_the_bound(self, staging: Staging) -> None:
        with staging.load() as share:
            share.take(SIZE)
            buffers = [staging.take(FRAME) for _ in range(16)]
            share.give(SIZE)
            for buffer in buffers:
                staging.give(buffer)
            assert staging._kept_bytes == SIZE
            share.take(10 * FRAME)
            assert staging._kept_bytes == 6 * FRAME
