"""Keeps the memory of sent frames in the process instead of giving it back to the kernel.

glibc returns a freed block of 1 MiB at once, so each frame (and gRPC's own copy of it) was faulted in
page by page again: two thirds of the server's CPU time in a fetch. Two settings of malloc keep freed
frames for the next ones, up to `_TRIM_BYTES`.
"""

import ctypes
import logging

log = logging.getLogger(__name__)

# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_TRIM_BYTES = 64 << 20


def keep_frame_memory(frame_size_bytes: int) -> bool:
    """Tunes malloc for frames of this size; False where the C library has no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("this C library has no mallopt: frames cost more CPU time")
        return False
    # Twice a frame: gRPC's copies are a little larger than the frame itself.
    done = mallopt(_M_MMAP_THRESHOLD, max(2 * frame_size_bytes, 4 << 20))
    return bool(done and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
