"""The life of a transfer, as in NIXL: prepare -> post -> PROC -> DONE | ERR, release always.

Every handle ends: by completion, error, cancel or deadline. After its end nothing writes into or
reads from the region any more. `cancel` returns only then.
"""

import asyncio
import os
from enum import Enum
from types import TracebackType
from typing import Self

from kvclient.placement import Placement
from kvclient.status import translated
from kvserve.errors import HandleClosed, KvserveError, ServerFault, TransferCancelled


class HandleState(Enum):
    """NIXL's words."""

    PREPARED = "PREPARED"
    PROC = "PROC"
    DONE = "DONE"
    ERR = "ERR"


class Handle:
    """What fetch and store share: one task that runs the transfer, one region held meanwhile."""

    def __init__(self, placement: Placement, address: str, timeout_s: float) -> None:
        self.state = HandleState.PREPARED
        self.error: KvserveError | None = None
        self._placement = placement
        self._address = address
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._pid = os.getpid()
        self._task: asyncio.Task[KvserveError | None] | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.value} {self._address}>"

    async def cancel(self) -> None:
        """Stops the transfer; returns once the region is quiescent. Harmless after the end."""
        self._check_process()
        task = self._task
        if task is None:
            self._end(TransferCancelled("cancelled before it was posted"))
            return
        if not self._is_finished():
            task.cancel()
        await asyncio.wait([task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cancel()

    def post(self) -> None:
        """Starts the transfer; needs a running loop."""
        if self.state is not HandleState.PREPARED:
            raise HandleClosed(f"post on a handle in state {self.state.value}")
        loop = asyncio.get_running_loop()
        self._placement.region.acquire()
        self.state = HandleState.PROC
        self._deadline = loop.time() + self._timeout_s
        self._task = loop.create_task(self._run())
        # A callback, since a task that is cancelled before its first step runs no `finally`.
        self._task.add_done_callback(self._task_done)

    async def _run(self) -> KvserveError | None:
        """Runs the transfer; every expected end is a value."""
        try:
            with translated(self._address, "the transfer", self._timeout_s):
                async with asyncio.timeout_at(self._deadline):
                    await self._transfer()
        except KvserveError as error:
            return error
        return None

    def _task_done(self, task: "asyncio.Task[KvserveError | None]") -> None:
        self._placement.region.release()
        if task.cancelled():
            self._end(TransferCancelled("cancelled by the caller"))
        elif (defect := task.exception()) is not None:
            # A defect of ours: it ends the handle too, and `_ended` raises it as it is.
            self._end(ServerFault(f"a fault in the client: {defect!r}"))
        else:
            self._end(task.result())

    async def _transfer(self) -> None:
        """The transfer itself, from the request to the last reply."""
        raise NotImplementedError

    def _end(self, error: KvserveError | None) -> None:
        if self.state in (HandleState.DONE, HandleState.ERR):
            return
        self.error = error
        self.state = HandleState.DONE if error is None and self._is_whole() else HandleState.ERR
        self._pulse()

    def _is_whole(self) -> bool:
        """Every byte of every chunk has arrived and is good."""
        raise NotImplementedError

    def _is_finished(self) -> bool:
        """Everything has come and only the end of the rpc is awaited: nothing left to cancel."""
        raise NotImplementedError

    def _pulse(self) -> None:
        """Something happened: every waiter looks at the state, and waits again on a new event."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _next_change(self) -> None:
        """Waits for the next `_pulse`; raises what ended the handle if it has ended."""
        if self.state is not HandleState.PROC:
            await self._raise_end()
            raise HandleClosed("the transfer has ended")
        await self._changed.wait()

    async def ended(self) -> None:
        """Waits for the end, whatever it is; `state` and `error` tell."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _raise_end(self) -> None:
        """Waits for the end; raises the error if there is one."""
        self._check_process()
        if self._task is None and self.state is HandleState.PREPARED:
            raise HandleClosed("wait on a handle that was not posted")
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()
        if self.error is not None:
            raise self.error

    def _time_left_s(self) -> float:
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise HandleClosed("this handle belongs to the process before the fork")
