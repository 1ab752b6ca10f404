"""Who cleans up after a job on the fs threads: the request, or, once it has given up, the thread.

A request waits for a job only until the job is overdue; the thread may still be inside a call that
writes to memory or uses a descriptor. Whatever that call touches must be nobody else's until it
comes back, and then somebody must release it. Both sides ask here, so that exactly one does.
"""

import threading
from collections.abc import Callable


class Custody:
    """Of one job, which takes steps: a file call each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self._is_inside = False
        self.done = 0
        """Steps that ended while the request waited; it may use their results."""

    def begin(self, take: Callable[[], None] | None = None) -> bool:
        """For the thread, before a step; False if there is no use in it any more.

        `take` is called before the request can give up; if it raises, the step has not begun.
        """
        with self._lock:
            if self._is_given_up:
                return False
            if take is not None:
                take()
            self._is_inside = True
            return True

    def end(self) -> bool:
        """For the thread, after a step; False if what the step used or made is its to release."""
        with self._lock:
            self._is_inside = False
            if self._is_given_up:
                return False
            self.done += 1
            return True

    def give_up(self, hand_over: Callable[[], None] | None = None) -> bool:
        """For the request, once the job's future has ended. True if a step hangs.

        Then the thread releases what step number `done` uses; `hand_over` is called before it can.
        After this `done` changes no more and no further step begins.
        """
        with self._lock:
            self._is_given_up = True
            if self._is_inside and hand_over is not None:
                hand_over()
            return self._is_inside

    def hangs(self) -> bool:
        """A step is inside its file call."""
        return self._is_inside
