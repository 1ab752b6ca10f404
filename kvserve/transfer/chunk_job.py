"""File calls on open chunks, as jobs on the fs threads that may hang."""

import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvserve.errors import StorageUnavailable
from kvserve.fs.custody import Custody
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.ports import C, ChunkHolder

# Of quick calls a job takes many: each job costs the loop some 50 us. Others wait no longer.
_JOB_S: Final = 0.01
T = TypeVar("T")


class ChunkJob(Generic[C, T]):
    """Makes one call after the other, for a moment.

    `take` gives the next: a chunk and what else `call` needs to know; it raises IndexError at the
    end. `call` returns a fault or None, which `ended` is told on the thread. `hangs`, on the loop:
    such a call hangs; what it returns goes to `came_back`, on the thread, when it is over.
    """

    def __init__(
        self,
        holder: ChunkHolder[C],
        take: Callable[[], tuple[C, T]],
        call: Callable[[C, T], Verdict | None],
        *,
        ended: Callable[[T, Verdict | None], None] = lambda *_: None,
        hangs: Callable[[T], int] = lambda _: 0,
        came_back: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._holder = holder
        self._take_next = take
        self._call = call
        self._ended = ended
        self._hangs = hangs
        self._came_back = came_back
        self._custody = Custody()
        self._taken: tuple[C, T] | None = None
        self._kept = 0

    def run_blocking(self) -> None:
        ends_at = time.monotonic() + _JOB_S
        while True:
            try:
                if not self._custody.begin(self._take):
                    return
            except IndexError:
                return
            assert self._taken is not None
            chunk, about = self._taken
            is_wanted = False
            try:
                fault = self._call(chunk, about)
            finally:
                is_wanted = self._custody.end()
                if not is_wanted:
                    self._holder.release(chunk)
                    self._came_back(self._kept)
            if not is_wanted:
                return
            self._ended(about, fault)
            if time.monotonic() >= ends_at:
                return

    def give_up(self, error: StorageUnavailable | None = None) -> tuple[T, Verdict] | None:
        """Call it once the job's future has ended, with its error if it was overdue.

        The call that hangs, if one does, and its fault.
        """
        if not self._custody.give_up(self._hold):
            return None
        assert self._taken is not None
        assert error is not None, "a job that has ended is in no call"
        chunk, about = self._taken
        fault = Verdict(ChunkStatus.MISS_TIMEOUT, str(error))
        self._holder.hangs(chunk, fault, self._custody.hangs)
        return about, fault

    def _take(self) -> None:
        self._taken = self._take_next()

    def _hold(self) -> None:
        assert self._taken is not None
        chunk, about = self._taken
        self._holder.hold(chunk)
        self._kept = self._hangs(about)
