"""Makes clients usable on both sides of a fork.

Engines fork workers. gRPC keeps threads and locks that a forked child does not have: its calls then
hang or abort, and gRPC's own support for it (GRPC_ENABLE_FORK_SUPPORT) was seen to abort parent
and child under asyncio. What does work is a fork while gRPC is not there. So before each `os.fork`
every client lets its open transfers end (those that take too long are cancelled), closes its
connection, and gRPC's threads are waited for; then parent and child connect anew when they need to.
They end when the last call and channel has gone, so nothing that outlives a call may hold it: see
`status.let_go`. What is left in a cycle of references, gRPC's own or others', one collection takes.

What other threads ask of their clients meanwhile waits until the fork is over.

That needs the forking thread to wait for the clients' loops. Where it cannot (an `AsyncClient` on
the forking thread's own loop, or on one that is stopped; another user of gRPC in the process), the
parent is not disturbed and the child's clients refuse with an error that says what to do: never a
hang.

Imported before grpc, to turn off its own handlers: beside an open channel they can kill the parent.
"""

import asyncio

# Imported first: it holds a lock from its own hook before a fork on, without which no loop resolves
# a name. The hooks that were registered last run first, so ours must come after it.
import concurrent.futures.thread  # noqa: F401
import gc
import os
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from kvserve.errors import HandleClosed

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_TRANSFERS_END_S = 5.0
_CLOSE_S = 2.0
_THREADS_END_S = 2.0
# Threads that last longer than this are probably held by a cycle. They were seen to end in a few
# hundredths of a second, a connection that was never made in a few tenths.
_COLLECT_AFTER_S = 0.4
# As the kernel shows them, cut to 15 characters.
_GRPC_THREADS = ("grpc_", "event_engine", "timer_manager", "default-executo", "lifeguard")
# A new thread of gRPC has its name within this time; `grpc_shutdown` is started last of all, and a
# child that is forked while it runs waits for its end for ever.
_QUIET_S = 0.02


class Forkable(Protocol):
    """A client's channel, as far as a fork is concerned."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the open connection belongs to; None if there is none."""

    def quiesce(self, transfers_end_s: float) -> Coroutine[Any, Any, None]:
        """Ends transfers and the connection; runs on `loop`."""

    def abandon(self) -> None:
        """Lets go of the connection; `loop` is closed, so nothing of it can run any more."""


_channels: WeakSet[Any] = WeakSet()
# Whether a client has connected since a fork last waited for gRPC: one that was closed just before
# the fork, or collected, has left threads that are about to end.
_has_connected = False
_in_use = False
# While a fork is under way: done when it is over.
_fork: Future[None] | None = None
_forked_in_use_by: int | None = None


def watch(channel: Forkable) -> None:
    """From now on a fork waits for this channel."""
    _channels.add(channel)


async def no_fork() -> None:
    """Before a client makes a connection: waits for a fork that is under way in another thread."""
    if _fork is not None:
        await asyncio.wrap_future(_fork)


def connecting() -> None:
    """A client makes a connection: the next fork waits for gRPC's threads.

    Raises:
        HandleClosed: in a child whose parent could not put gRPC aside before the fork.
    """
    global _has_connected
    _has_connected = True
    if _forked_in_use_by is not None:
        raise HandleClosed(
            f"process {_forked_in_use_by} was using gRPC when it forked this one, so gRPC cannot "
            "work here: fork before the first call, from a thread without a running event loop, "
            "or start workers with spawn"
        )


def _before_fork() -> None:
    running = asyncio._get_running_loop()
    global _in_use, _has_connected, _fork
    if _forked_in_use_by is not None:
        return  # the clients' loops, which this process does not have, still say that they run
    if _fork is None:
        _fork = Future()
    closing: list[Future[None]] = []
    for channel in list(_channels):
        loop = channel.loop
        if loop is None:
            continue
        if loop.is_closed():
            channel.abandon()
        elif loop is not running and loop.is_running():
            work = channel.quiesce(_TRANSFERS_END_S)
            closing.append(asyncio.run_coroutine_threadsafe(work, loop))
    closed = wait(closing, _TRANSFERS_END_S + _CLOSE_S).done
    if any(channel.loop is not None for channel in _channels):
        _in_use = True
    elif _has_connected:
        _has_connected = False
        _in_use = not _grpc_ends()
    else:
        _in_use = _has_grpc_threads()
    for each in closed:
        each.result()  # Python reports what is raised here, and forks


def _grpc_ends() -> bool:
    """Waits for it, and helps it once."""
    if _grpc_is_gone(_COLLECT_AFTER_S):
        return True
    gc.collect()
    return _grpc_is_gone(_THREADS_END_S)


def _grpc_is_gone(timeout_s: float) -> bool:
    """Waits for it: gRPC ends its threads by one of its own and offers nothing to wait for."""
    now = time.monotonic()
    deadline, quiet_since = now + timeout_s, now
    while now < deadline:
        if _has_grpc_threads():
            quiet_since = time.monotonic()
        elif now - quiet_since > _QUIET_S:
            return True
        time.sleep(0.001)
        now = time.monotonic()
    return False


def _after_in_parent() -> None:
    global _fork
    fork, _fork = _fork, None
    if fork is not None:
        fork.set_result(None)


def _after_in_child() -> None:
    global _forked_in_use_by, _fork
    _fork = None  # who waits for it is in the parent
    if _in_use or any(channel.loop is not None for channel in _channels):
        _forked_in_use_by = os.getppid()


def _has_grpc_threads() -> bool:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            if (task / "comm").read_text().startswith(_GRPC_THREADS):
                return True
    return False


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
