"""Registered memory that the nixl plane keeps frames in, while they are read, checked, written."""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable
from weakref import finalize

from kvserve.errors import Overloaded

_BLOCK_BYTES = 16 << 20
_BLOCK_SLOTS_MIN = 4


class Slot:
    """Memory for one frame. It is held until nobody has `view` or a part of it any more: a file
    call that hangs keeps it, and so does a copy in flight."""

    __slots__ = ("address", "view")

    def __init__(self, address: int, view: memoryview) -> None:
        self.address = address
        self.view = view


class Slots:
    """Slots of one size. Grows by blocks, registered once each, and is never given back.

    Frames are kept in `to_keep` slots at most, from the first byte to the last use; `to_pass` more
    are left for frames that are kept elsewhere, while they are in flight.
    """

    def __init__(
        self,
        slot_size_bytes: int,
        *,
        to_keep: int,
        to_pass: int,
        register: Callable[[int, int], None],
    ) -> None:
        self._slot_size_bytes = slot_size_bytes
        self._memory_type = ctypes.c_char * slot_size_bytes
        self._to_keep = to_keep
        self._slots_max = to_keep + to_pass
        self._register = register
        # A deque, since the last to hold a slot may be a thread.
        self._free: deque[int] = deque()
        self._blocks: list[mmap.mmap] = []
        self.count = 0

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def take_to_keep(self) -> Slot | None:
        """None if those left are for frames that only pass."""
        return self.take() if self.taken < self._to_keep else None

    def take(self) -> Slot:
        """Raises `Overloaded` if all are taken."""
        if not self._free:
            self._grow()
        address = self._free.pop()
        memory = self._memory_type.from_address(address)
        finalize(memory, self._give, address).atexit = False
        return Slot(address, memoryview(memory).cast("B"))

    def _give(self, address: int) -> None:  # a method, so that the memory lives as long as a slot
        self._free.append(address)

    def _grow(self) -> None:
        size = self._slot_size_bytes
        wanted = max(_BLOCK_SLOTS_MIN, _BLOCK_BYTES // size)
        count = min(wanted, self._slots_max - self.count)
        if count <= 0:
            raise Overloaded(f"all {self.count} frames of staging memory are in use")
        memory = mmap.mmap(-1, count * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._register(address, count * size)
        self._blocks.append(memory)
        self._free.extend(range(address, address + count * size, size))
        self.count += count
