"""Shares the event loop between many transfers and the small requests beside them.

A frame costs the loop some 0.3 ms (read, check, hand over). If every open fetch made its next frame
in the same turn of the loop, a lookup, which needs several turns, would wait for all of them each
time. So one frame is made per turn of the loop, in order of arrival.

On a machine whose cores are all busy that is not enough: the lookup then waits for a core, in the
server and in its client. So for `_HELD_AFTER_S` after each lookup frames come `_FRAME_GAP_S` apart,
which leaves gaps for the lookups that usually follow (benchmarks: lookup p99 from 7.5 to 3.4 ms on
two cores, at half the throughput for as long as lookups keep coming back to back).
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_FRAME_GAP_S = 0.0006
_HELD_AFTER_S = 0.003


class Turns:
    """`await take()` before the loop's work for one frame."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        self._held = 0
        self._last_at = 0.0

    def __repr__(self) -> str:
        return f"<Turns {len(self._waiting)} waiting, {self._held} small requests>"

    async def take(self) -> None:
        """Returns when it is this frame's turn."""
        if not self._is_taken and not self._held:
            self._use()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if not self._is_taken:
            self._is_taken = True
            self._renew()
        await turn

    @contextmanager
    def held(self) -> Iterator[None]:
        """A small request is under way; more are likely to follow."""
        self._held += 1
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(_HELD_AFTER_S, self._release)

    def _release(self) -> None:
        self._held -= 1

    def _use(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_taken = True
        self._last_at = loop.time()
        loop.call_soon(self._renew)

    def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._last_at + _FRAME_GAP_S - loop.time() if self._held else 0.0
        if wait_s > 0 and self._waiting:
            loop.call_later(wait_s, self._renew)
            return
        self._is_taken = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its transfer was cancelled
                turn.set_result(None)
                self._use()
                return
