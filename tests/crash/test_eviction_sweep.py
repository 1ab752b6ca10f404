"""The n-th file call fails, for every n, over rounds of eviction and over leases.

Afterwards chunks are whole or gone, what is leased is there, nothing is told to be gone that is
there, usage agrees with the tree once it is counted, and the next round works.
"""

from contextlib import suppress
from pathlib import Path

import pytest

from kvserve.errors import StorageError
from kvserve.model import ChunkStatus
from kvserve.policy.quota import Amount, Pressure
from kvserve.store.evict import EvictionResult
from kvserve.store.journal import RecordKind, read_all_blocking
from kvserve.testing.stepped_fs import SteppedFileSystem
from tests.contract.eviction_world import EvictingServer
from tests.contract.test_eviction import count_tree
from tests.descriptors import open_files

CHUNKS = 6
LEASED, PINNED = {0, 1}, 2


class Scene:
    """Six chunks: two leased by another server, one pinned; a server that is to evict four."""

    def __init__(self, root: Path) -> None:
        self.evicting = EvictingServer(root, "aB3", chunks=CHUNKS)
        self.leasing = EvictingServer(root, "bC4", chunks=CHUNKS)
        self.evicting.put()
        self.evicting.used(5, 5000)
        # Files that are appended to, and picks that others have read.
        self.round(Pressure(None, Amount(0, 1)))
        self.evicting.put(5)
        assert self.leasing.lease(among=LEASED) == LEASED
        store = self.evicting.tree.store
        store.pin_blocking(self.evicting.where, PINNED, is_pinned=True)
        chunk = store.open_blocking(self.evicting.where, 4)  # idle, but open
        store.open_chunks.release(chunk)  # type: ignore[arg-type]

    def round(self, pressure: Pressure) -> EvictionResult:
        result = EvictionResult()
        for found in self.evicting.tree.evictor.relieve_blocking(pressure):
            result = found
        return result

    def check(self) -> None:
        there = self.evicting.there()
        assert there >= LEASED | {PINNED}
        for index in self.evicting.indexes:
            status = self.leasing.tree.store.status_blocking(self.leasing.where, index).status
            assert (status is ChunkStatus.HIT) == (index in there), "whole or gone"
        path = f"{self.evicting.tree.store.root}/.evicted/aB3"
        told = {it.key: it.kind for it in read_all_blocking(self.evicting.fs, path)}
        for index in there - {5}:  # the last was evicted and stored again before
            kind = told.get(self.evicting.where.known_key(index))
            assert kind is not RecordKind.GONE, f"chunk {index} is told to be gone"
        assert self.evicting.picked() == set(), "its own server knows how each pick ended"

    def close(self) -> None:
        self.evicting.close()
        self.leasing.close()


def fail_at(fs: SteppedFileSystem, number: int) -> None:
    fs.fails_at = len(fs.calls) + number


def test_every_call_of_a_round_fails_once(tmp_path: Path) -> None:
    before = open_files()
    for number in range(1, 500):
        scene = Scene(tmp_path / str(number))
        fail_at(scene.evicting.fs, number)
        with suppress(StorageError):
            scene.round(Pressure(None, Amount(0, 4)))
        has_failed = scene.evicting.fs.has_failed
        scene.evicting.fs.fails_at = 0
        scene.check()
        usage = scene.evicting.tree.ledger.usage()
        assert usage == count_tree(scene.evicting), f"call {number}: usage drifted"
        # A file that refused is left alone for a while.
        scene.evicting.tree.evictor._stubborn.clear()
        scene.round(Pressure(None, Amount(0, 4)))
        assert scene.evicting.there() == LEASED | {PINNED}, f"call {number}: next round"
        scene.check()
        scene.close()
        if not has_failed:
            assert number > 25, "the sweep covers a whole round"
            assert open_files() == before, "descriptors leaked"
            return
    raise AssertionError("the sweep did not end")


@pytest.mark.parametrize("is_first", [True, False], ids=["first of its server", "later"])
def test_every_call_of_a_lease_fails_once(tmp_path: Path, is_first: bool) -> None:
    """What was promised before holds, and what is promised after the failure, too."""
    for number in range(1, 100):
        root = tmp_path / str(number)
        leasing, evicting = EvictingServer(root, "aB3"), EvictingServer(root, "bC4")
        leasing.put()
        # By request: a lease that is granted anew replaces what the request held.
        leases: dict[str, set[int]] = {}
        if not is_first:
            leases["before"] = leasing.lease("before", among=[0])
            # One request of two ranks: the failure of one lease is not that of the other.
            shard = f"{leasing.where.shard}2"
            owner = ("default", "r")
            leasing.tree.exchange.grant_blocking(owner, shard, [4711], 60.0)
            leases["r"] = leasing.lease("r", among=[2])
        fail_at(leasing.fs, number)
        with suppress(StorageError):
            leases["r"] = leasing.lease("r", among=[1])
        with suppress(StorageError):
            leasing.tree.exchange.tell_blocking()
        has_failed = leasing.fs.has_failed
        leasing.fs.fails_at = 0
        if not is_first:
            assert leasing.tree.exchange.leases.holds(4711), f"call {number}"
        leases["after"] = leasing.lease("after", among=[0])
        promised = set[int]().union(*leases.values())
        evicting.evict()
        assert promised <= leasing.there(), f"call {number}: promised {promised}"
        leasing.tree.exchange.tell_blocking()
        evicting.evict()
        assert promised <= leasing.there(), f"call {number}, told again: promised {promised}"
        leasing.close()
        evicting.close()
        if not has_failed:
            assert number > 5, "the sweep covers a whole lease"
            return
    raise AssertionError("the sweep did not end")
