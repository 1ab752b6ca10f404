"""Asks gRPC to survive `fork`, which it does only if told before it is imported.

Engines fork workers. gRPC keeps threads and file descriptors that a forked child does not have;
with `GRPC_ENABLE_FORK_SUPPORT=1` a child may open new channels, without it the first call of a
child hangs for ever (grpc#12455). So this module runs before anything here imports grpc.
"""

import os
import sys

_NAME = "GRPC_ENABLE_FORK_SUPPORT"


def _ask() -> bool:
    if _NAME not in os.environ and "grpc" not in sys.modules:
        os.environ[_NAME] = "1"
    return os.environ.get(_NAME, "").lower() in ("1", "true", "yes")


IS_SUPPORTED = _ask()
"""Whether a forked child may use a client that its parent has used."""
