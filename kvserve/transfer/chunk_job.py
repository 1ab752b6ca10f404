"""File calls on open chunks, as one job on the fs threads that may hang."""

from collections.abc import Callable, Sequence
from typing import Generic

from kvserve.errors import StorageUnavailable
from kvserve.fs.custody import Custody
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.ports import C, ChunkHolder


class ChunkJob(Generic[C]):
    """`call(position, chunk)` for each of `chunks` that is not None, in order.

    The call returns a fault or None. `memory` is what it writes to: it lives as long as the job.
    """

    def __init__(
        self,
        holder: ChunkHolder[C],
        chunks: Sequence[C | None],
        call: Callable[[int, C], Verdict | None],
        *,
        memory: object = None,
    ) -> None:
        self._holder = holder
        self._chunks = chunks
        self._call = call
        self._memory = memory
        self._custody = Custody()
        self._faults: dict[int, Verdict] = {}

    def run_blocking(self) -> None:
        for position, chunk in enumerate(self._chunks):
            if not self._custody.begin():
                return
            is_wanted = False
            try:
                fault = self._call(position, chunk) if chunk is not None else None
                if fault is not None:
                    self._faults[position] = fault
            finally:
                is_wanted = self._custody.end()
                if not is_wanted and chunk is not None:
                    self._holder.release(chunk)
            if not is_wanted:
                return

    def give_up(self, error: StorageUnavailable | None = None) -> dict[int, Verdict]:
        """Call it once the job's future has ended, with its error if it was overdue.

        The faults by position; those that hang or were not tried have one that says so.
        """
        custody = self._custody
        hangs = custody.give_up(lambda: self._hold(custody.done))
        # A copy: the thread that hangs may come back at any time.
        faults = {at: it for at, it in self._faults.copy().items() if at < custody.done}
        if error is not None:
            rest = range(custody.done, len(self._chunks))
            faults.update(dict.fromkeys(rest, Verdict(ChunkStatus.MISS_TIMEOUT, str(error))))
            chunk = self._chunks[custody.done] if hangs else None
            if chunk is not None:
                self._holder.hangs(chunk, faults[custody.done], custody.hangs)
        return faults

    def _hold(self, position: int) -> None:
        chunk = self._chunks[position]
        if chunk is not None:
            self._holder.hold(chunk)
