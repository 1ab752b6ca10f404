"""Real processes: servers and clients that are killed, restarted, forked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvclient import (
    Client,
    Descriptor,
    HandleState,
    ServerUnavailable,
)
from kvserve.testing.server_process import ServerProcess
from tests.payload import payload_for, small_descriptor


@pytest.fixture
def process(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(root) as process:
        yield process


def put(client: Client, descriptor: Descriptor, payload: object) -> None:
    with client.store(descriptor, payload) as handle:
        for layer_index in descriptor.layer_order:
            handle.store_layer(layer_index)
        assert handle.finish().is_whole


def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def temp_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_file()]


def test_blocking_client(process: ServerProcess) -> None:
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    target = bytearray(len(source))
    with Client(process.address) as client:
        assert client.server_info().version
        with client.store(descriptor, source) as store:
            assert store.needed() == list(range(8))
            posted = [store.post_layer(layer_index) for layer_index in range(3)]
            store.store_layer(3)
            assert store.finish().is_whole
            assert all(future.done() for future in posted)
        assert client.lookup(descriptor).prefix_chunks == 8
        with client.fetch(descriptor, target) as fetch:
            assert [event.layer_index for event in fetch.layers()] == [0, 1, 2, 3]
            assert fetch.wait().is_whole
        assert fetch.state is HandleState.DONE
        assert target == source
        assert client.requests == {"GetServerInfo": 1, "Store": 1, "Lookup": 1, "Fetch": 1}
        assert len(client.delete(descriptor)) == 8


def test_sigterm_drains(process: ServerProcess, plane: str) -> None:
    """A store that is open when SIGTERM comes may finish; the exit status is 0."""
    descriptor = small_descriptor()
    with Client(process.address, plane=plane) as client:
        handle = client.store(descriptor, payload_for(descriptor))
        handle.store_layer(0)
        handle.wait_layer(0)
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: "draining" in process.log())
        for layer_index in range(1, 4):
            handle.store_layer(layer_index)
        assert handle.finish().is_whole
        assert process.wait() == 0
        assert "stopped" in process.log()


def test_restart(root: Path, plane: str) -> None:
    """T10: in-flight transfers fail visibly, the same client works again within 5 s."""
    descriptors = [small_descriptor(first_token=1000 * n) for n in range(20)]
    process = ServerProcess(root).start()
    client = Client(process.address, plane=plane)
    for number, descriptor in enumerate(descriptors[:10]):
        put(client, descriptor, payload_for(descriptor, number))
    in_flight = client.store(descriptors[10], payload_for(descriptors[10], 10))
    in_flight.store_layer(0)
    in_flight.wait_layer(0)
    process.kill()
    with pytest.raises(ServerUnavailable):
        in_flight.finish()
    assert in_flight.state is HandleState.ERR
    restarted = ServerProcess(root, listen=process.address).start()
    started = time.monotonic()
    put(client, descriptors[10], payload_for(descriptors[10], 10))
    assert time.monotonic() - started < 5
    for number, descriptor in enumerate(descriptors[:11]):
        target = bytearray(descriptor.payload_size_bytes)
        assert client.fetch(descriptor, target).wait().is_whole
        assert target == payload_for(descriptor, number), "an acknowledged chunk was lost"
    client.close()
    assert restarted.stop() == 0


_VANISHING = """
import sys, os, signal
from kvclient import Client
from tests.payload import payload_for, small_descriptor
descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
client = Client(sys.argv[1], plane=sys.argv[3])
handle = client.store(descriptor, payload_for(descriptor))
for layer_index in range(16):
    handle.store_layer(layer_index)
    handle.wait_layer(layer_index)
    if sys.argv[2] == "store" and layer_index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
assert handle.finish().is_whole
fetch = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes))
fetch.wait_layer(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


_ALL_SENT = """
import os, signal, sys
from kvclient import Client
from tests.payload import payload_for, small_descriptor
descriptor = small_descriptor()
client = Client(sys.argv[1], plane=sys.argv[3])
handle = client.store(descriptor, payload_for(descriptor))
for layer_index in range(4):
    handle.store_layer(layer_index)
    handle.wait_layer(layer_index)
if sys.argv[2] == "cancel":
    handle.cancel()
if sys.argv[2] == "close":
    client.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["cancel", "close", "kill"])
def test_every_layer_sent_but_not_finished_publishes_nothing(
    process: ServerProcess, root: Path, how: str, plane: str
) -> None:
    """A client that dies or cancels after its last layer looks like one that half-closes."""
    for _ in range(5):
        died = subprocess.run(
            [sys.executable, "-c", _ALL_SENT, process.address, how, plane],
            timeout=60,
            check=False,
        )
        assert died.returncode == -signal.SIGKILL
        until(lambda: temp_files(root) == [])
        with Client(process.address) as client:
            assert client.lookup(small_descriptor()).hits == [False] * 8


@pytest.mark.parametrize("during", ["store", "fetch"])
def test_a_killed_client(process: ServerProcess, root: Path, during: str, plane: str) -> None:
    """SIGKILL mid-transfer: the server forgets the transfer, removes its files, serves others."""
    files = f"/proc/{process.pid}/fd"
    with Client(process.address) as client:
        client.server_info()
        before = len(os.listdir(files))
        died = subprocess.run(
            [sys.executable, "-c", _VANISHING, process.address, during, plane],
            timeout=60,
            check=False,
        )
        assert died.returncode == -signal.SIGKILL
        until(lambda: temp_files(root) == [])
        known = 64 if during == "fetch" else 0
        until(lambda: len(os.listdir(files)) <= before + known)
        descriptor = small_descriptor()
        put(client, descriptor, payload_for(descriptor))


def test_unix_socket(root: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/kvserve.sock"
    with ServerProcess(root, listen=address) as process, Client(address) as client:
        assert process.address == address
        put(client, small_descriptor(), payload_for(small_descriptor()))


def test_memory_is_bounded_by_frames_not_by_payload(process: ServerProcess, plane: str) -> None:
    """A 256 MiB fetch and store: the server's peak grows by far less than the payload."""

    def peak() -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=128, layers=32)
    size = descriptor.payload_size_bytes
    assert size == 256 << 20
    source = bytearray(os.urandom(1 << 20)) * (size >> 20)
    with Client(process.address, plane=plane) as client:
        small = small_descriptor()
        put(client, small, payload_for(small))
        before = peak()
        put(client, descriptor, source)
        target = bytearray(size)
        assert client.fetch(descriptor, target).wait().is_whole
    assert target == source
    assert peak() - before < 96 << 20
