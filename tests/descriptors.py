"""How many descriptors this process has open, for tests that nothing may leak."""

import gc
import os


def open_files() -> int:
    """What earlier tests have left to Python's collector is closed first: it is no part of either
    the baseline or the difference."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
