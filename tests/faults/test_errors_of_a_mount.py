"""A mount that answers with errors or lies: a FUSE file system under a real server.

Every fault is one chunk's; the others are compared byte by byte (`Serving.get`).
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvclient import ChunkStatus, StorageUnavailable
from kvserve.testing.fuse_faults import Fault
from kvserve.testing.fuse_mount import FaultyMount
from tests.faults.mounts import Case, Serving, chunk_files, statuses, temp_files, until

Serve = Callable[..., Serving]
STORED, KNOWN = ChunkStatus.STORED, ChunkStatus.KNOWN
HIT, ABSENT, ERROR = ChunkStatus.HIT, ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_ERROR
CORRUPT = ChunkStatus.MISS_CORRUPT


def assert_recovers(case: Case) -> None:
    """Without the fault: a hit, or a miss that still has its reason; after a put all are hits."""
    for verdict in case.get():
        assert verdict.status is HIT or (verdict.status is ERROR and verdict.message)
    assert all(status.is_stored for status in statuses(case.put()))
    assert statuses(case.get()) == [HIT] * 8


def drop_page_cache(tree: Path) -> None:
    """Of the files in it, for everyone."""
    for path in chunk_files(tree):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@pytest.fixture
def stored(case: Case) -> Case:
    """All chunks are stored, none is open."""
    assert statuses(case.put()) == [STORED] * 8
    return case


class TestReading:
    @pytest.mark.parametrize("error", ["EIO", "ESTALE", "ETIMEDOUT"])
    @pytest.mark.parametrize("skip", [0, 2], ids=["header", "slice"])
    def test_a_read_fails(self, stored: Case, error: str, skip: int) -> None:
        """That chunk is a miss with the errno, the others are whole; without the fault, a hit."""
        stored.mount.inject(Fault("read", stored.bad_file, error=error, skip=skip))
        verdicts = stored.get()
        assert statuses(verdicts) == stored.all_but(ERROR, HIT)
        assert error in verdicts[stored.bad].message
        stored.mount.heal()
        assert_recovers(stored)

    def test_a_read_of_an_open_file_fails(self, stored: Case) -> None:
        """As after a fail-over: the file is there, the descriptor of it is no good any more."""
        assert statuses(stored.get()) == [HIT] * 8
        stored.mount.inject(Fault("read", stored.bad_file, error="EIO"))
        assert statuses(stored.get()) == stored.all_but(ERROR, HIT)
        stored.mount.heal()
        assert_recovers(stored)

    @pytest.mark.parametrize("error", ["EIO", "EACCES"])
    def test_a_file_cannot_be_opened(self, stored: Case, error: str) -> None:
        stored.mount.inject(Fault("open", stored.bad_file, error=error))
        verdicts = stored.get()
        assert statuses(verdicts) == stored.all_but(ERROR, HIT)
        assert error in verdicts[stored.bad].message
        stored.mount.heal()
        assert_recovers(stored)

    def test_a_file_cannot_be_looked_at(self, stored: Case) -> None:
        stored.mount.inject(Fault("getattr", stored.bad_file, error="EIO"))
        verdicts = stored.serving.client.lookup(stored.descriptor).verdicts
        assert statuses(verdicts) == stored.all_but(ERROR, HIT)
        assert "EIO" in verdicts[stored.bad].message
        stored.mount.heal()
        assert_recovers(stored)

    def test_short_reads_are_continued(self, stored: Case) -> None:
        """A read may return less than asked for without being at the end."""
        stored.mount.inject(Fault("read", halves=True))
        assert statuses(stored.get()) == [HIT] * 8
        assert stored.mount.struck()[0] > 100

    def test_with_page_cache(self, cached_mount: FaultyMount, serve: Serve) -> None:
        """What the kernel holds is served without a read; what it must ask for is a miss."""
        serving = serve(cached_mount.path)
        held, other = (Case(cached_mount, serving, name) for name in ("held", "other"))
        for case in (held, other):
            assert statuses(case.put()) == [STORED] * 8
        subprocess.run(["sync"], check=True)
        drop_page_cache(cached_mount.path)
        assert statuses(held.get()) == [HIT] * 8
        cached_mount.inject(Fault("read", error="EIO"))
        assert statuses(held.get()) == [HIT] * 8
        assert cached_mount.struck() == [0]
        assert statuses(other.get()) == [ERROR] * 8
        cached_mount.heal()
        assert_recovers(other)

    def test_a_file_that_is_cut(self, stored: Case) -> None:
        path = stored.stored_file()
        os.truncate(path, path.stat().st_size // 2)
        assert statuses(stored.get()) == stored.all_but(CORRUPT, HIT)
        self._heals(stored)

    def test_flipped_bits(self, stored: Case) -> None:
        """Never delivered; the file goes to quarantine and a put heals the chunk."""
        stored.mount.inject(Fault("read", stored.bad_file, flips=True, skip=2))
        assert statuses(stored.get()) == stored.all_but(CORRUPT, HIT)
        stored.mount.heal()
        self._heals(stored)

    def test_quarantine_fails(self, stored: Case) -> None:
        """A damaged file that cannot be moved away is reported and stays a miss."""
        stored.mount.inject(
            Fault("read", stored.bad_file, flips=True, skip=2),
            Fault("rename", "/.quarantine/*", error="EIO"),
        )
        for _ in range(2):
            assert statuses(stored.get()) == stored.all_but(CORRUPT, HIT)
        assert "a damaged chunk stays at its place" in stored.serving.process.log()
        assert stored.quarantined() == []
        stored.mount.inject(Fault("read", stored.bad_file, flips=True, skip=2))
        assert statuses(stored.get()) == stored.all_but(CORRUPT, HIT)
        stored.mount.heal()
        self._heals(stored)

    def test_statfs_is_not_asked_while_serving(self, stored: Case) -> None:
        """It may wait for every storage target; asked on the event loop, all would wait."""
        stored.get()
        stored.mount.inject(Fault("statfs", delay_s=0.0))
        assert statuses(stored.get()) == [HIT] * 8
        assert stored.mount.struck() == [0]

    def _heals(self, case: Case) -> None:
        assert len(case.quarantined()) == 1
        assert case.hits() == [it != case.bad for it in range(8)]
        assert statuses(case.put()) == case.all_but(STORED, KNOWN)
        assert statuses(case.get()) == [HIT] * 8


FAILING_WRITES = [
    ("create", "EIO", 0),
    ("write", "EIO", 0),
    ("write", "EIO", 4),
    ("write", "ESTALE", 5),
    ("write", "ENOSPC", 2),
    ("write", "EDQUOT", 2),
    ("fsync", "EIO", 0),
    ("fsync", "ENOSPC", 0),
    ("flush", "EIO", 0),
    ("flush", "EDQUOT", 0),
    ("rename", "EIO", 0),
]


class TestWriting:
    @pytest.mark.parametrize(("on", "error", "skip"), FAILING_WRITES)
    def test_one_chunk_cannot_be_written(self, case: Case, on: str, error: str, skip: int) -> None:
        """Its verdict says so, the others are stored; nothing is left; a put works at once."""
        case.mount.inject(Fault(on, case.bad_file, error=error, skip=skip))
        verdicts = case.put()
        is_full = error in ("ENOSPC", "EDQUOT")
        stored = [status is STORED for status in statuses(verdicts)]
        assert not stored[case.bad]
        # A chunk without space has later ones make room, in vain here.
        assert all(stored[: case.bad] if is_full else stored[: case.bad] + stored[case.bad + 1 :])
        for verdict in verdicts:
            if verdict.status is not STORED:
                status = ChunkStatus.NO_SPACE if is_full else ChunkStatus.STORE_ERROR
                assert verdict.status is status
                assert error in verdict.message
        assert temp_files(case.tree) == []
        assert len(chunk_files(case.tree)) == sum(stored)
        assert case.hits() == stored
        case.mount.heal()
        assert statuses(case.put()) == [KNOWN if it else STORED for it in stored]
        assert statuses(case.get()) == [HIT] * 8

    def test_a_directory_cannot_be_synced(self, case: Case) -> None:
        """A name that may not survive power loss is not acknowledged, and not answered later."""
        assert statuses(case.put()) == [STORED] * 8
        case.serving.client.delete(case.descriptor)
        case.mount.inject(Fault("fsyncdir", f"/{case.tree.name}/*/0of1/*", error="EIO", count=1))
        ended = statuses(case.put())
        assert sorted(ended) == [STORED] * 7 + [ChunkStatus.STORE_ERROR]
        assert case.hits() == [it is STORED for it in ended]
        assert temp_files(case.tree) == []

    def test_a_directory_cannot_be_made(self, case: Case) -> None:
        case.mount.inject(Fault("mkdir", f"/{case.tree.name}/*/0of1/*", error="EIO", count=1))
        ended = statuses(case.put())
        assert sorted(ended) == [STORED] * 7 + [ChunkStatus.STORE_ERROR]
        case.mount.heal()
        assert set(statuses(case.put())) == {STORED, KNOWN}

    def test_short_writes_are_continued(self, case: Case) -> None:
        case.mount.inject(Fault("write", case.bad_file, halves=True))
        assert statuses(case.put()) == [STORED] * 8
        assert case.mount.struck()[0] > 10
        assert statuses(case.get()) == [HIT] * 8

    def test_what_cannot_be_removed_is_removed_later(self, case: Case) -> None:
        """A write fails and so does the clearing up: reported, and made good by upkeep."""
        case.mount.inject(
            Fault("write", case.bad_file, error="EIO", skip=3),
            Fault("unlink", case.bad_file, error="EIO"),
        )
        assert statuses(case.put()) == case.all_but(ChunkStatus.STORE_ERROR, STORED)
        assert len(temp_files(case.tree)) == 1
        assert "what was written of a failed chunk stays for now" in case.serving.process.log()
        case.mount.heal()
        assert statuses(case.put()) == case.all_but(STORED, KNOWN)
        until(lambda: not temp_files(case.tree))
        assert statuses(case.get()) == [HIT] * 8

    def test_a_chunk_cannot_be_deleted(self, stored: Case) -> None:
        """The caller is told, and the chunk is as readable as before; later it works."""
        stored.mount.inject(Fault("unlink", stored.bad_file, error="EIO"))
        with pytest.raises(StorageUnavailable, match="EIO"):
            stored.serving.client.delete(stored.descriptor)
        assert statuses(stored.get())[stored.bad] is HIT
        stored.mount.heal()
        stored.serving.client.delete(stored.descriptor)
        assert statuses(stored.get()) == [ABSENT] * 8
