"""gRPC statuses -> the errors of `kvserve.errors`, the only place."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import walk_tb

import grpc

from kvserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvserveError,
    MalformedMessage,
    MessageTooLarge,
    Overloaded,
    ServerFault,
    ServerUnavailable,
    TransferCancelled,
    raised_classes,
)

_BY_NAME = {cls.__name__: cls for cls in raised_classes()}
# Statuses that gRPC itself makes, without our metadata.
_BY_CODE: dict[grpc.StatusCode, type[KvserveError]] = {
    # Our own cancels raise `CancelledError`: this one, like INTERNAL and UNKNOWN without our
    # metadata, is what gRPC makes of a server that stops or dies in the middle of a call.
    grpc.StatusCode.CANCELLED: ServerUnavailable,
    grpc.StatusCode.INTERNAL: ServerUnavailable,
    grpc.StatusCode.UNKNOWN: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLarge,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
}
# The packages whose frames have calls and channels in their variables, or tasks that have them.
_HOLDERS = ("grpc", "kvclient", "asyncio")


def to_error(error: grpc.aio.AioRpcError, address: str) -> KvserveError:
    """The class that the server raised, or the one that fits gRPC's own status."""
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    cls = _BY_NAME.get(metadata.get("kvserve-reason", ""))
    if cls is None:
        cls = _BY_CODE.get(error.code(), ServerFault)
    message = f"{address}: {error.details() or error.code().name}"
    if cls is Overloaded:
        after = float(metadata.get("kvserve-retry-after-s", "0.1"))
        return Overloaded(message, retry_after_s=after)
    return cls(message)


@contextmanager
def translated(address: str, what: str, timeout_s: float) -> Iterator[None]:
    """Turns whatever ends a call into our errors, which hold nothing of the call.

    grpc.aio raises `CancelledError` also for a call that our own side has ended, which is no
    cancellation of the task that waits for it.
    """
    try:
        try:
            yield
        except BaseException as error:
            let_go(error)
            raise
    except grpc.aio.AioRpcError as error:
        raise to_error(error, address) from error
    except grpc.aio.InternalError as error:
        # grpc.aio's word for a read or write on a call that has ended under it.
        raise ServerUnavailable(f"{address}: {what}: the connection has ended: {error}") from error
    except MalformedMessage as error:
        raise ServerFault(f"{address}: {error}") from error
    except TimeoutError:
        raise DeadlineExceeded(f"{address}: {what} was not done in {timeout_s:g} s") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise TransferCancelled(f"{address}: {what} was ended by this client") from None


def let_go(error: BaseException) -> None:
    """Takes gRPC's calls and channels from an error: it may be kept, they would live as long.

    An error holds the frames that it came through, and these their variables. While a call or a
    channel lives so do gRPC's threads, and no fork is safe (see `fork_support`). Only frames of
    gRPC, asyncio and this package are emptied: what a debugger shows of the caller's stays.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:  # each turn takes one error, none is taken twice
        it = left.pop()
        if it is None or id(it) in seen:
            continue
        seen.add(id(it))
        left += (it.__cause__, it.__context__)
        for frame, _ in walk_tb(it.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _HOLDERS:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
