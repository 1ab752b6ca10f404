"""The walk: every directory of ours once, in an order that one can go on from."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.fs import Entry, PosixFileSystem
from kvserve.store.tree import FAN, Parts, is_chunk_name, is_ours, shard_of, walk_blocking

FS = PosixFileSystem()
ONE, TWO = "11" * 16, "22" * 16


@pytest.fixture
def root(tmp_path: Path) -> str:
    for place in (
        f"a/{ONE}/0of1/000",
        f"a/{ONE}/0of1/fff",
        f"a/{TWO}/0of2/7a7",
        f"a/{TWO}/1of2",
        f"b.c/{ONE}/0of1/123",
        "b",
        ".quarantine",
        ".servers",
        "lost+found/x",
        f"a/{ONE}x/0of1/000",
        f"a/{ONE}/0of1/FFF",
        f"a/{ONE}/00of1/000",
    ):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "a" / ONE / "0of1" / "000" / "file").write_bytes(b"")
    return str(tmp_path)


WHOLE: list[Parts] = [
    (),
    ("a",),
    ("a", ONE),
    ("a", ONE, "0of1"),
    ("a", ONE, "0of1", "000"),
    ("a", ONE, "0of1", "fff"),
    ("a", TWO),
    ("a", TWO, "0of2"),
    ("a", TWO, "0of2", "7a7"),
    ("a", TWO, "1of2"),
    ("b",),
    ("b.c",),
    ("b.c", ONE),
    ("b.c", ONE, "0of1"),
    ("b.c", ONE, "0of1", "123"),
]


def test_every_directory_of_ours_in_the_order_of_parts(root: str) -> None:
    """ "b.c" comes after what is in "b": the order is of parts, not of the joined path."""
    found = [directory.parts for directory in walk_blocking(FS, root)]
    assert found == WHOLE
    assert sorted(found) == found


@pytest.mark.parametrize("at", range(len(WHOLE)))
def test_a_walk_goes_on_after_any_directory(root: str, at: int) -> None:
    found = [directory.parts for directory in walk_blocking(FS, root, after=WHOLE[at])]
    assert found == WHOLE[at + 1 :]


def test_it_goes_on_where_the_directory_is_gone(root: str) -> None:
    """What was deleted meanwhile must not hide what comes after it."""
    gone = ("a", ONE, "0of1", "800")
    assert next(walk_blocking(FS, root, after=gone)).parts == ("a", ONE, "0of1", "fff")
    gone = ("aa", ONE, "0of1")
    assert next(walk_blocking(FS, root, after=gone)).parts == ("b",)


def test_going_on_lists_nothing_that_lies_behind(root: str) -> None:
    listed: list[str] = []

    class Counting(PosixFileSystem):
        def scan(self, path: str) -> Iterator[Entry]:
            listed.append(path)
            return super().scan(path)

    list(walk_blocking(Counting(), root, after=("a", TWO, "1of2")))
    assert f"{root}/a/{ONE}" not in listed
    assert f"{root}/a/{TWO}/0of2" not in listed


def test_what_is_not_wanted_is_not_entered(root: str) -> None:
    found = [it.parts for it in walk_blocking(FS, root, wants=lambda parts: parts[0] == "b.c")]
    assert found == [(), *WHOLE[-4:]]


def test_entries_are_everything_there_is(root: str) -> None:
    by_parts = {directory.parts: directory for directory in walk_blocking(FS, root)}
    assert {entry.name for entry in by_parts[()].entries()} == set(os.listdir(root))
    fan = by_parts[("a", ONE, "0of1", "000")]
    assert (fan.level, [entry.name for entry in fan.entries()]) == (FAN, ["file"])
    assert fan.path == f"{root}/a/{ONE}/0of1/000"


def test_a_directory_that_cannot_be_listed_is_told_and_the_others_go_on(root: str) -> None:
    class Broken(PosixFileSystem):
        def scan(self, path: str) -> Iterator[Entry]:
            if path.endswith((ONE, "7a7")):
                raise StorageUnavailable("list: EIO")
            return super().scan(path)

    broken: list[Parts] = []
    for directory in walk_blocking(Broken(), root):
        try:
            list(directory.entries())
        except StorageError:
            broken.append(directory.parts)
    assert broken == [("a", ONE), ("a", TWO, "0of2", "7a7"), ("b.c", ONE)]


def test_no_link_makes_it_endless(root: str) -> None:
    """The depth is fixed, so a link upwards is one directory more and no circle."""
    os.symlink(root, f"{root}/a/{'33' * 16}")
    assert len(list(walk_blocking(FS, root))) < 3 * len(WHOLE)


def test_shard_names() -> None:
    assert shard_of("3of8") is not None
    for name in ("03of8", "8of8", "0of0", "-1of2", "0of1 ", "0of65537", "1of99999", "٣of8", "of"):
        assert shard_of(name) is None, name


def test_names_of_chunks() -> None:
    for good in ("00" * 16, "ab" * 64):
        assert is_chunk_name(good)
    for bad in ("00" * 15, "ab" * 65, "0" * 33, "AB" * 16, "identity", "", "٣" * 32):
        assert not is_chunk_name(bad), bad


def test_a_tenant_cannot_look_like_the_servers_own() -> None:
    assert is_ours(("default",))
    assert not is_ours((".quarantine",))
    assert not is_ours(("a", ONE, "0of1", "000", "more"))
