"""A server that hangs in the middle of a fetch, for planes whose server writes to the region."""

import os
import signal
import threading

from kvclient import Client, Descriptor, Region
from kvserve.testing.server_process import ServerProcess


def check_that_a_cancel_is_held(
    process: ServerProcess, client: Client, descriptor: Descriptor, region: Region
) -> None:
    """T6: it may write when it wakes up, so until then the region is not the caller's."""
    for _ in range(20):  # until it is stopped in the middle of a fetch
        handle = client.fetch(descriptor, region)
        handle.wait_layer(0)
        os.kill(process.pid, signal.SIGSTOP)
        cancelling = threading.Thread(target=handle.cancel)
        cancelling.start()
        cancelling.join(0.3)
        is_held = cancelling.is_alive()
        os.kill(process.pid, signal.SIGCONT)
        cancelling.join(20)
        assert not cancelling.is_alive()
        region.view[:] = b"\xaa" * len(region.view)
        assert region.view == b"\xaa" * len(region.view)
        if is_held:
            break
    assert is_held
