"""Keeps the memory of frames in the process instead of giving it back to the kernel.

glibc returns a freed block of 1 MiB at once, so each frame, and gRPC's own copy, was faulted in
page by page again: two thirds of a fetch's CPU time on the server, a third of a store's wall time.
Two settings of malloc keep freed frames for the next ones, up to 64 MiB in a process.

Server and client both ask for it, the client because it moves as many frames. An engine that tunes
malloc itself sets KVSERVE_KEEP_FRAME_MEMORY=0.
"""

import ctypes
import functools
import os

# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_TRIM_BYTES = 64 << 20
# gRPC's copies and its receive buffer are somewhat larger than the frame; frames are 1 MiB.
_MMAP_BYTES = 4 << 20


@functools.cache
def keep_frame_memory() -> bool:
    """Tunes malloc, once in a process; False if told not to or if there are no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.get("KVSERVE_KEEP_FRAME_MEMORY") == "0":
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
