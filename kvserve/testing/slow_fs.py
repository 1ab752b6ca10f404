"""A file system on which each read costs a time, as an RPC does, over the real one."""

import time
from collections.abc import Sequence

from kvserve.fs import PosixFileSystem


class SlowFileSystem(PosixFileSystem):
    """Nothing is in its page cache, and every read waits `latency_s` first.

    The bytes come from the real page cache: what a read costs beyond the latency is one copy.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        super().__init__()
        self.latency_s = latency_s

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        self._wait()
        return super().read_into(fd, into, offset)

    def read_parts(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._wait()
        return super().read_parts(fd, parts, offset)

    def read_cached(self, fd: int, into: memoryview, offset: int) -> int | None:
        return None

    def _wait(self) -> None:
        if self.latency_s:
            time.sleep(self.latency_s)
