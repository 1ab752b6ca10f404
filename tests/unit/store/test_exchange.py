"""What servers tell one another: leases that others see, until they hear otherwise."""

import time
from pathlib import Path

import pytest

from kvserve.errors import Overloaded, StorageUnavailable
from kvserve.store.departures import Departures
from kvserve.store.exchange import Exchange
from kvserve.store.known import KnownChunks
from kvserve.store.leases import Leases
from kvserve.testing.faulty_fs import FaultyFileSystem

R, S = ("t", "r"), ("t", "s")


def exchange(root: Path, tag: str, fs: FaultyFileSystem | None = None) -> Exchange:
    return Exchange(
        fs or FaultyFileSystem(),
        str(root),
        tag,
        leases=Leases(chunks_max=10, clock=lambda: 100.0),
        departures=Departures(remembered_max=10, clock=lambda: 100.0),
        known=KnownChunks(chunks_max=10, ttl_s=5.0, clock=time.monotonic),
    )


def test_leases_of_others_hold_a_little_longer_and_own_ones_are_not_among_them(
    tmp_path: Path,
) -> None:
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1, 2], 5.0)
    assert one.leased_by_others_blocking(100.0) == set()
    assert other.leased_by_others_blocking(100.0) == {1, 2}
    assert other.leased_by_others_blocking(106.9) == {1, 2}, "their clocks may differ"
    assert other.leased_by_others_blocking(107.0) == set()
    one.close_blocking()


def test_what_was_narrowed_or_released_is_told(tmp_path: Path) -> None:
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1, 2], 5.0)
    one.grant_blocking(S, "d", [3], 5.0)
    one.narrow(R, "d", [2])
    one.tell_blocking()
    assert other.leased_by_others_blocking(100.0) == {2, 3}
    assert one.release(R) == 1
    assert other.leased_by_others_blocking(100.0) == {2, 3}
    one.tell_blocking()
    assert other.leased_by_others_blocking(100.0) == {3}
    inode = (tmp_path / ".leases/aB3").stat().st_ino
    one.tell_blocking()
    assert (tmp_path / ".leases/aB3").stat().st_ino == inode, "nothing new"
    one.close_blocking()


def test_a_lease_is_released_at_any_server(tmp_path: Path) -> None:
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1, 2], 5.0)
    one.grant_blocking(S, "d", [2, 3], 5.0)
    assert other.release(R) == 0, "how many it had granted itself"
    assert one.leases.chunks == 4
    other.tell_blocking()
    one.tell_blocking()
    assert one.leases.records() == [(2, 105.0), (3, 105.0)]
    assert other.leased_by_others_blocking(100.0) == {2, 3}, "told at once"
    one.close_blocking()
    other.close_blocking()


def test_what_was_granted_after_the_release_stays(tmp_path: Path) -> None:
    """Also for a server that reads of the release only then, or again from the start."""
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1], 5.0)
    other.leases.clock = lambda: 101.0
    other.release(R)
    other.tell_blocking()
    one.leases.clock = lambda: 101.5
    one.grant_blocking(R, "d", [1], 5.0)
    one.tell_blocking()
    assert one.leases.records() == [(1, 106.5)]


def test_who_is_alone_writes_no_releases(tmp_path: Path) -> None:
    one = exchange(tmp_path, "aB3")
    one.grant_blocking(R, "d", [1], 5.0)
    assert one.release(R) == 1
    one.tell_blocking()
    assert [path.name for path in (tmp_path / ".leases").iterdir()] == ["aB3"]


def test_releases_that_could_not_be_told_are_told_the_next_time(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4", fs)
    one.grant_blocking(R, "d", [1], 5.0)
    other.release(R)
    fs.fail("released", ["rename"])
    with pytest.raises(StorageUnavailable):
        other.tell_blocking()
    fs.heal()
    other.tell_blocking()
    one.tell_blocking()
    assert one.leases.chunks == 0


def test_what_could_not_be_told_is_told_the_next_time(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    one, other = exchange(tmp_path, "aB3", fs), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1], 5.0)
    one.release(R)
    fs.fails_at = len(fs.calls) + 2
    with pytest.raises(StorageUnavailable):
        one.tell_blocking()
    assert other.leased_by_others_blocking(100.0) == {1}
    one.tell_blocking()
    assert other.leased_by_others_blocking(100.0) == set()
    one.close_blocking()


def test_a_refused_grant_leaves_what_was_held(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    one, other = exchange(tmp_path, "aB3", fs), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1], 5.0)
    one.grant_blocking(R, "e", [2], 5.0)
    with pytest.raises(Overloaded):
        one.grant_blocking(R, "d", list(range(10, 20)), 5.0)
    fs.fails_at = len(fs.calls) + 1
    with pytest.raises(StorageUnavailable):
        one.grant_blocking(R, "d", [3, 4], 5.0)
    assert sorted(key for key, _ in one.leases.records()) == [1, 2]
    one.tell_blocking()
    assert other.leased_by_others_blocking(100.0) == {1, 2}
    one.close_blocking()


def test_departures_of_others_are_read_once_and_void_what_was_known(tmp_path: Path) -> None:
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    other._known.add(1, other._known.epoch)
    other._known.add(2, other._known.epoch)
    one.announce_picks_blocking([1], 100.0)
    assert one.departures.is_leaving(1), "this server first"
    other.read_departures_blocking()
    assert other.departures.is_leaving(1)
    assert len(other._known) == 1
    # Read again from the start, the pick would be open again.
    other.departures.apply("aB3", [])
    epoch = other._known.epoch
    other.read_departures_blocking()
    assert other._known.epoch == epoch
    one.close_blocking()
    other.close_blocking()


def test_what_a_killed_server_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    one = exchange(tmp_path, "aB3")
    one.grant_blocking(R, "d", [1], 60.0)
    left = [tmp_path / ".leases" / name for name in ("zZ9.new", "aB3.new", "yY8.new")]
    for path in left:
        path.write_bytes(b"half")
    one.forget_dead_blocking(lambda tag: tag == "yY8", 0.0)
    assert [path.exists() for path in left] == [False, True, True]


def test_a_lease_without_end_and_odd_files_hold_nothing(tmp_path: Path) -> None:
    """Of a host whose clock was ahead, or of whatever lies there."""
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    for expires_in_s in (1e9, float("inf")):
        one.leases.grant(R, "d", [1], expires_in_s)
        one._lease_file.replace(one._lease_records())
        assert other.leased_by_others_blocking(100.0) == set()
    (tmp_path / ".leases" / "zZ9").mkdir()
    assert other.leased_by_others_blocking(100.0) == set()
    other.forget_dead_blocking(lambda tag: False, 100.0)
    assert not (tmp_path / ".leases" / "aB3").exists()


def test_picks_and_leases_of_a_server_whose_files_were_removed_are_seen(tmp_path: Path) -> None:
    """Others took it for dead, for it was paused or its mount hung; it goes on all the same."""
    one, other = exchange(tmp_path, "aB3"), exchange(tmp_path, "bC4")
    one.grant_blocking(R, "d", [1], 60.0)
    one.announce_picks_blocking([5], 100.0)
    other.read_departures_blocking()
    for place in (".leases", ".evicted"):
        (tmp_path / place / "aB3").unlink()
    one.announce_picks_blocking([6], 100.0)
    other.read_departures_blocking()
    assert other.departures.is_leaving(6)
    one.grant_blocking(R, "e", [2], 60.0)
    assert other.leased_by_others_blocking(100.0) == {1, 2}
    (tmp_path / ".leases" / "aB3").unlink()
    one.tell_blocking()
    assert other.leased_by_others_blocking(100.0) == {1, 2}, "also where nothing is granted anew"
    one.close_blocking()
    other.close_blocking()
