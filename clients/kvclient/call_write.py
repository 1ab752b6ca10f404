"""A write on a stream whose call ends meanwhile: the call's status is what counts.

Where the server refuses a store while the client still writes, two things happen at once: a write
fails, and the status comes. When grpc.aio (1.78) hears of the failed write it makes a status of its
own, INTERNAL "Internal error from Core", and the server's is lost, for reads too, whichever came
first. So it does not hear of it unless there is no other status.
"""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from types import coroutine
from typing import Any

import grpc

from kvclient.planes.base import StoreCall

_STATUS_S = 1.0
"""The status comes in the same breath; else grpc's own must do."""


async def write(call: StoreCall, message: bytes) -> None:
    """`call.write(message)`; raises the server's status if it has ended the call with one."""
    try:
        await _written(call, call.write(message))
    except (grpc.aio.InternalError, asyncio.InvalidStateError):
        if call.done():
            await call.read()  # raises it
        raise


@coroutine
def _written(call: StoreCall, step: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
    """Runs `step`, which is grpc's; what goes wrong with what it waits for is raised here first."""
    try:
        waited = step.send(None)
        while True:
            try:
                yield waited
            except asyncio.CancelledError as error:
                waited = step.throw(error)
            except grpc.aio.InternalError as error:
                yield from _ended(call).__await__()
                if call.done():
                    raise
                waited = step.throw(error)
            else:
                waited = step.send(None)
    except StopIteration:
        return
    finally:
        step.close()


async def _ended(call: StoreCall) -> None:
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    with suppress(TimeoutError):
        async with asyncio.timeout(_STATUS_S):
            await ended.wait()
