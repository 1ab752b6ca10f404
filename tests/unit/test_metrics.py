"""Gauges of the tree: limits that are set, the steward, and no wait for a mount that hangs."""

import threading
import time
import urllib.request
from pathlib import Path

import pytest

import kvserve.metrics
from kvserve.errors import StorageUnavailable
from kvserve.metrics import Metrics, _AskedOfTheTree
from kvserve.policy.quota import Amount
from tests.trees import tree_on


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_limits_that_are_set(tmp_path: Path) -> None:
    tree = tree_on(
        tmp_path,
        capacity={"size_bytes_max": 1000, "tenant_size_bytes_max": 500},
        tenants={"gold": {"size_bytes_max": 900}},
    )
    tree.ledger.set_base({"a": Amount(5, 1)})
    metrics = Metrics(tree)
    assert value(metrics, "kvserve_cap_bytes") == 1000
    assert value(metrics, "kvserve_cap_chunks") is None, "no limit is not one of 0"
    assert value(metrics, "kvserve_ceiling_bytes", tenant="gold") == 900
    assert value(metrics, "kvserve_ceiling_bytes", tenant="a") == 500
    assert value(Metrics(tree_on(tmp_path)), "kvserve_cap_bytes") is None


def test_one_server_of_a_tree_is_its_steward(tmp_path: Path) -> None:
    first, second = tree_on(tmp_path), tree_on(tmp_path)
    for tree in (first, second):
        tree.owner.claim_blocking()
    stewards = [value(Metrics(tree), "kvserve_is_steward") for tree in (first, second)]
    assert sorted(it for it in stewards if it is not None) == [0, 1]
    max((first, second), key=lambda it: it.owner.tag).owner.release_blocking()
    left = min((first, second), key=lambda it: it.owner.tag)
    assert value(Metrics(left), "kvserve_is_steward") == 1


def test_an_answer_that_does_not_come_is_none_and_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvserve.metrics, "_ANSWER_WAIT_S", 0.02)
    calls, comes_back = [0], threading.Event()

    def ask_blocking() -> bool:
        calls[0] += 1
        if calls[0] == 1:
            assert comes_back.wait(10)
        elif calls[0] == 2:
            raise StorageUnavailable("gone")
        return True

    asked = _AskedOfTheTree(ask_blocking)
    assert [asked.answer_blocking() for _ in range(3)] == [None] * 3
    assert calls == [1], "no thread for each scrape"
    comes_back.set()
    deadline = time.monotonic() + 10
    while asked.answer_blocking() is None:
        assert time.monotonic() < deadline
    assert calls[0] <= 3


def test_the_page_has_no_times_of_creation(tmp_path: Path) -> None:
    metrics = Metrics(tree_on(tmp_path))
    address = metrics.listen_blocking("127.0.0.1:0")
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
            text = page.read().decode()
    finally:
        metrics.close_blocking()
    assert "kvserve_evicted_chunks_total 0.0" in text
    assert "_created" not in text
