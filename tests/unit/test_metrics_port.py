"""The metrics' port: half-open connections hold few threads, not for long; scrapes get through."""

import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

import kvserve.metrics_port
from kvserve.metrics_port import MetricsPort


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("seven", "7.", registry=registry).set(7)
    return registry


@pytest.fixture
def port(registry: CollectorRegistry) -> Iterator[MetricsPort]:
    port = MetricsPort("127.0.0.1", 0, registry)
    yield port
    port.close_blocking()


def connected(port: MetricsPort, says: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port.server_port), timeout=10)
    connection.sendall(says)
    return connection


def page(port: MetricsPort) -> str:
    address = f"http://127.0.0.1:{port.server_port}/metrics"
    with urllib.request.urlopen(address, timeout=10) as found:
        text: bytes = found.read()
    return text.decode()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def test_200_half_open_connections_hold_few_threads_and_no_scrape(port: MetricsPort) -> None:
    before = threading.active_count()
    with ExitStack() as half_open:
        for number in range(200):
            half_open.enter_context(connected(port, b"GET /met" if number % 2 else b""))
        assert "seven 7.0" in page(port)
        assert threading.active_count() - before <= 16
    until(lambda: threading.active_count() == before)


def test_who_says_nothing_is_not_waited_for(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvserve.metrics_port, "_CONNECTION_S", 0.1)
    before = threading.active_count()
    with connected(port, b"GET /metrics HTTP/1.1\r\n") as connection:
        until(lambda: threading.active_count() == before + 1)
        began = time.monotonic()
        assert connection.recv(1) == b"", "the other side has ended it"
        assert time.monotonic() - began < 5
    until(lambda: threading.active_count() == before)


def test_when_all_answers_take_long_one_more_is_refused(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads are bounded also where ending a connection does not end its thread."""
    monkeypatch.setattr(kvserve.metrics_port, "_CONNECTIONS_MAX", 2)
    monkeypatch.setattr(kvserve.metrics_port, "_WAIT_S", 0.05)
    asked, go_on = threading.Semaphore(0), threading.Event()

    def seven() -> float:
        asked.release()
        assert go_on.wait(10)
        return 7

    Gauge("slow", "Slow.", registry=registry).set_function(seven)
    port = MetricsPort("127.0.0.1", 0, registry)
    caplog.set_level(logging.WARNING)
    try:
        with ExitStack() as slow:
            for _ in range(2):
                slow.enter_context(connected(port, b"GET /metrics HTTP/1.0\r\n\r\n"))
                assert asked.acquire(timeout=10)
            with connected(port) as refused:
                assert refused.recv(1) == b""
            assert "one more is refused" in caplog.text
        go_on.set()
        until(lambda: not port._open)
        assert "slow 7.0" in page(port)
    finally:
        go_on.set()
        port.close_blocking()


def test_closing_ends_what_is_open(registry: CollectorRegistry) -> None:
    port = MetricsPort("127.0.0.1", 0, registry)
    before = threading.active_count()
    with connected(port) as connection:
        until(lambda: threading.active_count() == before + 1)
        port.close_blocking()
        assert connection.recv(1) == b""
    until(lambda: threading.active_count() == before - 1)


def test_ipv6(registry: CollectorRegistry) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        port = MetricsPort("::1", 0, registry)
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        with urllib.request.urlopen(f"http://[::1]:{port.server_port}/", timeout=10) as found:
            assert b"seven 7.0" in found.read()
    finally:
        port.close_blocking()
