"""What a chunk file counts for in usage: its size, but for one that is far too long.

A damaged file may claim any length for nothing (a hole). If usage believed it, one such file would
have everything else evicted, or, once removed, hide as many bytes of what is really there.
"""

from typing import Final

from kvserve.errors import KvserveError
from kvserve.format.chunk_file import PROLOGUE_SIZE_BYTES, stated_size_bytes
from kvserve.fs import FileSystem
from kvserve.store.small_file import read_head_blocking

BELIEVED_SIZE_BYTES_MAX: Final = 64 << 20
"""A file up to this size is not looked into: that would cost a read for each."""


def counted_size_blocking(fs: FileSystem, path: str, size_bytes: int) -> int:
    """`size_bytes`: of the chunk file at `path`, as it was seen. What cannot be read counts for
    no more than `BELIEVED_SIZE_BYTES_MAX`."""
    if size_bytes <= BELIEVED_SIZE_BYTES_MAX:
        return size_bytes
    try:
        head = read_head_blocking(fs, path, PROLOGUE_SIZE_BYTES)
    except KvserveError:
        head = None
    stated = None if head is None else stated_size_bytes(head)
    return min(size_bytes, BELIEVED_SIZE_BYTES_MAX if stated is None else stated)
