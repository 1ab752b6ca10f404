"""The threads for blocking file calls, with a deadline for each job.

Theory of operation. A call into a hung mount cannot be interrupted, only left behind. A job that
has not ended `timeout_s` after it was submitted fails for whoever waits for it, at that moment. If
it still waited for a thread, it never runs. If it runs, its thread loses its place, another takes
it, and the old one ends itself when the call comes back and no place is free. So a job's future
says in time how the request goes on, but not that the thread is done: who shares memory or files
with a job must know which of the two cleans up (`custody.py`).

Places are lost sooner where others wait for one: after `_PATIENCE_S`, or a quarter of the timeout.
Else calls that hang, as many as there are places, would hold all the others up until they are
overdue.

At most `_AWAY_MAX` threads run without a place. Beyond that, hung calls are stuck in their places,
and once no place is left jobs fail as they are submitted, until a call comes back.

All threads are daemons: one that hangs in the kernel must not keep the process from ending.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from kvserve.errors import StorageUnavailable

log = logging.getLogger(__name__)

_AWAY_MAX = 64
_PATIENCE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class _Job:
    __slots__ = ("began", "call", "deadline", "error", "future", "is_overdue", "thread")

    def __init__(self, call: Callable[[], Any], deadline: float) -> None:
        self.call = call
        self.deadline = deadline
        self.future: Future[Any] = Future()
        self.began = 0.0
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.is_overdue = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Keeps whatever the call raises for who waits for the future."""
        self.error = error
        return True


class FsThreads(Executor):
    """At most `threads_max` jobs run at once, not counting those that lost their place.

    A job that is overdue fails with a `StorageUnavailable` that has `timeout_s`.
    """

    def __init__(self, threads_max: int, *, timeout_s: float, name: str = "fs") -> None:
        self.timeout_s = timeout_s
        self._threads_max = threads_max
        self._name = name
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # Guards everything below; notified for `shutdown`, and when a place is wanted.
        self._state = threading.Condition(threading.Lock())
        # Neither ended nor overdue, in order of submission, which is that of the deadlines.
        self._open: dict[_Job, None] = {}
        self._queued = 0
        self._places: set[threading.Thread] = set()
        self._idle = 0
        # Threads that run a job without a place.
        self._away = 0
        # Overdue and still running; `_stuck` of them in a place.
        self._hung: set[_Job] = set()
        self._stuck = 0
        self._patience_s = min(_PATIENCE_S, timeout_s / 4)
        self._wakes_at = 0.0
        self._watcher: threading.Thread | None = None
        self._is_shut = False

    def __repr__(self) -> str:
        return f"<FsThreads {len(self._places)} of {self._threads_max}, {len(self._hung)} hang>"

    @property
    def hung(self) -> int:
        """Calls that still run although nobody waits for them any more."""
        return len(self._hung)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Never raises for a file system that hangs: the future fails."""
        now = time.monotonic()
        job = _Job(lambda: fn(*args, **kwargs), now + self.timeout_s)
        with self._state:
            if self._is_shut:
                raise RuntimeError("a job for fs threads that were shut down")
            has_place = self._stuck < self._threads_max
            if has_place:
                self._open[job] = None
                self._queued += 1
                self._fill_places()
                self._queue.put(job)
                if self._queued > self._idle and self._wakes_at > now + self._patience_s:
                    self._state.notify_all()
        if not has_place:
            message = f"the file system does not answer: {self.hung} file calls hang"
            job.future.set_exception(StorageUnavailable(message, timeout_s=self.timeout_s))
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more jobs; with `wait` returns once each has ended or is overdue."""
        with self._state:
            self._is_shut = True
            self._state.notify_all()
            if cancel_futures:
                for job in self._open:
                    job.future.cancel()
            if wait:
                self._state.wait_for(lambda: not self._open)
            hung = {job.thread for job in self._hung}
            ending = [thread for thread in self._places if thread not in hung]
            if self._watcher is not None:
                ending.append(self._watcher)
        self._queue.put(None)
        if wait:
            for thread in ending:
                thread.join()

    def _fill_places(self) -> None:
        if self._watcher is None:
            self._watcher = self._start_thread(self._watch, f"{self._name}-watcher")
        while self._queued > self._idle and len(self._places) < self._threads_max:
            self._places.add(self._start_thread(self._work, self._name))
            self._idle += 1

    @staticmethod
    def _start_thread(target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._begins(job) and not self._keeps_place_after(job):
                return
            del job  # what it holds goes now, not when the next one comes
        self._queue.put(None)  # for the next thread

    def _begins(self, job: _Job) -> bool:
        with self._state:
            if job.is_overdue:
                return False
            self._queued -= 1
            if not job.future.set_running_or_notify_cancel():
                self._close(job)
                return False
            self._idle -= 1
            job.thread = threading.current_thread()
            job.began = time.monotonic()
            return True

    def _keeps_place_after(self, job: _Job) -> bool:
        """Runs the job; False if this thread is one too many by now."""
        result: Any = None
        with job:
            result = job.call()
        with self._state:
            is_overdue = job.is_overdue
            if not is_overdue:
                self._close(job)
            keeps = self._has_place_again(job)
        if is_overdue:
            log.info("a file call that had hung came back: %s", job.error or "it succeeded")
        elif job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(result)
        return keeps

    def _close(self, job: _Job) -> None:
        del self._open[job]
        if self._is_shut:
            self._state.notify_all()

    def _has_place_again(self, job: _Job) -> bool:
        self._hung.discard(job)
        me = threading.current_thread()
        if me in self._places:
            self._stuck -= job.is_overdue
        else:
            self._away -= 1
            if len(self._places) == self._threads_max:
                if not self._stuck:
                    return False
                self._leave_place(next(it for it in self._hung if it.thread in self._places))
                self._stuck -= 1
            self._places.add(me)
        self._idle += 1
        return True

    def _leave_place(self, job: _Job) -> None:
        assert job.thread is not None
        self._places.remove(job.thread)
        self._away += 1

    def _watch(self) -> None:
        """Fails jobs as they become overdue, makes room for those that wait."""
        with self._state:
            while self._open or not self._is_shut:
                now = time.monotonic()
                overdue = self._take_overdue(now)
                self._make_room(now)
                if overdue:
                    self._state.release()
                    try:
                        self._fail(overdue)
                    finally:
                        self._state.acquire()
                    continue
                # What comes while this waits is not due before that either.
                first = next(iter(self._open), None)
                wait_s = first.deadline - now if first is not None else self.timeout_s
                if self._queued > self._idle:
                    wait_s = min(wait_s, self._patience_s)
                self._wakes_at = now + wait_s
                self._state.wait(wait_s)

    def _take_overdue(self, now: float) -> list[_Job]:
        overdue: list[_Job] = []
        for job in self._open:
            if job.deadline > now:
                break
            overdue.append(job)
        for job in overdue:
            job.is_overdue = True
            self._close(job)
            if job.thread is None:
                self._queued -= 1
                continue
            self._hung.add(job)
            if job.thread in self._places:
                if self._away < _AWAY_MAX:
                    self._leave_place(job)
                else:
                    self._stuck += 1
        return overdue

    def _make_room(self, now: float) -> None:
        wanted = self._queued - self._idle
        for job in self._open:
            if wanted <= 0 or self._away == _AWAY_MAX:
                break
            if job.thread in self._places and now - job.began >= self._patience_s:
                self._leave_place(job)
                wanted -= 1
        self._fill_places()

    def _fail(self, overdue: list[_Job]) -> None:
        hung = sum(job.thread is not None for job in overdue)
        if hung:
            text = "%d file calls did not end within %g s; %d hang now"
            log.warning(text, hung, self.timeout_s, len(self._hung))
        for job in overdue:
            what = "a file call"
            if job.thread is None:
                # It never runs: nothing must be kept for it, though it stays in the queue.
                job.call = _nothing
                if not job.future.set_running_or_notify_cancel():
                    continue
                what = "a file call that waited for a thread"
            text = f"{what} did not end within {self.timeout_s:g} s (store.io_timeout_s)"
            job.future.set_exception(StorageUnavailable(text, timeout_s=self.timeout_s))


def _nothing() -> None:
    pass
