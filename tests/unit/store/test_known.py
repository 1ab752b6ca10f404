"""Lookups without system calls: what is known, for how long, in how much memory."""

import sys

import pytest

from kvserve.store.known import KnownChunks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def known(clock: Clock, chunks_max: int = 100) -> KnownChunks:
    return KnownChunks(chunks_max=chunks_max, ttl_s=5.0, clock=clock)


def test_an_entry_is_trusted_for_its_time_and_no_longer(clock: Clock) -> None:
    chunks = known(clock)
    chunks.add(1, chunks.epoch)
    clock.now = 5.0
    chunks.refresh()
    assert chunks.has(1)
    clock.now = 5.1
    chunks.refresh()
    assert not chunks.has(1)
    chunks.add(1, chunks.epoch)
    assert chunks.has(1), "seen again"


def test_deleted_is_unknown_at_once(clock: Clock) -> None:
    chunks = known(clock)
    chunks.add(1, chunks.epoch)
    chunks.discard(1)
    chunks.discard(1)
    assert not chunks.has(1)


def test_the_oldest_go_first(clock: Clock) -> None:
    chunks = known(clock, chunks_max=3)
    for key in (1, 2, 3):
        chunks.add(key, chunks.epoch)
    chunks.add(1, chunks.epoch)  # seen again: younger than 2
    chunks.add(4, chunks.epoch)
    assert [chunks.has(key) for key in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(chunks) == 3


def test_none_are_kept_if_none_may_be(clock: Clock) -> None:
    chunks = known(clock, chunks_max=0)
    chunks.add(1, chunks.epoch)
    assert not chunks.has(1)


def test_memory_stays_under_200_bytes_a_chunk(clock: Clock) -> None:
    count = 100_000
    chunks = known(clock, chunks_max=count)
    keys = [(key * 0x9E3779B97F4A7C15) & (2**64 - 1) for key in range(count)]
    for key in keys:
        chunks.add(key, chunks.epoch)
    size = sys.getsizeof(chunks._seen_at) + sum(map(sys.getsizeof, keys))
    assert size / count < 200


def test_what_was_seen_before_a_deletion_is_not_believed_after_it(clock: Clock) -> None:
    """A lookup stats the file, a delete removes it, then the lookup reports what it saw."""
    chunks = known(clock)
    epoch = chunks.epoch
    chunks.discard(1)
    chunks.add(1, epoch)
    assert not chunks.has(1)


class TestAbsence:
    def absent(self, clock: Clock, chunks_max: int = 100) -> KnownChunks:
        return KnownChunks(chunks_max=chunks_max, ttl_s=5.0, absent_ttl_s=1.0, clock=clock)

    def test_a_missed_chunk_is_trusted_to_be_absent_for_its_own_time(self, clock: Clock) -> None:
        chunks = self.absent(clock)
        chunks.add_absent(1, chunks.epoch)
        clock.now = 1.0
        chunks.refresh()
        assert chunks.lacks(1)
        assert not chunks.has(1)
        clock.now = 1.1
        chunks.refresh()
        assert not chunks.lacks(1)

    def test_off_unless_it_is_set(self, clock: Clock) -> None:
        """ "Stored" then means readable through every server at once."""
        chunks = known(clock)
        chunks.add_absent(1, chunks.epoch)
        assert not chunks.lacks(1)
        assert chunks._missed_at == {}

    def test_stored_here_is_not_absent_any_more(self, clock: Clock) -> None:
        chunks = self.absent(clock)
        chunks.add_absent(1, chunks.epoch)
        chunks.appeared(1)
        assert not chunks.lacks(1)

    def test_what_was_missed_before_a_store_is_not_believed_after_it(self, clock: Clock) -> None:
        """A lookup misses the file, a store publishes it, then the lookup reports its miss."""
        chunks = self.absent(clock)
        epoch = chunks.epoch
        chunks.appeared(1)
        chunks.add_absent(1, epoch)
        assert not chunks.lacks(1)

    def test_deletions_hinder_no_absence_and_stores_no_presence(self, clock: Clock) -> None:
        """Else lookups beside many of the other would never be remembered."""
        chunks = self.absent(clock)
        epoch = chunks.epoch
        chunks.discard(7)
        chunks.add_absent(1, epoch)
        assert chunks.lacks(1)
        epoch = chunks.epoch
        chunks.appeared(8)
        chunks.add(2, epoch)
        assert chunks.has(2)

    def test_the_oldest_go_first(self, clock: Clock) -> None:
        chunks = self.absent(clock, chunks_max=2)
        for key in (1, 2, 3):
            chunks.add_absent(key, chunks.epoch)
        assert [chunks.lacks(key) for key in (1, 2, 3)] == [False, True, True]

    def test_nothing_is_known_after_a_clear_not_even_what_was_seen_before(
        self, clock: Clock
    ) -> None:
        chunks = self.absent(clock)
        epoch = chunks.epoch
        chunks.add(1, epoch)
        chunks.add_absent(2, epoch)
        chunks.clear()
        chunks.add(3, epoch)
        chunks.add_absent(4, epoch)
        assert not any(chunks.has(key) or chunks.lacks(key) for key in (1, 2, 3, 4))
