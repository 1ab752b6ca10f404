"""Care of a tree on which real servers work: nothing they acknowledged is lost, nothing they are
writing is touched; a check that is killed goes on where it was."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest

from kvclient import Client, Descriptor, KvserveError
from kvserve.care.fsck import FsckOptions, FsckResult, fsck_blocking
from kvserve.care.tally import Kind
from kvserve.fs import PosixFileSystem
from kvserve.testing.server_process import ServerProcess
from tests.care.damaged_tree import damage, good_tree
from tests.payload import payload_for, small_descriptor

LOAD_S = 4.0


def run(*arguments: str, code: int = 0) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, "-m", "kvserve", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    report: dict[str, object] = json.loads(ended.stdout)
    return report


def check(root: Path, **options: bool) -> FsckResult:
    return fsck_blocking(PosixFileSystem(), str(root), FsckOptions(threads=4, **options))


def counts(result: FsckResult) -> dict[str, int]:
    return {kind.value: count for kind, count in result.tally.counts.items() if count}


def store(client: Client, descriptor: Descriptor, payload: bytearray) -> bool:
    handle = client.store(descriptor, payload)
    for layer_index in descriptor.layer_order:
        handle.store_layer(layer_index)
    return handle.finish().is_whole


def fetch(client: Client, descriptor: Descriptor) -> bytearray | None:
    into = bytearray(descriptor.payload_size_bytes)
    return into if client.fetch(descriptor, into).wait().is_whole else None


def work(number: int) -> tuple[Descriptor, bytearray]:
    descriptor = small_descriptor(first_token=100_000 * number, chunks=8)
    return descriptor, payload_for(descriptor, number)


class Load:
    """Two writers of new prefixes, a reader of what is acknowledged, and a vandal: it damages
    chunks of other prefixes, which a third writer stores again and again."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        self.address = address
        self.acknowledged: list[int] = []
        self.faults: list[str] = []
        self.harmed = 0
        self.healed = 0
        self._stop = threading.Event()
        jobs = (self._write, self._write_more, self._read, self._harm, self._heal)
        self._threads = [threading.Thread(target=job) for job in jobs]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, start: int = 1000) -> None:
        with Client(self.address, timeout_s=20) as client:
            for number in range(start, start + 1000):
                if self._stop.is_set():
                    return
                if store(client, *work(number)):
                    self.acknowledged.append(number)
                else:
                    self.faults.append(f"store of {number} was not whole")

    def _write_more(self) -> None:
        self._write(start=5000)

    def _read(self) -> None:
        random = Random(1)
        with Client(self.address, timeout_s=20) as client:
            while not self._stop.wait(0.01):
                if self.acknowledged:
                    number = random.choice(self.acknowledged)
                    descriptor, payload = work(number)
                    if fetch(client, descriptor) != payload:
                        self.faults.append(f"fetch of {number} failed")

    def _harm(self) -> None:
        random = Random(2)
        while not self._stop.wait(0.002):
            files = list((self.root / "victim").rglob("?" * 64))
            if not files:
                continue
            with contextlib.suppress(FileNotFoundError), random.choice(files).open("r+b") as file:
                file.seek(random.choice((20, 4096, 8192)))
                file.write(random.randbytes(8))
                self.harmed += 1

    def _heal(self) -> None:
        with Client(self.address, timeout_s=20) as client:
            while not self._stop.is_set():
                for number in range(4):
                    self.healed += store(client, *victim(number))


def victim(number: int) -> tuple[Descriptor, bytearray]:
    descriptor = small_descriptor(first_token=100_000 * number, chunks=8, tenant="victim")
    return descriptor, payload_for(descriptor, number)


def test_repair_under_load_loses_nothing(root: Path) -> None:
    repaired = 0
    with ServerProcess(root) as server:
        with Load(root, server.address) as load:
            until = time.monotonic() + LOAD_S
            rounds = 0
            while time.monotonic() < until:
                result = check(root, repairs=True)
                rounds += 1
                repaired += result.tally.repaired
                assert result.tally.counts[Kind.ORPHAN] == 0, "its server lives"
                assert result.tally.counts[Kind.UNREADABLE] == 0
                bad = [it.path for it in result.tally.findings if it.kind.is_problem]
                assert all(path.startswith("victim/") for path in bad), bad
        assert load.faults == []
        assert min(rounds, load.harmed, load.healed, repaired, len(load.acknowledged)) > 0
        check(root, repairs=True)
        assert check(root).tally.problems == 0
        with Client(server.address, timeout_s=20) as client:
            for number in load.acknowledged:
                descriptor, payload = work(number)
                assert fetch(client, descriptor) == payload, f"{number} was lost"
            for number in range(4):
                descriptor, payload = victim(number)
                assert store(client, descriptor, payload)
                assert fetch(client, descriptor) == payload
    assert not [path for path in root.rglob(".*.*") if path.is_file()]


def test_the_file_of_a_living_server_stays_and_its_store_ends_well(root: Path) -> None:
    descriptor, payload = work(1)
    with ServerProcess(root) as server, Client(server.address, timeout_s=20) as client:
        handle = client.store(descriptor, payload)
        for layer_index in descriptor.layer_order[:2]:
            handle.store_layer(layer_index)
        wait_for(lambda: len(temps(root)) == 8)
        report = run("fsck", "--root", str(root), "--repair")
        assert (report["is_clean"], report["repaired"]) == (True, 0)
        assert counts(check(root)) == {"ok": 1, "live": 8}
        for layer_index in descriptor.layer_order[2:]:
            handle.store_layer(layer_index)
        assert handle.finish().is_whole
        assert fetch(client, descriptor) == payload


def test_the_file_of_a_killed_server_goes_once_its_claim_has_expired(root: Path) -> None:
    descriptor, payload = work(1)
    server = ServerProcess(root).start()
    client = Client(server.address, timeout_s=20)
    handle = client.store(descriptor, payload)
    handle.store_layer(0)
    wait_for(lambda: len(temps(root)) == 8)
    server.kill()
    with contextlib.suppress(KvserveError):
        handle.cancel()
    client.close()
    assert counts(check(root, repairs=True)) == {"ok": 1, "live": 8}, "not provably dead yet"
    (claim,) = (root / ".servers").iterdir()
    os.utime(claim, (0, claim.stat().st_mtime - 61))
    assert counts(check(root)) == {"ok": 1, "orphan": 8}
    assert len(temps(root)) == 8
    assert check(root, repairs=True).tally.repaired == 8
    assert temps(root) == []
    assert counts(check(root)) == {"ok": 1}


def temps(root: Path) -> list[Path]:
    return [path for path in root.glob("*/*/*/*/.*") if path.is_file()]


def wait_for(is_so: object, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_repair_then_a_real_server_serves_what_is_left(root: Path) -> None:
    """The tree of every kind of damage, mended, in front of a server."""
    tree = good_tree(root)
    expected = damage(tree)
    problems = sum(kind not in ("unknown", "live") for kind, _ in expected.values())
    assert check(root, repairs=True).tally.repaired == problems
    assert check(root).tally.problems == 0
    payload = bytearray()
    for layer, size in enumerate(tree.descriptor.layout.slice_sizes):
        for index in range(tree.descriptor.chunk_count):
            payload += Random(f"layer {layer} chunk {index}").randbytes(size)
    with ServerProcess(root) as server, Client(server.address, timeout_s=20) as client:
        hits = client.lookup(tree.descriptor).hits
        assert list(hits) == [False] * 10 + [True] * 2
        assert store(client, tree.descriptor, payload)
        assert fetch(client, tree.descriptor) == payload


CHILD = """
import itertools, os, sys, threading
from kvserve.care.fsck import FsckOptions, fsck_blocking
from kvserve.fs import PosixFileSystem

class Hanging(PosixFileSystem):
    numbers = itertools.count(1)  # one for each, also of threads that open at once
    def open_read(self, path):
        if len(path.rpartition("/")[2]) == 64:
            number = next(self.numbers)
            os.write(1, (path + "\\n").encode())
            if number == int(sys.argv[2]):
                os.write(1, b"HANGS\\n")
            if number >= int(sys.argv[2]):
                threading.Event().wait()
        return super().open_read(path)

options = FsckOptions(threads=3, save_interval_s=0.0, repairs=sys.argv[3] == "repair")
fsck_blocking(Hanging(), sys.argv[1], options)
"""


@pytest.mark.parametrize("mode", ["check", "repair"])
def test_sigkill_then_resume_covers_every_file_exactly(root: Path, mode: str) -> None:
    tree = good_tree(root, 60)
    expected = damage(tree)
    (root / "lost+found" / "deep" / "file").unlink()
    files = {str(path) for path in root.rglob("?" * 64) if path.is_file()}
    opened = []
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), "30", mode], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line == "HANGS\n":
                    break
                opened.append(line.strip())
            # The thread that saves may be behind the ones that read.
            deadline = time.monotonic() + 20
            while not (root / ".fsck" / "state").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            child.kill()
    assert len(opened) >= 25
    assert (root / ".fsck" / "state").exists()
    repair = ("--repair",) if mode == "repair" else ()
    report = run("fsck", "--root", str(root), "--resume", *repair, code=1)
    assert report["resumed"]
    told = {it["path"]: it["kind"] for it in report["findings"]}  # type: ignore[index, union-attr]
    # What was mended in a directory that the kill left unfinished is in no report.
    unfinished = set(expected) - set(told)
    assert mode == "repair" or not unfinished
    assert not any(os.path.lexists(root / path) for path in unfinished)
    assert len(unfinished) <= 4
    assert set(told) == set(expected) - unfinished
    assert report["counts"]["ok"] == 51  # type: ignore[index]
    assert report["files"] == 51 + len(told)
    damaged = sum(
        kind in ("corrupt", "misplaced") and "in the place of a file" not in why
        for kind, why in expected.values()
    )
    assert len(files) == 50 + damaged
    assert not (root / ".fsck" / "state").exists()
    if mode == "repair":
        assert check(root).tally.problems == 0
