"""Waiting that a cancel does not end: for whoever still has the region."""

import asyncio
from collections.abc import Awaitable, Callable


async def outlast(step: Callable[[], Awaitable[bool]]) -> None:
    """Awaits `step` until it says that it was the last, however often the task is cancelled
    meanwhile; a cancellation is raised at the end. A step that was cancelled is begun anew."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            if await step():
                break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
