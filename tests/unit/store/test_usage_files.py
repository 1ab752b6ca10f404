"""Usage by all servers, from a count and everybody's changes, whatever the order of writes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.fs import PosixFileSystem
from kvserve.policy.quota import Amount
from kvserve.store.usage_files import UsageFiles

FS = PosixFileSystem()
TAGS = ["aB3", "bC4", "cD5"]
Usage = dict[str, Amount]


def plus(*parts: Usage) -> Usage:
    found: Usage = {}
    for part in parts:
        for tenant, amount in part.items():
            found[tenant] = found.get(tenant, Amount()) + amount
    return {tenant: amount for tenant, amount in found.items() if amount}


class Servers:
    """Servers that count their changes, and the tree's real usage."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.files = {tag: UsageFiles(FS, root, tag) for tag in TAGS}
        self.own: dict[str, Usage] = {tag: {} for tag in TAGS}
        self.tree: Usage = {}

    def change(self, tag: str, tenant: str, size_bytes: int) -> None:
        change = {tenant: Amount(size_bytes, 1 if size_bytes > 0 else -1)}
        self.own[tag] = plus(self.own[tag], change)
        self.tree = plus(self.tree, change)

    def usage(self, tag: str) -> Usage:
        return plus(self.files[tag].base_for(self.own[tag]), self.own[tag])

    def count(self, tag: str) -> None:
        for other in TAGS:
            self.usage(other)
        others = self.files[tag].changes_of_others()
        self.files[tag].write_base(self.tree, self.own[tag], others)

    def restart(self, tag: str) -> None:
        self.usage(tag)
        self.files[tag] = UsageFiles(FS, self.root, tag)
        self.own[tag] = {}


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("change"),
            st.sampled_from(TAGS),
            st.sampled_from("tu"),
            st.integers(-50, 50).filter(bool),
        ),
        st.tuples(st.sampled_from(["tell", "count", "restart"]), st.sampled_from(TAGS)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(steps)
def test_in_any_order_everybody_ends_with_the_same_usage(steps: list[tuple[str, ...]]) -> None:
    with TemporaryDirectory() as root:
        servers = Servers(root)
        for what, tag, *change in steps:
            if what == "change":
                servers.change(tag, change[0], int(change[1]))
            elif what == "tell":
                servers.usage(tag)
            elif what == "count":
                servers.count(tag)
            else:
                servers.restart(tag)
        for tag in TAGS:
            servers.usage(tag)
        for tag in TAGS:
            assert servers.usage(tag) == servers.tree
        assert not list(Path(root).glob(".usage/*.*")), "temporary files"


def test_a_count_corrects_what_was_wrong(tmp_path: Path) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.tree = {"t": Amount(70, 1)}  # somebody removed files by hand
    servers.count("bC4")
    assert servers.usage("aB3") == servers.usage("cD5") == servers.tree


def test_a_dead_servers_changes_are_in_the_count(tmp_path: Path) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.change("bC4", "t", 10)
    servers.usage("aB3")
    servers.usage("bC4")
    assert servers.usage("cD5") == {"t": Amount(110, 2)}, "it died after it told"
    contained = servers.files["bC4"].changes_of_others()
    servers.count("bC4")
    servers.files["bC4"].forget({"aB3", "zZ9"}, contained)
    assert servers.files["bC4"].tags() == {"bC4"}
    assert servers.usage("bC4") == servers.usage("cD5") == {"t": Amount(110, 2)}


@pytest.mark.parametrize("came", ["before", "meanwhile"])
def test_what_a_server_did_during_a_count_and_died_is_not_forgotten(
    tmp_path: Path, came: str
) -> None:
    """As a tool that comes and goes while the tree is walked: the count does not have it."""
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    if came == "before":
        servers.change("cD5", "t", 10)
    for tag in TAGS[: 3 if came == "before" else 1]:
        servers.usage(tag)
    others = servers.files["bC4"].changes_of_others()
    counted = dict(servers.tree)
    servers.change("cD5", "t", -100)  # after the walk had passed the place
    servers.usage("cD5")
    servers.files["bC4"].write_base(counted, servers.own["bC4"], others)
    servers.files["bC4"].forget({"cD5"}, others)
    assert servers.usage("bC4") == servers.tree


def test_a_new_server_knows_the_usage_at_once(tmp_path: Path) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.count("aB3")
    servers.change("aB3", "t", 5)
    servers.usage("aB3")
    assert UsageFiles(FS, str(tmp_path), "nE5").base_for({}) == {"t": Amount(105, 2)}


def test_unchanged_changes_are_not_written_again(tmp_path: Path) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.usage("aB3")
    inode = (tmp_path / ".usage/aB3").stat().st_ino
    servers.usage("aB3")
    assert (tmp_path / ".usage/aB3").stat().st_ino == inode


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"..": [5, 1], "t": [10000000000000000000, 1]}',
        b'{"t": 5, "u": [1], "v": ["1", 2], "w": [1, true]}',
    ],
    ids=repr,
)
def test_damaged_changes_count_as_nothing(tmp_path: Path, damage: bytes) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.count("aB3")
    servers.change("bC4", "t", 7)
    servers.usage("bC4")
    (tmp_path / ".usage/bC4").write_bytes(damage)
    assert servers.usage("cD5") == {"t": Amount(100, 1)}
    others = servers.files["aB3"].changes_of_others()
    servers.files["aB3"].write_base({"t": Amount(107, 2)}, servers.own["aB3"], others)
    assert servers.usage("cD5") == {"t": Amount(107, 2)}, "until the next count"


@pytest.mark.parametrize("damage", [b"", b"{", b'{"counted": {}, "contained": 5}'], ids=repr)
def test_a_damaged_count_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.count("aB3")
    (tmp_path / ".usage/base").write_bytes(damage)
    assert servers.usage("cD5") == {"t": Amount(100, 1)}, "the changes are still known"


def test_well_formed_tenants_beside_damaged_ones_count(tmp_path: Path) -> None:
    usage = tmp_path / ".usage"
    usage.mkdir()
    (usage / "aB3").write_text('{"t": [5, 1], "u": "x"}')
    assert UsageFiles(FS, str(tmp_path), "bC4").base_for({}) == {"t": Amount(5, 1)}


def test_what_others_store_during_a_count_is_never_missing(tmp_path: Path) -> None:
    """The walk may have passed its directory: counted twice is safe, not at all is not."""
    servers = Servers(str(tmp_path))
    others = servers.files["aB3"].changes_of_others()
    servers.change("bC4", "t", 7)
    servers.usage("bC4")
    servers.files["aB3"].write_base({}, servers.own["aB3"], others)
    assert servers.usage("cD5") == {"t": Amount(7, 1)}


@pytest.mark.parametrize("depth", [200_000])
def test_a_bomb_counts_as_nothing(tmp_path: Path, depth: int) -> None:
    servers = Servers(str(tmp_path))
    (tmp_path / ".usage").mkdir()
    (tmp_path / ".usage/base").write_bytes(b"[" * depth)
    (tmp_path / ".usage/zZ9").mkdir()
    servers.change("aB3", "t", 100)
    assert servers.usage("aB3") == {"t": Amount(100, 1)}


def test_what_a_killed_server_had_not_finished_goes_once_it_is_dead(tmp_path: Path) -> None:
    servers = Servers(str(tmp_path))
    servers.change("aB3", "t", 100)
    servers.count("aB3")
    directory = tmp_path / ".usage"
    before = {path.name for path in directory.iterdir()}
    (directory / "folder.bC4").mkdir()
    for name in ("base.bC4", "bC4.bC4", "base.cD5", "base.old", "base.bC4.swp", ".bC4"):
        (directory / name).write_bytes(b"half")
    files = UsageFiles(PosixFileSystem(), str(tmp_path), "aB3")
    files.forget_unfinished(lambda tag: tag != "bC4")
    left = {path.name for path in directory.iterdir()} - before
    assert left == {"folder.bC4", "base.cD5", "base.old", "base.bC4.swp", ".bC4"}
    assert servers.usage("aB3") == servers.tree
