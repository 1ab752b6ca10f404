"""Regions that the server on the same host reads and writes itself: the shm plane's memory."""

import fcntl
import mmap
import os

from kvclient.region import Region
from kvserve.errors import InvalidRequest


class SharedRegion(Region):
    """`size_bytes` of new memory, as a memfd that can neither shrink nor grow. Make it once: the
    kernel clears every page here, which takes a while.

    Use it like any region: `region.view` is the memory, `numpy.frombuffer(region.view, ...)` or
    `torch.frombuffer` lay an array over it. Only a server that a transfer of it goes to gets it.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise InvalidRequest(f"a shared region of {size_bytes} bytes: must be at least 1")
        fd = os.memfd_create("kvclient", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            # With all its pages from the start, or the server would make them, and pay for them.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            super().__init__(mmap.mmap(fd, size_bytes, flags=flags))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    @property
    def fd(self) -> int:
        """The memfd, the region's own."""
        return self._fd

    def close(self) -> None:
        super().close()
        self._close_fd()

    def __del__(self) -> None:
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)
