"""Actors that run one file system call at a time, in an order that a test decides.

What two servers do to one tree is a sequence of calls of each; what can go wrong between them goes
wrong in some interleaving of the two. Here each actor is a thread that stops before every call, so
an interleaving can be tried on purpose, all of them if they are few.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore, get_ident
from typing import Self

from kvserve.testing.faulty_fs import CHANGING, READING, FaultyFileSystem

_STEP_S_MAX = 20.0


class SteppedFileSystem(FaultyFileSystem):
    """Like the real one, but the thread of an `Actor` stops before each call."""

    def __init__(self) -> None:
        super().__init__(verbs=READING | CHANGING)
        self.stops: dict[int, Callable[[], None]] = {}
        """By thread: what it calls to stop."""

    def _count(self, verb: str, path: str) -> None:
        super()._count(verb, path)
        if (stop := self.stops.get(get_ident())) is not None:
            stop()


class Actor:
    """Runs `work` on a thread, a step for each file system call; use it as a context.

    What `work` raises, the step raises in which it happened.
    """

    def __init__(self, fs: SteppedFileSystem, work: Callable[[], None]) -> None:
        self._fs = fs
        self._work = work
        self._go = Semaphore(0)
        self._stopped = Semaphore(0)
        self._is_started = self._is_free = False
        self._threads = ThreadPoolExecutor(1)
        self._ended: Future[None] = Future()

    @property
    def is_done(self) -> bool:
        return self._ended.done()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_free = True
        self._go.release()
        self._threads.shutdown()

    def step(self) -> bool:
        """Does the next call, up to the one after it; False if there was none left.

        The first step starts the work, up to its first call.
        """
        if self.is_done:
            return False
        if self._is_started:
            self._go.release()
        else:
            self._is_started = True
            self._ended = self._threads.submit(self._run)
            self._ended.add_done_callback(lambda _: self._stopped.release())
        self._wait_for_stop()
        return True

    def run(self, steps: int = 1 << 20) -> int:
        """So many steps, or all that are left; returns how many there were."""
        return next((done for done in range(steps) if not self.step()), steps)

    def _run(self) -> None:
        self._fs.stops[get_ident()] = self._wait
        try:
            self._work()
        finally:
            del self._fs.stops[get_ident()]

    def _wait_for_stop(self) -> None:
        if not self._stopped.acquire(timeout=_STEP_S_MAX):
            raise TimeoutError("an actor neither stops nor ends: it waits for another one's lock")
        if self.is_done:
            self._ended.result()

    def _wait(self) -> None:
        if not self._is_free:
            self._stopped.release()
            self._go.acquire()
