"""Forks: clients work in the parent and in the child, whatever went before."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.testing.server_process import ServerProcess


@pytest.fixture
def process(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(root) as process:
        yield process


_FORKING = """
import os, sys
from kvclient import Client, HandleClosed, KvserveError
from tests.payload import payload_for, small_descriptor

address, when, plane = sys.argv[1:]
descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
payload = payload_for(descriptor)

def fetch(client):
    target = bytearray(len(payload))
    assert client.fetch(descriptor, target, timeout_s=10).wait().is_whole
    assert target == payload

client = Client(address, plane=plane)
if when != "unused":
    with client.store(descriptor, payload) as handle:
        for layer_index in descriptor.layer_order:
            handle.store_layer(layer_index)
        assert handle.finish().is_whole
for _ in range(3):
    in_flight = client.fetch(descriptor, bytearray(len(payload))) if when == "busy" else None
    pid = os.fork()
    if pid == 0:
        if in_flight is not None:
            try:
                in_flight.wait()
                os._exit(3)
            except HandleClosed as error:
                assert "before the fork" in str(error)
        if when == "unused":
            client.server_info()
        else:
            fetch(client)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    if in_flight is not None:
        assert in_flight.wait().is_whole, "the fork waited for it"
    if when != "unused":
        fetch(client)
print("good")
"""

_FORKING_ON_THE_LOOP = """
import asyncio, os, sys
from kvclient import AsyncClient, Client, HandleClosed

async def main():
    client = AsyncClient(sys.argv[1], timeout_s=10)
    await client.server_info()
    pid = os.fork()
    if pid == 0:
        try:
            Client(sys.argv[1]).server_info()
        except HandleClosed as error:
            os._exit(7 if "start workers with spawn" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    await client.server_info()
    await client.close()

asyncio.run(main())
print("good")
"""


_AFTER = """
import asyncio, gc, os, sys, time
from kvclient import AsyncClient, Client, DeadlineExceeded, KvserveError, ServerUnavailable
from tests.payload import payload_for, small_descriptor

address, cases, plane, fork_s_min, fork_s_max = sys.argv[1:]
stored, other = small_descriptor(), small_descriptor(first_token=5000)
payload = payload_for(stored)
client = Client(address, plane=plane)
kept = []  # what an engine may still hold when it forks
gc.disable()  # else a collection by chance may do what the client has to do

def fetch(client):
    target = bytearray(len(payload))
    assert client.fetch(stored, target, timeout_s=10).wait().is_whole
    assert target == payload

def open_store():
    handle = client.store(other, payload)
    handle.store_layer(0)
    return handle

def down():
    client = Client("127.0.0.1:1", connect_timeout_s=0.2)
    try:
        client.lookup(stored)
    except ServerUnavailable as error:
        kept.append(error)
    return client

def deadline():
    try:
        client.fetch(stored, bytearray(len(payload)), timeout_s=0.0001).wait()
    except DeadlineExceeded as error:
        kept.append(error)

def unfinished_store():
    with client.store(other, payload) as handle:
        handle.store_layer(0)

def kept_unfinished_store():
    with client.store(other, payload) as handle:
        kept.append(handle)
        handle.store_layer(0)

def cancelled_store():
    handle = open_store()
    handle.cancel()
    kept.append(handle)

def layers_posted_to_a_cancelled_store():
    handle = client.store(other, payload)
    posted = [handle.post_layer(layer_index) for layer_index in range(3)]
    handle.cancel()
    kept.extend(each.exception() for each in posted)
    try:
        handle.finish()
    except KvserveError as error:
        kept.append(error)

def store_open_at_the_fork():
    kept.append(open_store())

def two_stores_open_at_the_fork():
    global client
    kept.append(open_store())
    kept.append(client)
    client = Client(address, plane=plane)
    kept.append(open_store())

def another_server_is_down():
    kept.append(down())

def another_server_is_down_and_its_client_closed():
    client = down()
    client.close()
    kept.append(client)

def closed_just_before():
    client.close()

def dropped_just_before():
    global client
    kept.append(client.fetch(stored, bytearray(len(payload))))
    client = Client(address, plane=plane)

def cycle():
    global client
    client._client.itself = client._client._channel._channel
    client._client.itself.itself = client._client
    client._client.itself.channel = client._client.itself._channel
    client.close()
    client = Client(address, plane=plane)

def loop_closed_with_an_open_client():
    async def main():
        client = AsyncClient(address, plane=plane)
        kept.append(client)
        await client.lookup(stored)
        kept.append(client.store(other, payload))
        await kept[-1].store_layer(0)
    asyncio.run(main())

with client.store(stored, payload) as handle:
    for layer_index in stored.layer_order:
        handle.store_layer(layer_index)
    assert handle.finish().is_whole
fetch(client)
for case in cases.split():
    globals()[case]()
    started = time.monotonic()
    pid = os.fork()
    took_s = time.monotonic() - started
    if pid == 0:
        fetch(client)
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (case, status) == (case, 7)
    assert float(fork_s_min) <= took_s < float(fork_s_max), (case, took_s)
    fetch(client)
print("good")
"""


_CALLS_BESIDE = """
import os, sys, threading
from kvclient import Client, KvserveError
from tests.payload import payload_for, small_descriptor

address, plane = sys.argv[1:]
descriptor = small_descriptor()
payload = payload_for(descriptor)
client = Client(address, plane=plane)
with client.store(descriptor, payload) as handle:
    for layer_index in descriptor.layer_order:
        handle.store_layer(layer_index)
    assert handle.finish().is_whole
calls, errors, is_over = [0], [], threading.Event()

def call_again_and_again():
    while not is_over.is_set():
        try:
            assert client.fetch(descriptor, bytearray(len(payload)), timeout_s=10).wait().is_whole
            calls[0] += 1
        except KvserveError as error:  # one that the fork met may be cancelled
            errors.append(error)

threads = [threading.Thread(target=call_again_and_again, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for number in range(10):
    before = calls[0]
    pid = os.fork()
    if pid == 0:
        assert client.fetch(descriptor, bytearray(len(payload)), timeout_s=10).wait().is_whole
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, number
    while calls[0] == before:
        assert all(thread.is_alive() for thread in threads)
is_over.set()
for thread in threads:
    thread.join(10)
assert len(errors) <= 4 * 10, errors
print("good")
"""


def run_script(script: str, *arguments: str) -> None:
    """In a process of its own, as an engine's worker is; pytest's has servers in it."""
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "good\n"), ended.stderr


@pytest.mark.parametrize("when", ["unused", "idle", "busy"])
def test_a_client_works_in_a_forked_child_and_in_its_parent(
    process: ServerProcess, when: str, plane: str
) -> None:
    run_script(_FORKING, process.address, when, plane)


def test_a_fork_that_cannot_be_made_safe_is_an_error_in_the_child(process: ServerProcess) -> None:
    run_script(_FORKING_ON_THE_LOOP, process.address)


def test_a_fork_is_quick_and_both_sides_work_after(process: ServerProcess, plane: str) -> None:
    """Whatever a caller has had of the client and still keeps, gRPC can end."""
    cases = (
        "deadline",
        "unfinished_store",
        "kept_unfinished_store",
        "cancelled_store",
        "layers_posted_to_a_cancelled_store",
        "another_server_is_down",
        "another_server_is_down_and_its_client_closed",
        "closed_just_before",
        "dropped_just_before",
        "loop_closed_with_an_open_client",
    )
    run_script(_AFTER, process.address, " ".join(cases), plane, "0", "1.5")


@pytest.mark.parametrize(
    ("case", "plane"),
    [("store_open_at_the_fork", "grpc"), ("two_stores_open_at_the_fork", "tcp")],
)
def test_a_store_open_at_a_fork_is_cancelled_after_5_s(
    process: ServerProcess, case: str, plane: str
) -> None:
    run_script(_AFTER, process.address, case, plane, "5", "6.5")


def test_a_cycle_that_holds_grpc_is_collected_before_a_fork(process: ServerProcess) -> None:
    run_script(_AFTER, process.address, "cycle", "auto", "0.4", "2")


def test_a_fork_while_other_threads_make_calls(process: ServerProcess, plane: str) -> None:
    """New connections wait until the fork is over; both sides work then."""
    run_script(_CALLS_BESIDE, process.address, plane)
