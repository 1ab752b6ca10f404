"""A mount that answers with errors, lies or is slow: a FUSE file system under a real server.

Every fault is one chunk's; the others are compared byte by byte (`Serving.get`).
"""

import os
from collections.abc import Callable

import pytest

from kvclient import ChunkStatus, Descriptor, StorageUnavailable
from kvserve.testing.fuse_faults import Fault
from kvserve.testing.fuse_mount import FaultyMount
from tests.faults.mounts import (
    Serving,
    chunk_file,
    chunk_files,
    statuses,
    temp_files,
    until,
)
from tests.payload import payload_for, small_descriptor

Serve = Callable[..., Serving]
DESCRIPTOR = small_descriptor()
PAYLOAD = payload_for(DESCRIPTOR)
BAD = 3
STORED, KNOWN = ChunkStatus.STORED, ChunkStatus.KNOWN
HIT, ABSENT, ERROR = ChunkStatus.HIT, ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_ERROR
POWER = ("store.durability=power", "store.owner_lease_s=1", "store.known_ttl_s=0")


def all_but(one: ChunkStatus, others: ChunkStatus, chunk: int = BAD) -> list[ChunkStatus]:
    return [one if it == chunk else others for it in range(DESCRIPTOR.chunk_count)]


def named(descriptor: Descriptor, chunk: int = BAD) -> str:
    """A pattern for the chunk's file, under its temporary name too."""
    return f"*{descriptor.chunk_hashes[chunk].hex()}*"


@pytest.fixture
def stored(mount: FaultyMount, serve: Serve) -> Serving:
    """A server on the mount that has all of `DESCRIPTOR`; nothing is open or known."""
    serving = serve(mount.path, *POWER)
    assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [STORED] * 8
    return serving


class TestReading:
    @pytest.mark.parametrize("error", ["EIO", "ESTALE", "ETIMEDOUT"])
    @pytest.mark.parametrize("skip", [0, 2], ids=["header", "slice"])
    def test_a_read_fails(self, mount: FaultyMount, stored: Serving, error: str, skip: int) -> None:
        """That chunk is a miss with the errno, the others are whole; without the fault, a hit."""
        mount.inject(Fault("read", named(DESCRIPTOR), error=error, skip=skip))
        verdicts = stored.get(DESCRIPTOR, PAYLOAD)
        assert statuses(verdicts) == all_but(ERROR, HIT)
        assert error in verdicts[BAD].message
        mount.heal()
        assert statuses(stored.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8

    def test_a_read_fails_with_page_cache(self, cached_mount: FaultyMount, serve: Serve) -> None:
        """What the kernel has is served, what it must ask for is a miss."""
        serving = serve(cached_mount.path, *POWER)
        serving.put(DESCRIPTOR, PAYLOAD)
        other = small_descriptor(first_token=5000)
        serving.put(other, PAYLOAD)
        assert statuses(serving.get(other, PAYLOAD)) == [HIT] * 8
        cached_mount.inject(Fault("read", error="EIO"))
        os.system("sync")
        verdicts = serving.get(DESCRIPTOR, PAYLOAD)
        assert set(statuses(verdicts)) <= {HIT, ERROR}
        assert statuses(serving.get(other, PAYLOAD)) == [HIT] * 8
        cached_mount.heal()
        assert statuses(serving.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8

    @pytest.mark.parametrize("on", ["open", "getattr"])
    def test_a_file_cannot_be_opened(self, mount: FaultyMount, stored: Serving, on: str) -> None:
        mount.inject(Fault(on, named(DESCRIPTOR), error="EIO"))
        verdicts = stored.get(DESCRIPTOR, PAYLOAD)
        assert statuses(verdicts) == all_but(ERROR, HIT)
        assert "EIO" in verdicts[BAD].message
        if on == "getattr":
            looked = stored.client.lookup(DESCRIPTOR).verdicts
            assert statuses(looked) == all_but(ERROR, HIT)
        mount.heal()
        assert statuses(stored.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8

    def test_short_reads_are_continued(self, mount: FaultyMount, stored: Serving) -> None:
        """A read may return less than asked for without being at the end."""
        mount.inject(Fault("read", halves=True, count=40))
        assert statuses(stored.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8
        assert mount.struck()[0] > 30

    def test_a_file_that_is_cut(self, mount: FaultyMount, stored: Serving) -> None:
        path = chunk_file(mount.backing, DESCRIPTOR, BAD)
        os.truncate(path, path.stat().st_size // 2)
        verdicts = stored.get(DESCRIPTOR, PAYLOAD)
        assert statuses(verdicts) == all_but(ChunkStatus.MISS_CORRUPT, HIT)
        self._heals(mount, stored)

    def test_flipped_bits(self, mount: FaultyMount, stored: Serving) -> None:
        """Never delivered; the file is in quarantine and a put heals the chunk."""
        mount.inject(Fault("read", named(DESCRIPTOR), flips=True, skip=2))
        verdicts = stored.get(DESCRIPTOR, PAYLOAD)
        assert statuses(verdicts) == all_but(ChunkStatus.MISS_CORRUPT, HIT)
        mount.heal()
        self._heals(mount, stored)

    def test_quarantine_fails(self, mount: FaultyMount, stored: Serving) -> None:
        """A damaged file that cannot be moved away stays a miss, and a put still heals it."""
        path = chunk_file(mount.backing, DESCRIPTOR, BAD)
        with path.open("r+b") as file:
            file.seek(-9000, os.SEEK_END)
            file.write(b"rot")
        mount.inject(Fault("rename", "*quarantine*", error="EIO"))
        for _ in range(2):
            verdicts = stored.get(DESCRIPTOR, PAYLOAD)
            assert statuses(verdicts) == all_but(ChunkStatus.MISS_CORRUPT, HIT)
        assert "quarantine" in stored.process.log()
        mount.heal()
        stored.get(DESCRIPTOR, PAYLOAD)
        self._heals(mount, stored)

    def _heals(self, mount: FaultyMount, stored: Serving) -> None:
        assert len(list((mount.backing / ".quarantine").iterdir())) == 1
        assert statuses(stored.client.lookup(DESCRIPTOR).verdicts) == all_but(ABSENT, HIT)
        assert statuses(stored.put(DESCRIPTOR, PAYLOAD)) == all_but(STORED, KNOWN)
        assert statuses(stored.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8


class TestWriting:
    @pytest.mark.parametrize(
        "fault",
        [
            Fault("create", named(DESCRIPTOR), error="EIO"),
            Fault("write", named(DESCRIPTOR), error="EIO"),
            Fault("write", named(DESCRIPTOR), error="EIO", skip=5),
            Fault("write", named(DESCRIPTOR), error="ENOSPC", skip=2),
            Fault("write", named(DESCRIPTOR), error="EDQUOT", skip=2),
            Fault("fsync", named(DESCRIPTOR), error="EIO"),
            Fault("fsync", named(DESCRIPTOR), error="ENOSPC"),
            Fault("flush", named(DESCRIPTOR), error="EIO"),
            Fault("flush", named(DESCRIPTOR), error="EDQUOT"),
            Fault("rename", named(DESCRIPTOR), error="EIO"),
        ],
        ids=lambda fault: f"{fault.on}-{fault.error}-{fault.skip}",
    )
    def test_one_chunk_cannot_be_written(
        self, mount: FaultyMount, serve: Serve, fault: Fault
    ) -> None:
        """Its verdict says so, the others are stored; nothing is left; a put works at once."""
        serving = serve(mount.path, *POWER)
        mount.inject(fault)
        verdicts = serving.put(DESCRIPTOR, PAYLOAD)
        is_full = fault.error in ("ENOSPC", "EDQUOT")
        failed = [it for it, verdict in enumerate(verdicts) if not verdict.status.is_stored]
        assert BAD in failed
        if not is_full:
            assert failed == [BAD]
        for chunk in failed:
            status = ChunkStatus.NO_SPACE if is_full else ChunkStatus.STORE_ERROR
            assert verdicts[chunk].status is status
            assert fault.error in verdicts[chunk].message
        assert temp_files(mount.backing) == []
        assert len(chunk_files(mount.backing)) == 8 - len(failed)
        hits = [status is STORED for status in statuses(verdicts)]
        assert serving.client.lookup(DESCRIPTOR).hits == hits
        mount.heal()
        assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [
            KNOWN if it else STORED for it in hits
        ]
        assert statuses(serving.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8

    def test_a_directory_cannot_be_synced(self, mount: FaultyMount, serve: Serve) -> None:
        """A name that may not survive power loss is not acknowledged, and not answered later."""
        serving = serve(mount.path, *POWER)
        assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [STORED] * 8
        serving.client.delete(DESCRIPTOR)
        directory = next(mount.backing.rglob("0of1")).relative_to(mount.backing)
        mount.inject(Fault("fsyncdir", f"/{directory}/*", error="EIO", count=1))
        ended = statuses(serving.put(DESCRIPTOR, PAYLOAD))
        assert sorted(ended) == [STORED] * 7 + [ChunkStatus.STORE_ERROR]
        assert serving.client.lookup(DESCRIPTOR).hits == [it is STORED for it in ended]
        assert temp_files(mount.backing) == []

    def test_short_writes_are_continued(self, mount: FaultyMount, serve: Serve) -> None:
        serving = serve(mount.path, *POWER)
        mount.inject(Fault("write", named(DESCRIPTOR), halves=True))
        assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == [STORED] * 8
        assert mount.struck()[0] > 10
        assert statuses(serving.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8

    def test_what_cannot_be_removed_is_removed_later(
        self, mount: FaultyMount, serve: Serve
    ) -> None:
        """A write fails and so does the clearing up: reported, and made good by upkeep."""
        serving = serve(mount.path, *POWER)
        mount.inject(
            Fault("write", named(DESCRIPTOR), error="EIO", skip=3),
            Fault("unlink", named(DESCRIPTOR), error="EIO"),
        )
        ended = statuses(serving.put(DESCRIPTOR, PAYLOAD))
        assert ended == all_but(ChunkStatus.STORE_ERROR, STORED)
        assert len(temp_files(mount.backing)) == 1
        assert "unlink" in serving.process.log()
        mount.heal()
        assert statuses(serving.put(DESCRIPTOR, PAYLOAD)) == all_but(STORED, KNOWN)
        until(lambda: not temp_files(mount.backing))
        assert statuses(serving.get(DESCRIPTOR, PAYLOAD)) == [HIT] * 8

    def test_a_chunk_cannot_be_deleted(self, mount: FaultyMount, stored: Serving) -> None:
        """The caller is told; the others' fate is theirs; later it works."""
        mount.inject(Fault("unlink", named(DESCRIPTOR), error="EIO"))
        with pytest.raises(StorageUnavailable, match="EIO"):
            stored.client.delete(DESCRIPTOR)
        mount.heal()
        assert statuses(stored.get(DESCRIPTOR, PAYLOAD))[BAD] is HIT
        stored.client.delete(DESCRIPTOR)
        assert statuses(stored.get(DESCRIPTOR, PAYLOAD)) == [ABSENT] * 8
