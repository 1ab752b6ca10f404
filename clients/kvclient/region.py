"""Registered regions: memory of the caller that transfers read from or write into."""

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from kvserve.errors import HandleClosed, InvalidRequest


class Region:
    """Any contiguous buffer: bytearray, mmap, numpy array, memoryview, or a torch CPU tensor.

    The region keeps the buffer alive and pins its address; the bytes stay the caller's, who must
    not touch the parts that an open handle uses. `close`, or the end of a `with` block, gives the
    buffer up; it refuses while a handle is open on it, since late writes would land in memory with
    another owner.
    """

    def __init__(self, buffer: Any) -> None:
        try:
            view = memoryview(_torch_memory(buffer) if hasattr(buffer, "data_ptr") else buffer)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"a region must be a buffer of bytes or numbers, not {type(buffer).__name__}"
            ) from error
        if "O" in view.format:
            raise InvalidRequest("a region of Python objects cannot be stored or fetched into")
        if not view.c_contiguous:
            raise InvalidRequest("a region must be contiguous: copy it or take .contiguous() first")
        self._owner = buffer
        self._view: memoryview | None = view.cast("B")
        self._users = 0
        self._when_closed: list[Callable[[], None]] = []
        self.is_lasting = True
        """Made by the caller, for more than one transfer: worth to be registered with NIXL."""

    def __repr__(self) -> str:
        size = "closed" if self._view is None else f"{len(self._view)} B"
        return f"<Region {size}, {self._users} handles>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def view(self) -> memoryview:
        """The bytes, one dimension, format "B"."""
        if self._view is None:
            raise HandleClosed("the region is closed")
        return self._view

    @property
    def size_bytes(self) -> int:
        return len(self.view)

    @property
    def is_writable(self) -> bool:
        return not self.view.readonly

    def close(self) -> None:
        """Gives the buffer up. Twice is fine.

        Raises:
            HandleClosed: a handle still uses the region; wait for it or cancel it first.
        """
        if self._users:
            raise HandleClosed(f"the region is in use by {self._users} open handles")
        self._view = None
        callbacks, self._when_closed = self._when_closed, []
        for callback in callbacks:
            callback()
        self._owner = None

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Calls it when the buffer is given up, while it is still there."""
        self._when_closed.append(callback)

    def acquire(self) -> None:
        """A handle starts to use the region."""
        if self._view is None:
            raise HandleClosed("the region is closed")
        self._users += 1

    def release(self) -> None:
        self._users -= 1


def as_region(buffer: Any) -> Region:
    if isinstance(buffer, Region):
        return buffer
    region = Region(buffer)
    region.is_lasting = False
    return region


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _torch_memory(tensor: Any) -> ctypes.Array[ctypes.c_char]:
    # torch has no buffer protocol for bfloat16 and float8, so its memory is taken by address; torch
    # itself is not imported here.
    if tensor.device.type != "cpu":
        raise InvalidRequest(f"a region must be in host memory, this tensor is on {tensor.device}")
    if not tensor.is_contiguous():
        raise InvalidRequest("a region must be contiguous: take .contiguous() first")
    size = tensor.numel() * tensor.element_size()
    memory: ctypes.Array[ctypes.c_char] = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return memory
