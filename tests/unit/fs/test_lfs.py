"""Running `lfs` within its time, and reading what it prints."""

import time
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs.lfs import (
    Component,
    Lfs,
    OstSpace,
    parse_directory_layout,
    parse_layout,
    parse_space,
)
from tests.descriptors import open_files
from tests.unit.fs.recorded_lfs import (
    DF,
    DIRECTORY_PLAIN,
    DIRECTORY_TWO,
    DOM,
    FOUR_IN_A_POOL,
    OVERSTRIPED,
    PLAIN,
    UNSET,
    RecordedLfs,
)

MIB = 1 << 20
GARBAGE = [
    "",
    "\n\n",
    "what?",
    "stripe_count:",
    "stripe_count: many",
    "lmv_stripe_count: x y",
    "[OST:",
]


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedLfs:
    recorded = RecordedLfs(tmp_path / "bin")
    monkeypatch.setenv("PATH", recorded.path)
    return recorded


class TestRunning:
    def test_arguments_arrive_as_they_are(self, lfs: RecordedLfs) -> None:
        """No shell in between."""
        odd = "/kv/a b;$(touch x)'\"*"
        assert Lfs(10).run_blocking("df", "--lazy", odd) == DF
        assert lfs.asked == [["df", "--lazy", odd]]

    def test_no_lfs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(StorageUnavailable, match="lfs df /kv: cannot be run: No such file"):
            Lfs(10).run_blocking("df", "/kv")

    def test_an_lfs_that_may_not_be_run(self, lfs: RecordedLfs) -> None:
        (lfs.place / "lfs").write_bytes(b"\x7fELF no program")
        with pytest.raises(StorageUnavailable, match="cannot be run: Exec format error"):
            Lfs(10).run_blocking("df", "/kv")

    def test_a_refusal_has_its_words(self, lfs: RecordedLfs) -> None:
        lfs.refuses("df", "lfs df: cannot statfs:\n  Permission denied\n" + "x" * 5000)
        with pytest.raises(
            StorageUnavailable, match="exit status 1: lfs df: cannot statfs: Permission denied"
        ) as caught:
            Lfs(10).run_blocking("df", "/kv")
        assert len(str(caught.value)) < 400

    def test_one_that_hangs_is_killed_with_what_it_started(self, lfs: RecordedLfs) -> None:
        lfs.hangs("df")
        before = open_files()
        hung = Lfs(0.3)
        started = time.monotonic()
        with pytest.raises(StorageUnavailable, match=r"df /kv: did not end within 0\.3 s"):
            hung.run_blocking("df", "/kv")
        with pytest.raises(StorageUnavailable, match="df /kv: not run, lfs has hung before"):
            hung.run_blocking("df", "/kv")
        assert time.monotonic() - started < 10, "the sleeping child of the script holds the pipes"
        assert len(lfs.asked) == 1
        assert open_files() == before


class TestLayouts:
    @pytest.mark.parametrize("text", [PLAIN, UNSET])
    def test_a_plain_one(self, text: str) -> None:
        assert parse_layout(text) == (Component(None, False, 1, MIB, ""),)

    def test_a_pool(self) -> None:
        assert parse_layout(FOUR_IN_A_POOL) == (Component(None, False, 4, 4 * MIB, "flash"),)

    def test_an_overstriped_one(self) -> None:
        assert parse_layout(OVERSTRIPED) == (Component(None, False, 8, MIB, ""),)

    def test_data_on_mdt(self) -> None:
        assert parse_layout(DOM) == (
            Component(65536, True, 0, 65536, ""),
            Component(None, False, 1, MIB, ""),
        )

    def test_directories(self) -> None:
        assert parse_directory_layout(DIRECTORY_PLAIN) == (0, "none")
        assert parse_directory_layout(DIRECTORY_TWO) == (2, "crush")

    @pytest.mark.parametrize("text", GARBAGE)
    def test_what_cannot_be_understood_is_no_layout(self, text: str) -> None:
        assert all(it.stripe_count == 0 for it in parse_layout(text))
        assert parse_directory_layout(text) in ((0, ""), (0, "none"))


class TestSpace:
    def test_each_target_that_answers(self) -> None:
        targets = parse_space(DF)
        assert [it.name for it in targets] == ["MDT:0", "OST:0", "OST:1", "OST:3"]
        assert targets[1] == OstSpace(
            name="OST:0",
            uuid="tfs1-OST0000",
            size_bytes=9650000 << 10,
            used_bytes=9000000 << 10,
            available_bytes=150000 << 10,
            states="S",
        )
        assert [it.states for it in targets] == ["", "S", "", "DR"]

    def test_the_share_is_the_one_that_lfs_prints(self) -> None:
        """Of 9,650,000 KiB 500,000 are reserved: neither used nor available."""
        shares = [it.used_share for it in parse_space(DF)]
        assert [f"{share:.2f}" for share in shares] == ["0.00", "0.98", "0.47", "0.00"]

    def test_a_mount_point_with_brackets_and_blanks(self) -> None:
        (target,) = parse_space("kv-OST0000_UUID 100 60 40 60% /mnt/a [OST:9] b[OST:2]\n")
        assert target.name == "OST:2"

    def test_a_target_without_room_is_full(self) -> None:
        (target,) = parse_space("kv-OST0000_UUID 100 0 0 0% /mnt[OST:2]\n")
        assert target.used_share == 1.0

    @pytest.mark.parametrize("text", GARBAGE)
    def test_what_cannot_be_understood_is_no_target(self, text: str) -> None:
        assert parse_space(text) == []
