"""`kvserve fsck, du, ls` as a person or a script uses them: exit codes, words, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvserve.cli import app, care
from kvserve.errors import InvalidRequest
from kvserve.format.chunk_file import checksum
from kvserve.fs import PosixFileSystem
from kvserve.model import Descriptor
from tests.care.damaged_tree import damage, good_tree, place, temp_beside
from tests.cli.test_commands import kvserve
from tests.contract.store_tree import Tree
from tests.unit.fs.recorded_lfs import RecordedLfs
from tests.unit.samples import SMALL, descriptor_of, identity_of, slice_of


def here(*arguments: str, code: int = 0) -> Result:
    """Without a process of its own, where that shows nothing more."""
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == code, ended.output
    return ended


@pytest.fixture
def tree(root: Path) -> Tree:
    return good_tree(root)


def add_secret(tree: Tree) -> str:
    """A chunk of another tenant, whose identity has a salt."""
    descriptor = Descriptor(
        identity_of(SMALL, model="org/other", salt="pepper"),
        descriptor_of(1).chunk_hashes,
        tenant="b",
    )
    where = tree.store.locate(descriptor)
    tree.store.ensure_namespace_blocking(descriptor.key(0))
    writer = tree.store.writer(where, 0)
    for layer in range(2):
        writer.write_blocking(layer, 0, memoryview(slice_of(layer, 0, 256)))
    writer.commit_blocking([checksum(slice_of(layer, 0, 256)) for layer in range(2)])
    return descriptor.identity.namespace


class TestFsck:
    def test_a_clean_tree(self, tree: Tree) -> None:
        ended = kvserve("fsck", "--root", str(tree.root))
        assert ended.stdout.startswith("fsck: 13 ok; 0 repaired; ")
        assert ended.stderr == "", "the moving line is for terminals"

    def test_a_damaged_tree_in_words(self, tree: Tree) -> None:
        expected = damage(tree)
        ended = kvserve("fsck", "--root", str(tree.root), code=1)
        lines = ended.stdout.splitlines()
        told = [line.partition(": ") for line in lines[:-1]]
        assert sorted(kind for kind, _, _ in told) == sorted(
            kind for kind, _ in expected.values() if kind != "live"
        )
        assert f"corrupt: {place(tree, 3)}: checksum of layer 0 does not match" in lines
        assert ended.stdout.isascii(), "names that are not ours cannot steer the terminal"
        assert "\x1b" not in ended.stdout
        assert lines[-1].startswith("fsck: 3 ok, 8 corrupt, 6 misplaced, 4 orphan, 1 live, ")

    def test_repair_ends_with_1_then_the_tree_is_clean(self, tree: Tree) -> None:
        damage(tree)
        mended = here("fsck", "--root", str(tree.root), "--repair", code=1).stdout
        assert f"corrupt [repaired]: {place(tree, 3)}" in mended
        assert "; 18 repaired; " in mended
        here("fsck", "--root", str(tree.root))

    def test_json(self, tree: Tree) -> None:
        expected = damage(tree)
        ended = here("fsck", "--root", f"{tree.root}/", "--json", code=1)
        report = json.loads(ended.stdout)
        assert {it["path"] for it in report["findings"]} == set(expected)
        assert report["counts"]["corrupt"] == 8
        assert (report["is_clean"], report["repair"], report["resumed"]) == (False, False, False)
        assert report["files"] == sum(report["counts"].values())
        assert not any(it["repaired"] for it in report["findings"])

    def test_nothing_to_resume_is_said(self, tree: Tree) -> None:
        ended = here("fsck", "--root", str(tree.root), "--resume")
        assert "nothing to resume" in ended.stderr

    def test_du_on_lustre_shows_each_storage_target(
        self, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lfs = RecordedLfs(tmp_path / "bin")
        monkeypatch.setenv("PATH", lfs.path)
        monkeypatch.setattr(PosixFileSystem, "kind", lambda *_: "lustre")
        report = json.loads(here("du", "--root", str(tree.root), "--json").stdout)
        assert [it["name"] for it in report["targets"]] == ["MDT:0", "OST:0", "OST:1", "OST:3"]
        assert "98 %" in here("du", "--root", str(tree.root)).stdout
        lfs.refuses("df", "lfs df: no such mount")
        assert "no such mount" in here("du", "--root", str(tree.root)).output

    @pytest.mark.parametrize("command", ["fsck", "du", "ls"])
    def test_a_root_that_is_missing_or_no_directory_is_2(
        self, tmp_path: Path, command: str
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        for name in ("no", "file"):
            error = here(command, "--root", f"{tmp_path}/{name}", code=2).stderr
            assert error == f"kvserve: InvalidRequest: --root {tmp_path}/{name} is no directory\n"
        assert "--root" in here(command, code=2).stderr
        assert os.listdir(tmp_path) == ["file"]

    def test_a_root_that_may_not_be_looked_at_is_2(
        self, tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(tree.root))

        monkeypatch.setattr(Path, "is_dir", refuse)
        for command in ("fsck", "du", "ls"):
            ended = here(command, "--root", str(tree.root), code=2)
            assert "Permission denied" in ended.stderr

    def test_a_damaged_state_is_2(self, tree: Tree) -> None:
        (tree.root / ".fsck").mkdir()
        (tree.root / ".fsck" / "state").write_text("{", "utf-8")
        error = here("fsck", "--root", str(tree.root), "--resume", code=2).stderr
        assert "run without --resume" in error
        assert "Traceback" not in error
        here("fsck", "--root", str(tree.root))

    def test_another_user_than_the_servers_is_refused(
        self, tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it would make in the root the servers could not use."""
        (tree.root / ".servers").mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(InvalidRequest, match=r"belongs to uid \d+ and this is uid 4242"):
            care._check_user(tree.root)


class TestDu:
    def test_by_tenant_and_namespace(self, tree: Tree) -> None:
        namespace = add_secret(tree)
        temp_beside(tree.file(0), "zZ9")
        (tree.root / ".quarantine").mkdir()
        (tree.root / ".quarantine" / "x").write_bytes(bytes(1000))
        (tree.root / "stranger").write_bytes(b"")
        report = json.loads(here("du", "--root", str(tree.root), "--json").stdout)
        assert report["chunks"]["files"] == 13
        assert report["tenants"]["default"]["size_bytes"] == 12 * 16384
        assert report["tenants"]["b"]["files"] == 1
        other = next(it for it in report["namespaces"] if it["tenant"] == "b")
        assert other["namespace"] == namespace
        assert (other["model"], other["revision"], other["dtype"], other["shards"]) == (
            "org/other",
            "r1",
            "bfloat16",
            ["0of1"],
        )
        assert report["quarantine"]["size_bytes"] == 1000
        assert report["temporaries"]["files"] == 1
        assert (report["unknown"], report["unreadable"]) == (1, 0)
        people = here("du", "--root", str(tree.root)).stdout
        assert "org/other" in people
        assert "pepper" not in people + json.dumps(report)

    def test_a_namespace_without_identity_is_counted_too(self, tree: Tree) -> None:
        next(tree.root.rglob("identity")).unlink()
        report = json.loads(here("du", "--root", str(tree.root), "--json").stdout)
        assert report["chunks"]["files"] == 12
        assert report["namespaces"][0]["model"] is None
        assert "no identity file" in " ".join(here("du", "--root", str(tree.root)).stdout.split())

    def test_nothing_is_written(self, tree: Tree) -> None:
        before = sorted(tree.root.rglob("*"))
        here("du", "--root", str(tree.root))
        here("ls", "--root", str(tree.root))
        assert sorted(tree.root.rglob("*")) == before


class TestLs:
    def test_every_chunk_with_size_age_path_and_identity(self, tree: Tree) -> None:
        os.utime(tree.file(0), (1, 1))
        temp_beside(tree.file(0), "zZ9")
        lines = here("ls", "--root", str(tree.root)).stdout.splitlines()
        assert len(lines) == 12
        (line,) = [line for line in lines if place(tree, 0) in line]
        assert line.startswith("   16.4 kB")
        assert line.endswith("org/small@r1 bfloat16")
        assert line.split()[2].endswith("d")

    def test_a_reader_that_has_enough_ends_it(self, tree: Tree) -> None:
        """`kvserve ls | head -1`: no stack, no error."""
        script = f"{sys.executable} -m kvserve ls --root {tree.root} | head -1"
        ended = subprocess.run(
            script, shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        assert len(ended.stdout.splitlines()) == 1
        assert ended.stderr == ""

    def test_json_lines_and_filters(self, tree: Tree) -> None:
        namespace = add_secret(tree)

        def listed(*filters: str) -> list[dict[str, object]]:
            text = here("ls", "--root", str(tree.root), "--json", *filters).stdout
            return [json.loads(line) for line in text.splitlines()]

        assert len(listed()) == 13
        assert len(listed("--limit", "5")) == 5
        assert [it["model"] for it in listed("--tenant", "b")] == ["org/other"]
        assert len(listed("--namespace", namespace[:6])) == 1
        assert len(listed("--model", "org/small")) == 12
        assert listed("--model", "org/small", "--tenant", "b") == []
        assert listed("--namespace", "zz") == []
        (secret,) = listed("--tenant", "b")
        assert set(secret) == {
            "path",
            "size_bytes",
            "age_s",
            "model",
            "revision",
            "adapter",
            "dtype",
        }
        assert "pepper" not in json.dumps(secret)
