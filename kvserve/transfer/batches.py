"""Blocking calls on the fs threads, many per job: tasks by the batch, never by the chunk."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvserve.errors import StorageUnavailable
from kvserve.fs.custody import Custody

# Of file calls that take some 10 to 100 us each: a job is worth its hop, and several run at once.
_BATCH = 16
_JOBS_MAX = 8
# Of quick calls a job takes several batches: each job costs the loop some 50 us.
_JOB_S = 0.002
# A chunk that hangs costs those behind it one more try; a mount that hangs, at most that.
_LATE_ROUNDS_MAX = 2
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Late:
    """Why there is no result for an index: `error` says how long was waited.

    `hangs` is None where the call was not begun, else it says whether the call is still running.
    """

    error: StorageUnavailable
    hangs: Callable[[], bool] | None


async def quiet(jobs: Iterable["asyncio.Future[Any]"]) -> None:
    """Waits until each of the jobs has ended, however often the waiting task is cancelled
    meanwhile. The cancellation is raised at the end.

    What the jobs touch (files, frames) belongs to the caller again only then; but for a job that
    was overdue, which has ended for its caller only: see `Custody`.
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


def overdue(job: "asyncio.Future[Any]") -> StorageUnavailable | None:
    """The error of a job that has ended because the file system gave no answer in time."""
    error = job.exception()
    return error if isinstance(error, StorageUnavailable) and error.timeout_s else None


async def in_batches(
    threads: Executor,
    call: Callable[[int], _T],
    indexes: Sequence[int],
    *,
    late: Callable[[int, Late], _T] | None = None,
    take_back: Callable[[_T], None] | None = None,
) -> list[_T]:
    """`call` for each index, results in order; at most `_JOBS_MAX` jobs of it at once.

    When this ends none of the calls runs any more, also when it is cancelled or a call raises: what
    they touch belongs to the caller again. The exception are calls that hang; `late` gives the
    result for such an index and for those that could not be tried, else the timeout is raised. All
    in all this takes at most twice the timeout of the threads longer than the calls do.

    `take_back` gets each result that the caller does not get: because this is cancelled or raises,
    or because the call had hung (then on its thread).
    """
    results: list[Any] = [None] * len(indexes)
    todo = deque(range(at, min(at + _BATCH, len(indexes))) for at in range(0, len(indexes), _BATCH))
    ended: list[_Job[_T]] = []
    late_rounds = 0
    try:
        while todo:
            jobs = [_Job(call, indexes, todo, take_back) for _ in range(min(len(todo), _JOBS_MAX))]
            ended.extend(jobs)
            error = await _run(threads, jobs)
            for job in jobs:
                job.put_into(results)
            if error is None:
                continue
            if late is None:
                raise error
            for job in jobs:
                rest = job.rest
                if job.hangs:
                    results[rest[0]] = late(indexes[rest[0]], Late(error, job.custody.hangs))
                    rest = rest[1:]
                if rest:
                    todo.append(rest)
            late_rounds += 1
            is_all_late = len(jobs) > 1 and not any(job.kept for job in jobs)
            if late_rounds == _LATE_ROUNDS_MAX or is_all_late:
                for position in (position for positions in todo for position in positions):
                    results[position] = late(indexes[position], Late(error, None))
                break
    except BaseException:
        for job in ended:
            job.take_back_kept()
        raise
    return results


async def _run(threads: Executor, jobs: Sequence["_Job[Any]"]) -> StorageUnavailable | None:
    """Runs them until each has ended or is overdue; the error of one that is, if any."""
    loop = asyncio.get_running_loop()
    futures = [loop.run_in_executor(threads, job.run_blocking) for job in jobs]
    try:
        await quiet(futures)
    finally:
        for job in jobs:
            job.give_up()
        # Also if this is cancelled: asyncio complains about errors that nobody looks at.
        errors = [error for future in futures if (error := future.exception()) is not None]
    late = [error for future in futures if (error := overdue(future)) is not None]
    for error in errors:
        if error not in late:
            raise error
    return late[0] if late else None


class _Job(Generic[_T]):
    """Takes batches of positions from `todo`, which it shares with other jobs, for a moment.

    After `give_up`: `kept` are the results for the first positions that it took, `rest` are those
    of its last batch that have none.
    """

    def __init__(
        self,
        call: Callable[[int], _T],
        indexes: Sequence[int],
        todo: "deque[range]",
        take_back: Callable[[_T], None] | None,
    ) -> None:
        self._call = call
        self._indexes = indexes
        self._todo = todo
        self._take_back = take_back
        self._taken: list[range] = []
        self._left = iter(range(0))
        self._position = 0
        self._ends_at = 0.0
        self._results: list[_T] = []
        self.custody = Custody()
        self.kept: list[_T] = []
        self.hangs = False

    def run_blocking(self) -> None:
        self._ends_at = time.monotonic() + _JOB_S
        while self._begins():
            try:
                result = self._call(self._indexes[self._position])
            except BaseException:
                self.custody.end()
                raise
            self._results.append(result)
            if not self.custody.end():
                if self._take_back is not None:
                    self._take_back(result)
                return

    def _begins(self) -> bool:
        try:
            return self.custody.begin(self._take)
        except _NothingToTakeError:
            return False

    def _take(self) -> None:
        position = next(self._left, None)
        if position is None:
            if self._taken and time.monotonic() >= self._ends_at:
                raise _NothingToTakeError
            try:
                batch = self._todo.popleft()
            except IndexError:
                raise _NothingToTakeError from None
            self._taken.append(batch)
            self._left = iter(batch)
            position = next(self._left)
        self._position = position

    def give_up(self) -> None:
        self.hangs = self.custody.give_up()
        self.kept = self._results[: self.custody.done]

    def put_into(self, results: list[Any]) -> None:
        """Writes what is kept to the positions that it is for."""
        at = 0
        for batch in self._taken:
            found = self.kept[at : at + len(batch)]
            results[batch.start : batch.start + len(found)] = found
            at += len(batch)

    @property
    def rest(self) -> range:
        if not self._taken:
            return range(0)
        before = sum(len(batch) for batch in self._taken[:-1])
        return self._taken[-1][len(self.kept) - before :]

    def take_back_kept(self) -> None:
        if self._take_back is not None:
            for result in self.kept:
                self._take_back(result)


class _NothingToTakeError(Exception):
    """The job is over."""
