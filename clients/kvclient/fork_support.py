"""Makes clients usable on both sides of a fork.

Engines fork workers. gRPC keeps threads and locks that a forked child does not have: its calls then
hang or abort, and gRPC's own support for it (GRPC_ENABLE_FORK_SUPPORT) was seen to abort parent
and child under asyncio. What does work is a fork while gRPC is not there. So before each `os.fork`
every client lets its open transfers end (those that take too long are cancelled), closes its
connection, and gRPC's threads are waited for; then parent and child connect anew when they need to.

That needs the forking thread to wait for the clients' loops. Where it cannot (an `AsyncClient` on
the forking thread's own loop, another user of gRPC in the process), the parent is not disturbed and
the child's clients refuse with an error that says what to do: never a hang.

Imported before grpc, to turn off its own handlers: beside an open channel they can kill the parent.
"""

import asyncio
import os
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from kvserve.errors import HandleClosed

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_TRANSFERS_END_S = 5.0
_CLOSE_S = 2.0
_THREADS_END_S = 2.0
# As the kernel shows them, cut to 15 characters.
_GRPC_THREADS = ("grpc_", "event_engine", "timer_manager", "default-executo", "lifeguard")
# A new thread of gRPC has its name within this time; `grpc_shutdown` is started last of all, and a
# child that is forked while it runs waits for its end for ever.
_QUIET_S = 0.02


class Forkable(Protocol):
    """A client, as far as a fork is concerned."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that the open connection belongs to; None if there is none."""

    def quiesce(self, transfers_end_s: float) -> Coroutine[Any, Any, None]:
        """Ends transfers and the connection; runs on `loop`."""


_clients: WeakSet[Any] = WeakSet()
_in_use = False
_forked_in_use_by: int | None = None


def watch(client: Forkable) -> None:
    """From now on a fork waits for this client."""
    _clients.add(client)


def check() -> None:
    """Raises `HandleClosed` in a child whose parent could not put gRPC aside before the fork."""
    if _forked_in_use_by is not None:
        raise HandleClosed(
            f"process {_forked_in_use_by} was using gRPC when it forked this one, so gRPC cannot "
            "work here: fork before the first call, from a thread without a running event loop, "
            "or start workers with spawn"
        )


def _before_fork() -> None:
    running = asyncio._get_running_loop()
    open_clients = [client for client in _clients if client.loop is not None]
    for client in open_clients:
        loop = client.loop
        if loop is None or loop is running or not loop.is_running():
            continue
        closing = asyncio.run_coroutine_threadsafe(client.quiesce(_TRANSFERS_END_S), loop)
        with suppress(FutureTimeoutError):
            closing.result(_TRANSFERS_END_S + _CLOSE_S)
    global _in_use
    _in_use = not _grpc_is_gone() if open_clients else _has_grpc_threads()


def _grpc_is_gone() -> bool:
    """Waits for it: gRPC ends its threads by one of its own and offers nothing to wait for."""
    now = time.monotonic()
    deadline, quiet_since = now + _THREADS_END_S, now
    while now < deadline:
        if _has_grpc_threads():
            quiet_since = time.monotonic()
        elif now - quiet_since > _QUIET_S:
            return True
        time.sleep(0.001)
        now = time.monotonic()
    return False


def _after_in_child() -> None:
    global _forked_in_use_by
    if _in_use or any(client.loop is not None for client in _clients):
        _forked_in_use_by = os.getppid()


def _has_grpc_threads() -> bool:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            if (task / "comm").read_text().startswith(_GRPC_THREADS):
                return True
    return False


os.register_at_fork(before=_before_fork, after_in_child=_after_in_child)
