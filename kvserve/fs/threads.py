"""The threads for blocking file calls, with a deadline for each job.

Theory of operation. A call into a hung mount cannot be interrupted, only left behind. A job that
has not ended `timeout_s` after it was submitted fails for whoever waits for it, at that moment. If
it still waited for a thread, it never runs. If it runs, its thread is written off, another takes
its place, and it ends itself when the call comes back. So a job's future says in time how the
request goes on, but not that the thread is done: who shares memory or files with a job must know
which of the two cleans up (`custody.py`).

At most `_WRITTEN_OFF_MAX` threads are written off. Beyond that, hung calls are stuck in their
places, and once no place is left jobs fail as they are submitted, until a call comes back.

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

_WRITTEN_OFF_MAX = 64

P = ParamSpec("P")
T = TypeVar("T")


class _Job:
    __slots__ = ("call", "deadline", "error", "future", "is_overdue", "thread")

    def __init__(self, call: Callable[[], Any], deadline: float) -> None:
        self.call = call
        self.deadline = deadline
        self.future: Future[Any] = Future()
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
    """At most `threads_max` jobs run at once, not counting those that were written off.

    A job that is overdue fails with a `StorageUnavailable` that has `timeout_s`.
    """

    def __init__(self, threads_max: int, *, timeout_s: float, name: str = "fs") -> None:
        self.timeout_s = timeout_s
        self._threads_max = threads_max
        self._name = name
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # Guards everything below; notified for `shutdown` only.
        self._state = threading.Condition(threading.Lock())
        # Neither ended nor overdue, in order of submission, which is that of the deadlines.
        self._open: dict[_Job, None] = {}
        self._queued = 0
        self._places: set[threading.Thread] = set()
        self._idle = 0
        # Overdue and still running; `_stuck` of them in a place, the others written off.
        self._hung: set[_Job] = set()
        self._stuck = 0
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
        job = _Job(lambda: fn(*args, **kwargs), time.monotonic() + self.timeout_s)
        with self._state:
            if self._is_shut:
                raise RuntimeError("a job for fs threads that were shut down")
            has_place = self._stuck < self._threads_max
            if has_place:
                self._open[job] = None
                self._queued += 1
                self._fill_places()
                self._queue.put(job)
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
            self._idle += 1
            self._places.add(self._start_thread(self._work, self._name))

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
            return True

    def _keeps_place_after(self, job: _Job) -> bool:
        """Runs the job; False if this thread was written off meanwhile."""
        result: Any = None
        with job:
            result = job.call()
        with self._state:
            is_overdue = job.is_overdue
            if is_overdue:
                keeps = self._takes_place_again(job)
            else:
                self._close(job)
                self._idle += 1
        if is_overdue:
            log.info("a file call that had hung came back: %s", job.error or "it succeeded")
            return keeps
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(result)
        return True

    def _close(self, job: _Job) -> None:
        del self._open[job]
        if self._is_shut:
            self._state.notify_all()

    def _takes_place_again(self, job: _Job) -> bool:
        self._hung.remove(job)
        me = threading.current_thread()
        if me not in self._places:
            if not self._stuck:
                return False
            # Takes the place of one that is stuck, which is written off instead.
            other = next(it.thread for it in self._hung if it.thread in self._places)
            assert other is not None
            self._places.remove(other)
            self._places.add(me)
        self._stuck -= 1
        self._idle += 1
        return True

    def _watch(self) -> None:
        """Fails jobs as they become overdue."""
        with self._state:
            while self._open or not self._is_shut:
                now = time.monotonic()
                overdue = self._take_overdue(now)
                if overdue:
                    self._state.release()
                    try:
                        for job in overdue:
                            self._fail(job)
                    finally:
                        self._state.acquire()
                    continue
                # What comes while this waits is not due before that either.
                first = next(iter(self._open), None)
                wait_s = first.deadline - now if first is not None else self.timeout_s
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
            if len(self._hung) - self._stuck <= _WRITTEN_OFF_MAX:
                self._places.remove(job.thread)
            else:
                self._stuck += 1
        self._fill_places()
        return overdue

    def _fail(self, job: _Job) -> None:
        what = "a file call" if job.thread is not None else "a file call that waited for a thread"
        text = f"{what} did not end within {self.timeout_s:g} s (store.io_timeout_s)"
        if job.thread is not None:
            log.warning("%s; %d hang", text, self.hung)
        else:
            # It never runs: nothing must be kept for it, though it stays in the queue.
            job.call = _nothing
            if not job.future.set_running_or_notify_cancel():
                return
        job.future.set_exception(StorageUnavailable(text, timeout_s=self.timeout_s))


def _nothing() -> None:
    pass
