"""Files of dead servers go, files of live ones stay (T8); nothing else is touched."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.fs import Entry, PosixFileSystem
from kvserve.store.owners import Owner
from kvserve.store.paths import TempNames, new_tag, temp_owner
from kvserve.store.sweep import SweepResult, sweep_blocking

NAME = "00ff" * 8
NAMESPACE = "5e" * 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def owner(root: Path, seed: int, fs: PosixFileSystem | None = None) -> Owner:
    made = Owner(fs or PosixFileSystem(), str(root), Random(seed), lease_s=60.0)
    made.claim_blocking()
    return made


def sweep(root: Path, by: Owner, fs: PosixFileSystem | None = None) -> SweepResult:
    return list(sweep_blocking(fs or PosixFileSystem(), str(root), by))[-1]


def leave(root: Path, tag: str, directory: str = "t/ns/0of1/abc") -> Path:
    """A temporary file as a server with this tag makes it."""
    place = directory.replace("ns", NAMESPACE)
    path = Path(TempNames(tag, Random(9)).beside(f"{root}/{place}/{NAME}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return path


def silent_for(root: Path, tag: str, age_s: float) -> None:
    """Its server was last heard of `age_s` ago."""
    claim = root / ".servers" / tag
    then = claim.stat().st_mtime - age_s
    os.utime(claim, (then, then))


def test_a_dead_servers_files_go_and_a_live_ones_stay(root: Path) -> None:
    living, dead, sweeper = owner(root, 1), owner(root, 2), owner(root, 3)
    mine, theirs, orphan = (leave(root, one.tag) for one in (sweeper, living, dead))
    unclaimed = leave(root, "zZ9")
    silent_for(root, dead.tag, 61)
    assert sweep(root, sweeper).removed == 2
    assert [path.exists() for path in (mine, theirs, orphan, unclaimed)] == [
        True,
        True,
        False,
        False,
    ]
    assert sorted(os.listdir(root / ".servers")) == sorted([living.tag, sweeper.tag])


def test_a_server_that_was_heard_of_within_its_lease_is_alive(root: Path) -> None:
    slow, sweeper = owner(root, 1), owner(root, 2)
    path = leave(root, slow.tag)
    silent_for(root, slow.tag, 50)
    assert sweep(root, sweeper).removed == 0
    assert path.exists()
    silent_for(root, slow.tag, 100)
    slow.beat_blocking()
    assert sweep(root, sweeper).removed == 0, "it has shown itself again"


def test_only_temporary_names_are_touched(root: Path) -> None:
    sweeper = owner(root, 1)
    directory = leave(root, "zZ9").parent
    kept = [
        NAME,
        ".hidden",
        "plain.aB3xY7",
        ".config.backup",
        f".{NAME}.aB3xY7.more",
        f".{NAME}.aaaxY7",
        ".notes.aB3xY7",
    ]
    for name in kept:
        (directory / name).write_bytes(b"x")
    (root / f"t/{NAMESPACE}/identity").write_bytes(b"x")
    assert sweep(root, sweeper).removed == 1
    assert sorted(os.listdir(directory)) == sorted(kept)
    assert (root / f"t/{NAMESPACE}/identity").exists()


def test_all_places_where_temporary_files_can_be(root: Path) -> None:
    """The root's probe, a namespace's identity, chunks in their fans."""
    sweeper = owner(root, 1)
    left = [leave(root, "zZ9", place) for place in (".", "t/ns", "t/ns/0of1/abc", "u/ns/1of2/fff")]
    assert sweep(root, sweeper).removed == 4
    assert not any(path.exists() for path in left)


def test_one_file_that_cannot_be_removed_is_counted_and_the_others_go(root: Path) -> None:
    """E5: an undeletable file wedges nothing; its dead owner stays on record for the next round."""

    class Stubborn(PosixFileSystem):
        def unlink(self, path: str) -> bool:
            if "bbb" in path:
                raise StorageUnavailable("unlink: EIO")
            return super().unlink(path)

    sweeper, dead = owner(root, 1), owner(root, 2)
    silent_for(root, dead.tag, 100)
    for fan in ("aaa", "bbb", "ccc"):
        leave(root, dead.tag, f"t/ns/0of1/{fan}")
    result = sweep(root, sweeper, Stubborn())
    assert (result.removed, result.failed) == (2, 1)
    assert dead.tag in os.listdir(root / ".servers")
    assert sweep(root, sweeper).removed == 1
    assert dead.tag not in os.listdir(root / ".servers")


def test_tags_are_claimed_once(root: Path) -> None:
    assert len({owner(root, 5).tag for _ in range(20)}) == 20, "same seed, same first tries"


def test_no_free_tag_is_an_error_that_says_where_to_look(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserve.store.owners.new_tag", lambda _: "aB3")
    owner(root, 1)
    with pytest.raises(StorageError, match=r"\.servers"):
        owner(root, 2)


def test_a_clean_stop_leaves_no_claim(root: Path) -> None:
    one = owner(root, 1)
    one.release_blocking()
    one.release_blocking()
    assert os.listdir(root / ".servers") == []


def test_owner_of_a_temporary_name() -> None:
    random = Random(0)
    for _ in range(100):
        tag = new_tag(random)
        name = TempNames(tag, random).beside(f"d/{NAME}").rpartition("/")[2]
        assert temp_owner(name) == tag
    assert temp_owner(NAME) is None
    assert temp_owner("identity") is None


def test_a_server_that_starts_during_a_sweep_is_safe(root: Path) -> None:
    """Its claim is asked for again at each file, not taken from a list made at the start."""
    sweeper = owner(root, 1)
    leave(root, "zZ9", "a/ns/0of1/abc")
    steps = sweep_blocking(PosixFileSystem(), str(root), sweeper)
    next(steps)
    late = owner(root, 2)
    path = leave(root, late.tag, "z/ns/0of1/abc")
    assert list(steps)[-1].removed == 1
    assert path.exists()
    assert late.tag in os.listdir(root / ".servers")


def test_a_claim_that_somebody_removed_is_made_again(root: Path) -> None:
    one = owner(root, 1)
    (root / ".servers" / one.tag).unlink()
    one.beat_blocking()
    assert os.listdir(root / ".servers") == [one.tag]


def test_a_server_whose_own_claim_vanished_takes_nobody_for_dead(root: Path) -> None:
    """It has no clock to compare with; until its next beat nothing is removed."""
    living, sweeper = owner(root, 1), owner(root, 2)
    path = leave(root, living.tag)
    (root / ".servers" / sweeper.tag).unlink()
    assert sweeper.lives_blocking(living.tag)
    assert sweeper.lives_blocking("zZ9")
    sweeper.beat_blocking()
    assert not sweeper.lives_blocking("zZ9")
    assert path.exists()


def test_what_is_not_in_a_directory_of_ours_stays(root: Path) -> None:
    """Somebody's backup beside the tenants is somebody's."""
    sweeper = owner(root, 1)
    places = ("lost+found/x/0of1/abc", "t/notes/0of1/abc", "t/ns/0of0/abc", "t/ns/0of1/ABC")
    left = [leave(root, "zZ9", place) for place in places]
    assert sweep(root, sweeper).removed == 0
    assert all(path.exists() for path in left)


def test_a_directory_that_cannot_be_listed_keeps_the_dead_on_record(root: Path) -> None:
    """Their files below it are still there: the next round must know whose they are."""

    class Broken(PosixFileSystem):
        def scan(self, path: str) -> Iterator[Entry]:
            if path.endswith("/0of1"):
                raise StorageUnavailable("list: EIO")
            return super().scan(path)

    sweeper, dead = owner(root, 1), owner(root, 2)
    leave(root, dead.tag)
    silent_for(root, dead.tag, 100)
    result = sweep(root, sweeper, Broken())
    assert (result.removed, result.failed) == (0, 1)
    assert dead.tag in os.listdir(root / ".servers")


def test_what_is_no_claim_is_left_alone_and_stops_nothing(root: Path) -> None:
    by = owner(root, 1)
    strange = root / ".servers" / "zzz"
    strange.mkdir()
    (root / ".servers" / "README").write_text("for people")
    left = leave(root, "dE5")
    assert sweep(root, by).removed == 1
    assert not left.exists()
    assert strange.is_dir()
    assert (root / ".servers" / "README").exists()
