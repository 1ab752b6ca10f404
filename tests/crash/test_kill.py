"""SIGKILL at random moments under load (T8): whole or absent, nothing acknowledged is lost.

Twenty kills here; `KVSERVE_CRASH_ROUNDS=200` is the long run of docs/reliability.md.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from random import Random

import pytest

from kvclient import Client, Descriptor, KvserveError
from kvserve.testing.server_process import ServerProcess
from tests.payload import payload_for, small_descriptor

ROUNDS = int(os.environ.get("KVSERVE_CRASH_ROUNDS", "20"))
LEASE_S = 1.0
SETTINGS = (f"store.owner_lease_s={LEASE_S}", "store.sweep_interval_s=1", "server.log_level=error")


def temp_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_file()]


def work(number: int) -> tuple[Descriptor, bytearray]:
    descriptor = small_descriptor(first_token=100_000 * number, chunks=16)
    return descriptor, payload_for(descriptor, number)


def store_until_killed(address: str, numbers: list[int], acknowledged: set[int]) -> None:
    """Stores one prefix after another; notes those whose DONE has come."""
    client = Client(address, timeout_s=10, connect_timeout_s=0.2)
    with contextlib.suppress(KvserveError):
        for number in numbers:
            descriptor, payload = work(number)
            handle = client.store(descriptor, payload)
            for layer_index in descriptor.layer_order:
                handle.store_layer(layer_index)
            if handle.finish().is_whole:
                acknowledged.add(number)
    client.close()


@pytest.mark.timeout(60 + 5 * ROUNDS)
def test_kill_at_random_moments(root: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    random = Random(seed)
    acknowledged: set[int] = set()
    tried = 0
    for _ in range(ROUNDS):
        process = ServerProcess(root, settings=SETTINGS).start()
        writers = [
            threading.Thread(
                target=store_until_killed,
                args=(process.address, list(range(start, start + 100)), acknowledged),
            )
            for start in (tried, tried + 100)
        ]
        tried += 200
        for writer in writers:
            writer.start()
        time.sleep(random.uniform(0.02, 0.4))
        process.kill()
        for writer in writers:
            writer.join()
    assert acknowledged, "nothing was stored between the kills"
    with ServerProcess(root, settings=SETTINGS) as process, Client(process.address) as client:
        for number in range(tried):
            descriptor, payload = work(number)
            presence = client.lookup(descriptor)
            if number in acknowledged:
                assert presence.prefix_chunks == 16, f"seed {seed}: {number} was lost"
            if not any(presence.hits):
                continue
            target = bytearray(len(payload))
            result = client.fetch(descriptor, target).wait()
            size = descriptor.layout.slice_sizes[0]
            for chunk, verdict in enumerate(result.verdicts):
                assert verdict.status.is_stored == presence.hits[chunk], f"seed {seed}: {verdict}"
                if verdict.status.is_stored:
                    for start in descriptor.payload_offsets:
                        at = start + chunk * size
                        assert target[at : at + size] == payload[at : at + size], f"seed {seed}"
        deadline = time.monotonic() + 30
        while temp_files(root) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert temp_files(root) == [], "orphans of killed servers are swept"
        # What was interrupted can be stored at once.
        again = next(number for number in range(tried) if number not in acknowledged)
        store_until_killed(process.address, [again], acknowledged)
        assert again in acknowledged
