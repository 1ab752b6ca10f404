"""What a server does at its start on Lustre, against a recorded `lfs`."""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvclient import AsyncClient
from kvserve.config import LustreConfig, load_config
from kvserve.errors import StorageUnavailable
from kvserve.fs import PosixFileSystem, open_file_system_blocking, posix
from kvserve.fs import lustre as lustre_module
from kvserve.fs.lustre import (
    LustreFileSystem,
    directory_layout_change,
    file_layout_change,
)
from kvserve.rpc.server import Server
from tests.payload import payload_for, small_descriptor, store_all
from tests.unit.fs.recorded_lfs import (
    DIRECTORY_PLAIN,
    DIRECTORY_TWO,
    DOM,
    FOUR_IN_A_POOL,
    OVERSTRIPED,
    PLAIN,
    UNSET,
    RecordedLfs,
)

KIB64 = 64 << 10
EVERYTHING = {"stripe_count": 1, "dom_size_bytes": KIB64, "mdt_count": 2}


def config_of(**values: Any) -> LustreConfig:
    return load_config(None, {"lustre": values}).lustre


@pytest.fixture
def lfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> RecordedLfs:
    """On PATH; and every tree says that it lies on Lustre."""
    recorded = RecordedLfs(tmp_path / "bin")
    monkeypatch.setenv("PATH", recorded.path)
    monkeypatch.setattr(PosixFileSystem, "kind", lambda *_: "lustre")
    caplog.set_level(logging.INFO, "kvserve")
    return recorded


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]


class TestDetection:
    def test_lustre_is_told_by_its_kind(self, lfs: RecordedLfs, root: Path) -> None:
        assert isinstance(open_file_system_blocking(str(root), config_of()), LustreFileSystem)
        assert root.is_dir()

    def test_any_other_tree_is_posix_and_lfs_is_not_run(
        self, root: Path, lfs: RecordedLfs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PosixFileSystem, "kind", lambda *_: "ext4")
        fs = open_file_system_blocking(str(root), config_of(**EVERYTHING))
        assert type(fs) is PosixFileSystem
        assert lfs.asked == []

    def test_lustres_number(self) -> None:
        assert posix._KINDS[0x0BD00BD0] == "lustre"

    def test_a_full_target_is_worth_another_file_only_on_lustre(self) -> None:
        assert (PosixFileSystem().full_retries, LustreFileSystem().full_retries) == (0, 3)


class TestFileLayouts:
    @pytest.mark.parametrize(
        ("values", "shown"),
        [
            ({}, PLAIN),
            ({}, UNSET),
            ({"stripe_size_bytes": 1 << 20}, PLAIN),
            ({"stripe_count": 4}, FOUR_IN_A_POOL),
            ({"dom_size_bytes": KIB64}, DOM),
        ],
    )
    def test_one_that_is_there_is_left(self, values: dict[str, int], shown: str) -> None:
        assert file_layout_change("/kv", config_of(**values), shown) is None

    @pytest.mark.parametrize(
        ("values", "shown", "change"),
        [
            ({}, "", "-c 1"),
            ({}, OVERSTRIPED, "-c 1"),
            ({}, FOUR_IN_A_POOL, "-c 1 -p flash"),
            ({}, DOM, "-c 1"),
            ({"stripe_count": 2}, PLAIN, "-c 2"),
            ({"stripe_size_bytes": 4 << 20}, PLAIN, "-c 1 -S 4096k"),
            ({"dom_size_bytes": 1 << 20}, PLAIN, "-E 1024k -L mdt -E -1 -c 1"),
            ({"dom_size_bytes": 1 << 20}, DOM, "-E 1024k -L mdt -E -1 -c 1"),
            (
                {"dom_size_bytes": KIB64, "stripe_count": 2, "stripe_size_bytes": 2 << 20},
                DOM,
                "-E 64k -L mdt -E -1 -c 2 -S 2048k",
            ),
        ],
    )
    def test_another_one_is_set(self, values: dict[str, int], shown: str, change: str) -> None:
        found = file_layout_change("/kv", config_of(**values), shown)
        assert found == ["setstripe", *change.split(), "/kv"]


class TestDirectoryLayouts:
    def test_one_that_is_there_is_left(self) -> None:
        assert directory_layout_change("/kv", config_of(mdt_count=2), DIRECTORY_TWO) is None

    @pytest.mark.parametrize(
        ("count", "shown"),
        [
            (2, DIRECTORY_PLAIN),
            (4, DIRECTORY_TWO),
            (2, ""),
            (2, DIRECTORY_TWO.replace("crush", "fnv_1a_64")),
        ],
    )
    def test_another_one_is_set_with_the_hash_named(self, count: int, shown: str) -> None:
        found = directory_layout_change("/kv", config_of(mdt_count=count), shown)
        assert found == ["setdirstripe", "-D", "-c", str(count), "-H", "crush", "/kv"]


class TestStart:
    def test_by_default_nothing_is_changed_that_is_right(
        self, lfs: RecordedLfs, caplog: pytest.LogCaptureFixture
    ) -> None:
        LustreFileSystem().prepare_root_blocking("/kv", config_of())
        assert lfs.asked == [["getstripe", "-d", "/kv"], ["df", "--lazy", "/kv"]]
        assert "the file layout of /kv is as wanted: stripe_count: 1" in caplog.text

    def test_layouts_are_set_and_the_log_has_what_was_and_is(
        self, lfs: RecordedLfs, caplog: pytest.LogCaptureFixture
    ) -> None:
        lfs.shows("getstripe", PLAIN, then=DOM)
        lfs.shows("getdirstripe", DIRECTORY_PLAIN, then=DIRECTORY_TWO)
        LustreFileSystem().prepare_root_blocking("/kv", config_of(**EVERYTHING))
        assert lfs.asked == [
            ["getstripe", "-d", "/kv"],
            ["setstripe", "-E", "64k", "-L", "mdt", "-E", "-1", "-c", "1", "/kv"],
            ["getstripe", "-d", "/kv"],
            ["getdirstripe", "-D", "/kv"],
            ["setdirstripe", "-D", "-c", "2", "-H", "crush", "/kv"],
            ["getdirstripe", "-D", "/kv"],
            ["df", "--lazy", "/kv"],
        ]
        assert (
            "set the file layout of /kv: lfs setstripe -E 64k -L mdt -E -1 -c 1 /kv; "
            "it was: stripe_count: 1 stripe_size: 1048576"
        ) in caplog.text
        assert "set the directory layout of /kv: lfs setdirstripe" in caplog.text
        LustreFileSystem().prepare_root_blocking("/kv", config_of(**EVERYTHING))
        assert [call[0] for call in lfs.asked[7:]] == ["getstripe", "getdirstripe", "df"]

    def test_zeros_leave_both_layouts(self, lfs: RecordedLfs) -> None:
        lfs.shows("getstripe", FOUR_IN_A_POOL)
        LustreFileSystem().prepare_root_blocking("/kv", config_of(stripe_count=0))
        assert lfs.asked == [["df", "--lazy", "/kv"]]

    def test_a_layout_that_the_servers_cut_is_said(
        self, lfs: RecordedLfs, caplog: pytest.LogCaptureFixture
    ) -> None:
        """lod.*.dom_stripesize bounds what may be on a metadata target."""
        lfs.shows("getstripe", PLAIN, then=DOM)
        config = config_of(dom_size_bytes=4 << 20)
        LustreFileSystem().prepare_root_blocking("/kv", config)
        assert "lfs setstripe -E 4096k -L mdt -E -1 -c 1 /kv was taken differently" in caplog.text

    def test_full_targets_are_said(
        self, lfs: RecordedLfs, caplog: pytest.LogCaptureFixture
    ) -> None:
        LustreFileSystem().prepare_root_blocking("/kv", config_of())
        (said,) = warnings(caplog)
        assert "storage target OST:0 (tfs1-OST0000) is 98% full, 0.1 GiB available" in said

    def test_space_for_whoever_asks(self, lfs: RecordedLfs) -> None:
        names = [it.name for it in LustreFileSystem().space_blocking("/kv")]
        assert names == ["MDT:0", "OST:0", "OST:1", "OST:3"]
        lfs.refuses("df", "lfs df: no such mount")
        with pytest.raises(StorageUnavailable, match="no such mount"):
            LustreFileSystem().space_blocking("/kv")


class TestNeverFatal:
    def test_no_lfs(
        self,
        lfs: RecordedLfs,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        LustreFileSystem().prepare_root_blocking("/kv", config_of(**EVERYTHING))
        files, directories, space = warnings(caplog)
        assert "lfs getstripe -d /kv: cannot be run" in files
        assert files.endswith("by hand: lfs setstripe -E 64k -L mdt -E -1 -c 1 /kv")
        assert directories.endswith("by hand: lfs setdirstripe -D -c 2 -H crush /kv")
        assert "the space of each storage target is unknown" in space

    @pytest.mark.parametrize("refused", ["getstripe", "setstripe"])
    def test_a_refusal_is_said_and_the_rest_goes_on(
        self, lfs: RecordedLfs, caplog: pytest.LogCaptureFixture, refused: str
    ) -> None:
        lfs.refuses(refused, f"lfs {refused}: Operation not permitted")
        config = config_of(stripe_count=2, mdt_count=2)
        lfs.shows("getdirstripe", DIRECTORY_PLAIN, then=DIRECTORY_TWO)
        LustreFileSystem().prepare_root_blocking("/kv kv", config)
        assert "Operation not permitted; by hand: lfs setstripe -c 2 '/kv kv'" in caplog.text
        assert "set the directory layout of /kv kv" in caplog.text

    def test_one_that_hangs_costs_one_budget(
        self,
        lfs: RecordedLfs,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(lustre_module, "_START_BUDGET_S", 0.3)
        lfs.hangs("getstripe")
        LustreFileSystem().prepare_root_blocking("/kv", config_of(**EVERYTHING))
        assert lfs.asked == [["getstripe", "-d", "/kv"]]
        assert len(warnings(caplog)) == 3
        assert "did not end within 0.3 s; by hand: lfs setstripe -E 64k" in warnings(caplog)[0]

    @pytest.mark.parametrize("text", ["", "\x00\xff what?", "stripe_count: many\nlmv_: \n[OST:1]"])
    def test_words_that_nobody_understands(self, lfs: RecordedLfs, text: str) -> None:
        for command in ("getstripe", "getdirstripe", "df"):
            lfs.shows(command, text)
        LustreFileSystem().prepare_root_blocking("/kv", config_of(**EVERYTHING))
        assert [call[0] for call in lfs.asked][1] == "setstripe"


async def test_a_server_starts_stores_and_fetches_on_it(
    lfs: RecordedLfs, root: Path, start_server: Callable[..., Awaitable[Server]]
) -> None:
    lfs.shows("getstripe", FOUR_IN_A_POOL, then=PLAIN)
    server = await start_server()
    assert [call[0] for call in lfs.asked] == ["getstripe", "setstripe", "getstripe", "df"]
    assert lfs.asked[1] == ["setstripe", "-c", "1", "-p", "flash", str(root)]
    descriptor = small_descriptor(chunks=2, layers=2)
    payload = payload_for(descriptor)
    into = bytearray(len(payload))
    async with AsyncClient(server.address, timeout_s=20) as client:
        assert (await client.server_info()).file_system == "lustre"
        await store_all(client, descriptor, payload)
        await client.fetch(descriptor, into).wait()
    assert into == payload
