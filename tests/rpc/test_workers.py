"""`kvserve serve --workers 2`: real processes behind one address, killed and stopped."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvclient import Client, ServerUnavailable
from kvserve.config import ServerConfig, load_config
from kvserve.errors import InvalidRequest
from kvserve.rpc.workers import held_port_blocking, worker_config
from kvserve.testing.server_process import ServerProcess
from tests.payload import payload_for, small_descriptor

SETTINGS = ("server.workers=2", "server.drain_timeout_s=5")
CLIENTS_MAX = 64
"""The kernel spreads connections by chance: more would be all on one worker once in 2^63 runs."""


@pytest.fixture
def process(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(root, settings=SETTINGS) as process:
        yield process


@pytest.fixture
def two_clients(process: ServerProcess) -> Iterator[list[Client]]:
    """One of each worker."""
    with ExitStack() as stack:
        yield one_of_each(stack, process.address)


def one_of_each(stack: ExitStack, address: str, plane: str = "auto") -> list[Client]:
    found: dict[str, Client] = {}
    for _ in range(CLIENTS_MAX):
        client = stack.enter_context(Client(address, timeout_s=20, plane=plane))
        # Each worker has a port for data of its own.
        found.setdefault(client.server_info().data_address, client)
        if len(found) == 2:
            return list(found.values())
    raise AssertionError(f"{CLIENTS_MAX} connections are all with {list(found)}")


def until(is_true: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def leased_chunks(process: ServerProcess) -> float:
    """By both workers."""
    addresses = re.findall(r"metrics on (http://\S+)", process.log())
    assert len(addresses) == 2
    texts = [urllib.request.urlopen(it, timeout=5).read().decode() for it in addresses]
    found = [re.search(r"^kvserve_leased_chunks (\S+)$", text, re.M) for text in texts]
    return sum(float(it[1]) for it in found if it)


def put(client: Client, number: int) -> None:
    descriptor = small_descriptor(first_token=1000 * number)
    with client.store(descriptor, payload_for(descriptor, number)) as handle:
        for layer_index in descriptor.layer_order:
            handle.store_layer(layer_index)
        assert handle.finish().is_whole


def is_fetched(client: Client, number: int) -> bool:
    descriptor = small_descriptor(first_token=1000 * number)
    target = bytearray(descriptor.payload_size_bytes)
    result = client.fetch(descriptor, target).wait()
    return result.is_whole and target == payload_for(descriptor, number)


def test_what_one_worker_stored_the_other_has_at_once(two_clients: list[Client]) -> None:
    for number in range(10):
        storing, other = two_clients[number % 2], two_clients[1 - number % 2]
        assert not any(other.lookup(small_descriptor(first_token=1000 * number)).hits)
        put(storing, number)
        assert is_fetched(other, number)


def test_a_pin_and_a_lease_of_one_worker_hold_at_the_other(two_clients: list[Client]) -> None:
    one, other = two_clients
    descriptor = small_descriptor(first_token=0)
    put(one, 0)
    assert one.lookup(descriptor, lease_owner="request", lease_ttl_s=60).leased_chunks == 8
    assert all(not status.is_miss for status in other.pin(descriptor))
    assert all(not status.is_miss for status in one.unpin(descriptor))


def test_a_lease_is_released_at_any_worker(root: Path) -> None:
    settings = (*SETTINGS, "capacity.exchange_interval_s=0.05", "server.metrics_listen=127.0.0.1:0")
    with ServerProcess(root, settings=settings) as process, ExitStack() as stack:
        one, other = one_of_each(stack, process.address)
        put(one, 0)
        lookup = one.lookup(small_descriptor(first_token=0), lease_owner="r", lease_ttl_s=600)
        assert lookup.leased_chunks == 8
        assert leased_chunks(process) == 8
        other.release("r")
        until(lambda: leased_chunks(process) == 0)


def test_a_killed_worker_is_started_again(process: ServerProcess, plane: str) -> None:
    """Its clients' transfers fail visibly; the same clients go on, with whichever worker."""
    before = process.serving_pids
    assert len(before) == 2
    with ExitStack() as stack:
        clients = one_of_each(stack, process.address, plane)
        put(clients[0], 0)
        stores = []
        for number, client in enumerate(clients, 1):
            descriptor = small_descriptor(first_token=1000 * number)
            stores.append(client.store(descriptor, payload_for(descriptor, number)))
            stores[-1].store_layer(0)
            stores[-1].wait_layer(0)
        os.kill(before[0], signal.SIGKILL)
        failed = 0
        for store in stores:
            try:
                for layer_index in range(1, 4):
                    store.store_layer(layer_index)
                assert store.finish().is_whole
            except ServerUnavailable:
                failed += 1
        assert failed == 1, "the other worker's goes on"
        assert all(is_fetched(client, 0) for client in clients)
        until(lambda: len(process.serving_pids) == 2)
        assert before[0] not in process.serving_pids
        assert before[1] in process.serving_pids
        until(lambda: f"worker 0 (pid {process.serving_pids[-1]}) answers" in process.log())
        one_of_each(stack, process.address)
    assert f"worker 0 (pid {before[0]}) ended with status -9" in process.log()


def test_sigterm_drains_all_workers(process: ServerProcess) -> None:
    pids = process.serving_pids
    with ExitStack() as stack:
        clients = one_of_each(stack, process.address)
        descriptors = [small_descriptor(first_token=1000 * number) for number in range(2)]
        handles = [
            client.store(descriptor, payload_for(descriptor))
            for client, descriptor in zip(clients, descriptors, strict=True)
        ]
        for handle in handles:
            handle.store_layer(0)
            handle.wait_layer(0)
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: process.log().count("draining") == 2)
        for handle in handles:
            for layer_index in range(1, 4):
                handle.store_layer(layer_index)
            assert handle.finish().is_whole
    assert process.wait() == 0
    assert all(map(is_gone, pids))
    assert list((process.root / ".servers").iterdir()) == [], "every claim was given up"


def test_sigterm_while_the_workers_start(root: Path) -> None:
    command = [sys.executable, "-m", "kvserve", "serve", "--root", str(root), "--workers", "2"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: bool(children.read_text().split()))
        pids = [int(pid) for pid in children.read_text().split()]
        process.terminate()
        _, error = process.communicate(timeout=20)
    assert process.returncode == 0, error
    assert all(map(is_gone, pids))


def test_no_worker_outlives_a_killed_parent(process: ServerProcess, root: Path) -> None:
    pids = process.serving_pids
    process.kill()
    until(lambda: all(map(is_gone, pids)), timeout_s=5)
    with ServerProcess(root, listen=process.address, settings=SETTINGS) as again:
        assert again.address == process.address
        with Client(again.address) as client:
            put(client, 0)


def test_workers_that_cannot_start_any_more_end_all(process: ServerProcess, root: Path) -> None:
    """The error is that of the worker; the living one is stopped."""
    pids = process.serving_pids
    shutil.rmtree(root)
    root.write_text("no directory")
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait() == 1
    assert all(map(is_gone, pids))
    last = process.log().rstrip().splitlines()[-1]
    assert last.startswith("kvserve: ServerFault: ")
    assert f"the root {root} cannot be used by uid" in last


def test_a_second_start_on_the_address_is_refused(process: ServerProcess, tmp_path: Path) -> None:
    """Although the workers share their port: it would be shared with servers of another tree."""
    for settings in (SETTINGS, ()):
        other = ServerProcess(tmp_path / "other", listen=process.address, settings=settings)
        with pytest.raises(ServerUnavailable, match=f"cannot listen on {process.address}"):
            other.start()


class TestOwnPorts:
    def settings(self, **server: object) -> ServerConfig:
        config = load_config(None, {"server": {"workers": 3, **server}})
        return worker_config(config, 2, "127.0.0.1:7000").server

    def test_set_ports_count_up(self) -> None:
        server = self.settings(data_listen="[::1]:7500", metrics_listen="127.0.0.1:9400")
        assert server.listen == "127.0.0.1:7000"
        assert server.data_listen == "[::1]:7502"
        assert server.metrics_listen == "127.0.0.1:9402"

    @pytest.mark.parametrize("data_listen", ["", "off", "127.0.0.1:0"])
    def test_others_stay(self, data_listen: str) -> None:
        server = self.settings(data_listen=data_listen)
        assert (server.data_listen, server.metrics_listen) == (data_listen, "")


class TestHeldPort:
    def test_it_is_not_given_to_others(self) -> None:
        with held_port_blocking("127.0.0.1:0") as address:
            port = int(address.rpartition(":")[2])
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))

    @pytest.mark.parametrize("listen", ["192.0.2.1:0", "no.such.host.invalid:0"])
    def test_no_address_of_this_host(self, listen: str) -> None:
        with pytest.raises(InvalidRequest, match="cannot listen on"), held_port_blocking(listen):
            pass
