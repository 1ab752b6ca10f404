"""Eviction on a real tree: what goes, what stays, where it stops, and that usage stays true."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.model import ChunkStatus, Verdict
from kvserve.policy.quota import Amount, Pressure, total_of
from kvserve.store import evict as evict_module
from kvserve.store.counted_size import BELIEVED_SIZE_BYTES_MAX
from kvserve.store.departures import LEAVING_S_MAX
from kvserve.store.evict import EvictionResult
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.paths import chunk_path
from kvserve.store.sweep import sweep_blocking
from kvserve.store.tree_count import TreeCount
from kvserve.testing.stepped_fs import SteppedFileSystem
from tests.contract.eviction_world import EvictingServer
from tests.unit.samples import hash_of

Start = Callable[..., EvictingServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("aB3", chunks=9, capacity={...})`: a server on the one tree."""
    started: list[EvictingServer] = []

    def start_server(tag: str = "aB3", **settings: object) -> EvictingServer:
        started.append(EvictingServer(tmp_path / "kv", tag, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start_server
    for server in started:
        server.close()


def relieve(server: EvictingServer, *, files: int = 0, tenant: str | None = None) -> EvictionResult:
    """One round; `files`: so many are to go. 0: what the limits ask for."""
    pressures = [Pressure(tenant, Amount(0, files))] if files else server.tree.ledger.pressures()
    result = EvictionResult()
    for pressure in pressures:
        for found in server.tree.evictor.relieve_blocking(pressure):
            result = found
    return result


def count_tree(server: EvictingServer) -> dict[str, Amount]:
    """Usage as a count of the tree finds it; corrects the server's."""
    tree = server.tree
    tree.owner.claim_blocking()
    count = TreeCount(server.fs, tree.ledger)
    list(sweep_blocking(server.fs, tree.store.root, tree.owner, count))
    tree.owner.release_blocking()
    return count.finish()[0]


def check_usage(server: EvictingServer) -> None:
    before = server.tree.ledger.usage()
    assert before == count_tree(server), "usage drifted from the tree"


def status(server: EvictingServer, index: int) -> ChunkStatus:
    return server.tree.store.status_blocking(server.where, index).status


def opened(server: EvictingServer, index: int) -> OpenChunk | Verdict:
    return server.tree.store.open_blocking(server.where, index)


class TestWhatGoes:
    def test_least_recently_used_first(self, start: Start) -> None:
        server = start(chunks=8)
        server.put()
        ages = [50, 10, 70, 20, 80, 30, 60, 40]
        for index, age in enumerate(ages):
            server.used(index, age)
        assert relieve(server, files=3).evicted.files == 3
        assert server.there() == {index for index, age in enumerate(ages) if age < 60}
        check_usage(server)

    def test_the_tail_of_a_prefix_before_its_head(self, start: Start) -> None:
        server = start(chunks=6)
        server.put()
        for index in server.indexes:
            server.used(index, 1000)
        chunks = [opened(server, index) for index in server.indexes]
        found = [it for it in chunks if isinstance(it, OpenChunk)]
        server.tree.recency.fetched(found, time.time())
        server.tree.store.open_chunks.release_all(found)
        server.tree.recency.flush_blocking()
        for left in (4, 2):
            relieve(server, files=2)
            assert server.there() == set(range(left))

    def test_used_after_it_was_seen_stays(self, start: Start) -> None:
        server = start()
        server.put()
        for index in server.indexes:
            server.used(index, 1000)
        candidates = server.candidates()
        server.used(1, 0)
        server.evict(candidates)
        assert server.there() == {1}
        check_usage(server)

    def test_the_oldest_of_a_large_tree_by_samples(self, start: Start) -> None:
        server = start()
        count, taken = 3000, 300
        shard = f"{server.tree.store.root}/{server.where.shard}"
        now = time.time()
        ages = Random(1).sample(range(count), count)
        paths = [chunk_path(shard, hash_of(number)) for number in range(count)]
        for path, age in zip(paths, ages, strict=True):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).touch()
            os.utime(path, (now - 1000 - age, now - 1000 - age))
        server.tree.ledger.set_base({"default": Amount(count, count)})
        assert relieve(server, files=taken).evicted.files == taken
        evicted = [age for path, age in zip(paths, ages, strict=True) if not os.path.exists(path)]
        assert len(evicted) == taken
        # By chance the mean would be 0.5 +- 0.02; the oldest tenth alone is 0.05.
        rank = 1 - sum(evicted) / taken / count
        assert rank < 0.25, f"the mean rank of what went is {rank:.2f}"


class TestWhatStays:
    def test_leased_by_this_or_another_server(self, start: Start) -> None:
        server, other = start("aB3", chunks=4), start("bC4", chunks=4)
        server.put()
        assert server.lease(among=[0]) == {0}
        assert other.lease(among=[1]) == {1}
        result = relieve(server, files=4)
        assert server.there() == {0, 1}
        assert (result.evicted.files, result.held, result.failed) == (2, 2, 0)
        server.release()
        other.release()
        other.tree.exchange.tell_blocking()
        relieve(server, files=4)
        assert server.there() == set()
        check_usage(server)

    def test_a_lease_ends_by_itself(self, start: Start) -> None:
        server, other = start("aB3"), start("bC4")
        server.put()
        for by in (server, other):
            by.tree.exchange.leases.clock = lambda: time.time() - 100
            by.lease(ttl_s=90.0)
            by.tree.exchange.leases.clock = time.time
        server.tree.exchange.tell_blocking()
        assert relieve(server, files=3).evicted.files == 3

    def test_pinned_also_after_it_was_stored_anew(self, start: Start) -> None:
        server = start()
        server.put()
        pin = server.tree.store.pin_blocking
        assert pin(server.where, 1, is_pinned=True) is ChunkStatus.PINNED
        server.put(1)
        for index in server.indexes:
            server.used(index, 1000)
        relieve(server, files=3)
        assert server.there() == {1}
        check_usage(server)
        assert pin(server.where, 1, is_pinned=False) is ChunkStatus.UNPINNED
        assert pin(server.where, 0, is_pinned=True) is ChunkStatus.MISS_EVICTED
        relieve(server, files=3)
        assert server.there() == set()

    def test_pinned_between_the_look_and_the_deletion(self, start: Start) -> None:
        server = start()
        server.put()
        candidates = server.candidates()
        server.tree.store.pin_blocking(server.where, 2, is_pinned=True)
        server.evict(candidates)
        assert server.there() == {2}

    def test_being_read_here(self, start: Start) -> None:
        server = start()
        server.put()
        chunk = opened(server, 0)
        assert isinstance(chunk, OpenChunk)
        relieve(server, files=3)
        assert server.there() == {0}
        server.tree.store.open_chunks.release(chunk)
        relieve(server, files=3)
        assert server.there() == set()
        assert server.tree.store.open_chunks.taken == 0, "its space is free at once"

    def test_a_round_ends_when_everything_is_held(self, start: Start) -> None:
        server = start(chunks=5)
        server.put()
        server.lease()
        result = relieve(server, files=5)
        assert (result.evicted.files, result.held) == (0, 5)
        for index in server.indexes:
            server.tree.store.pin_blocking(server.where, index, is_pinned=True)
        assert relieve(server, files=5) == EvictionResult()

    def test_the_rest_of_a_batch_that_takes_too_long(self, start: Start) -> None:
        """Those who lease believe a pick for a while only: nothing may go after that."""
        server = start()
        server.put()
        evictor, late = server.tree.evictor, 0.0

        class Slow(SteppedFileSystem):
            def unlink(self, path: str) -> bool:
                nonlocal late
                late += LEAVING_S_MAX / 3
                return super().unlink(path)

        evictor._fs = Slow()
        evictor._clock = lambda: time.time() + late
        result = server.evict()
        assert (result.evicted.files, result.held) == (2, 1)
        assert len(server.there()) == 1


class TestFaults:
    def as_directory(self, server: EvictingServer, index: int) -> None:
        """A directory in the chunk's place: it cannot be deleted like a file."""
        path = server.where.path(index)
        os.unlink(path)
        os.mkdir(path)
        os.chmod(path, 0o640)  # else its x bit is a pin
        server.used(index, 5000)

    def test_one_that_cannot_be_deleted_is_told_skipped_and_left_alone_for_a_while(
        self, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = start(chunks=5)
        server.put()
        self.as_directory(server, 2)
        with caplog.at_level(logging.WARNING):
            result = relieve(server, files=3)
        assert (result.evicted.files, result.failed) == (3, 1)
        assert server.where.path(2) in caplog.text
        assert 2 in server.there()
        result = relieve(server, files=5)
        assert (result.evicted.files, result.failed) == (1, 0), "not tried again at once"
        now = time.time()
        server.tree.evictor._clock = lambda: now + evict_module._STUBBORN_S + 1
        assert relieve(server, files=1).failed == 1, "but later"

    def test_a_bad_directory_or_file_hinders_no_round(self, start: Start) -> None:
        """Also of a tree so small that all of it is looked at before anything goes."""

        class Bad(SteppedFileSystem):
            bad: tuple[str, ...] = ()

            def list_dir(self, path: str) -> list[str]:
                if path in self.bad:
                    raise StorageUnavailable(f"list {path}: EIO")
                return super().list_dir(path)

        fs = Bad()
        server = start(fs=fs, chunks=4)
        server.put()
        fs.bad = (os.path.dirname(server.where.path(0)),)
        result = relieve(server, files=4)
        assert (result.evicted.files, result.failed) == (3, 1)
        assert server.there() == {0}
        expired = EvictionResult()
        server.tree.evictor.expire_blocking(fs.bad[0], 0.0, expired)
        assert expired.failed == 1

    def test_a_tree_that_refuses_everything_ends_the_round(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = start(chunks=5)
        server.put()

        def refuse(path: str) -> list[str]:
            raise StorageUnavailable(f"list {path}: EIO")

        monkeypatch.setattr(evict_module, "_UNREADABLE_MAX", 3)
        monkeypatch.setattr(server.fs, "list_dir", refuse)
        with pytest.raises(StorageUnavailable):
            relieve(server, files=5)


class TestLimits:
    def test_from_the_high_watermark_down_to_the_low_one(self, start: Start) -> None:
        marks = {"files_max": 10, "high_watermark": 0.8, "low_watermark": 0.5}
        server = start(chunks=9, capacity=marks)
        server.put(*range(8))
        assert server.tree.ledger.pressures() == []
        server.put(8)
        assert relieve(server).evicted.files == 4
        assert server.tree.ledger.usage()["default"].files == 5
        assert server.tree.ledger.pressures() == []
        check_usage(server)

    def test_by_bytes(self, start: Start) -> None:
        size = start("xX9").where.geometry.file_size_bytes
        marks = {"size_bytes_max": 10 * size, "high_watermark": 0.8, "low_watermark": 0.5}
        server = start(chunks=9, capacity=marks)
        server.put()
        assert relieve(server).evicted == Amount(4 * size, 4)

    def test_a_tenant_over_its_ceiling_gives_its_own(self, tmp_path: Path, start: Start) -> None:
        capacity: dict[str, object] = {"high_watermark": 0.8, "low_watermark": 0.5}
        tenants: dict[str, object] = {"a": {"files_max": 4}}
        server = start("aB3", chunks=4, tenant="a", capacity=capacity, tenants=tenants)
        other = start("bC4", chunks=6, tenant="b")
        server.put()
        other.put()
        for index in other.indexes:
            other.used(index, 9000)
        server.tree.ledger.set_base({"b": other.tree.ledger.usage()["b"]})
        assert relieve(server).evicted.files == 2
        assert len(server.there()) == 2
        assert len(other.there()) == 6, "older, and not its turn"

    def test_a_floor_is_not_taken_for_others(self, start: Start) -> None:
        size = start("xX9").where.geometry.file_size_bytes
        tenants: dict[str, object] = {"a": {"size_bytes_floor": 3 * size}}
        server = start("aB3", chunks=4, tenant="a", tenants=tenants)
        other = start("bC4", chunks=4, tenant="b")
        server.put()
        other.put()
        for index in server.indexes:
            server.used(index, 9000)
        server.tree.ledger.set_base({"b": other.tree.ledger.usage()["b"]})
        result = relieve(server, files=8)
        assert result.evicted.files == 5
        assert len(server.there()) == 3
        assert other.there() == set()
        assert relieve(server, files=4, tenant="a").evicted.files == 3, "for itself it gives all"


class TestWhatOthersSee:
    def test_a_miss_says_evicted_and_what_is_stored_again_is_a_hit(self, start: Start) -> None:
        server, other = start("aB3"), start("bC4")
        server.put()
        for by in (server, other):  # reads the clock
            assert by.tree.store.unknown(by.where).keys() == {0, 1, 2}
        assert [status(by, 0) for by in (server, other)] == [ChunkStatus.HIT] * 2
        assert other.tree.store.unknown(other.where).keys() == {1, 2}
        relieve(server, files=3)
        assert status(server, 0) is ChunkStatus.MISS_EVICTED
        assert server.tree.store.unknown(server.where).keys() == {0, 1, 2}
        other.tree.exchange.read_departures_blocking()
        assert other.tree.store.unknown(other.where).keys() == {0, 1, 2}, "what it knew is void"
        assert status(other, 0) is ChunkStatus.MISS_EVICTED
        found = opened(other, 0)
        assert isinstance(found, Verdict)
        assert found.status is ChunkStatus.MISS_EVICTED
        server.put()
        for by in (server, other):
            assert status(by, 0) is ChunkStatus.HIT
            assert by.lease() == {0, 1, 2}
            chunk = opened(by, 0)
            assert isinstance(chunk, OpenChunk)
            by.tree.store.open_chunks.release(chunk)
        check_usage(server)

    @pytest.mark.parametrize("chunks", [1, 2, 3])
    def test_a_file_that_is_far_too_long_does_not_mislead(self, start: Start, chunks: int) -> None:
        """A hole of a terabyte: all the others would have to go to make room for it."""
        server = start("aB3", chunks=chunks)
        server.put()
        true = Amount(chunks * server.where.geometry.file_size_bytes, chunks)
        os.truncate(server.where.path(0), 1 << 40)
        assert total_of(count_tree(server)) == true
        check_usage(server)
        server.evict()
        assert server.there() == set()
        assert total_of(server.tree.ledger.usage()) == Amount()

    def test_a_file_that_is_far_too_long_and_no_chunk_counts_for_little(self, start: Start) -> None:
        server = start("aB3", chunks=1)
        server.put()
        Path(server.where.path(0)).write_bytes(b"#!/bin/sh")
        os.truncate(server.where.path(0), 1 << 40)
        assert total_of(count_tree(server)) == Amount(BELIEVED_SIZE_BYTES_MAX, 1)

    def test_files_of_the_dead_go_when_nothing_in_them_counts(self, start: Start) -> None:
        server, dead = start("aB3"), start("bC4")
        server.put()
        dead.lease(among=[0], ttl_s=50.0)
        dead.evict([])
        dead.close()
        root = Path(server.tree.store.root)
        now = time.time()
        server.tree.exchange.forget_dead_blocking(lambda _: True, now + 1000)
        assert (root / ".leases/bC4").exists()
        server.tree.exchange.forget_dead_blocking(lambda _: False, now + 60)
        assert (root / ".leases/bC4").exists(), "its lease still holds"
        server.tree.exchange.forget_dead_blocking(lambda _: False, now + 1000)
        assert not (root / ".leases/bC4").exists()
        assert not (root / ".evicted/bC4").exists()


class TestExpiry:
    def test_not_used_for_the_ttl(self, start: Start) -> None:
        server = start(chunks=4, capacity={"ttl_s": 100.0, "touch_interval_s": 10.0})
        server.put()
        server.used(1, 101)
        server.used(2, 90)
        server.used(3, 500)
        server.tree.store.pin_blocking(server.where, 3, is_pinned=True)
        hit, expired = ChunkStatus.HIT, ChunkStatus.MISS_EXPIRED
        assert [status(server, index) for index in server.indexes] == [hit, expired, hit, hit]
        found = opened(server, 1)
        assert isinstance(found, Verdict)
        assert found.status is expired
        pinned = opened(server, 3)
        assert isinstance(pinned, OpenChunk)
        server.tree.store.open_chunks.release(pinned)
        result = EvictionResult()
        for index in server.indexes:
            directory = os.path.dirname(server.where.path(index))
            server.tree.evictor.expire_blocking(directory, 100.0, result)
        assert result.evicted.files == 1
        assert server.there() == {0, 2, 3}
        check_usage(server)
