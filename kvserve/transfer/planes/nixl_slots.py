"""Registered memory that the nixl plane reads frames into and writes them from."""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable
from weakref import finalize

from kvserve.errors import Overloaded

_BLOCK_BYTES = 16 << 20
_BLOCK_SLOTS_MIN = 4


class Slot:
    """Memory for one frame, held until nobody has this object: a read that hangs keeps it."""

    __slots__ = ("__weakref__", "address", "view")

    def __init__(self, address: int, view: memoryview) -> None:
        self.address = address
        self.view = view


class Slots:
    """Slots of one size. Grows by blocks, registered once each, and is never given back.

    Frames are read into `to_read_into` slots at most; `to_write_from` more are left for frames that
    were read elsewhere, and for those in flight.
    """

    def __init__(
        self,
        slot_size_bytes: int,
        *,
        to_read_into: int,
        to_write_from: int,
        register: Callable[[int, int], None],
    ) -> None:
        self._slot_size_bytes = slot_size_bytes
        self._to_read_into = to_read_into
        self._slots_max = to_read_into + to_write_from
        self._register = register
        # A deque, since the last to hold a slot may be a thread.
        self._free: deque[tuple[int, memoryview]] = deque()
        self.count = 0

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take_to_read_into(self) -> Slot | None:
        """None if those left are for frames that are ready to be sent."""
        return self.take() if self.taken < self._to_read_into else None

    def take(self) -> Slot:
        """Raises `Overloaded` if all are taken."""
        if not self._free:
            self._grow()
        address, view = self._free.pop()
        slot = Slot(address, view)
        finalize(slot, self._free.append, (address, view)).atexit = False
        return slot

    def _grow(self) -> None:
        size = self._slot_size_bytes
        wanted = max(_BLOCK_SLOTS_MIN, _BLOCK_BYTES // size)
        count = min(wanted, self._slots_max - self.count)
        if count <= 0:
            raise Overloaded(f"all {self.count} frames of staging memory are in use")
        memory = mmap.mmap(-1, count * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._register(address, count * size)
        view = memoryview(memory)
        for at in range(0, count * size, size):
            self._free.append((address + at, view[at : at + size]))
        self.count += count
