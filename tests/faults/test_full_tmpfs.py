"""A file system that is full (T4), of bytes and of inodes: a small tmpfs under a real server."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvclient import ChunkStatus
from tests.faults.mounts import Serving, Tmpfs, chunk_files, statuses, temp_files, until
from tests.payload import payload_for, small_descriptor

Serve = Callable[..., Serving]
STORED, KNOWN, NO_SPACE = ChunkStatus.STORED, ChunkStatus.KNOWN, ChunkStatus.NO_SPACE
HIT, ABSENT = ChunkStatus.HIT, ChunkStatus.MISS_ABSENT


@pytest.mark.parametrize("chunks", [32, 100, 400])
def test_more_chunks_than_fit(tmpfs: Tmpfs, serve: Serve, chunks: int) -> None:
    """The first ones are stored, the rest are NO_SPACE; with room again a retry stores the rest."""
    root = tmpfs.mount(size="1m")
    descriptor = small_descriptor(chunks=chunks)
    payload = payload_for(descriptor)
    serving = serve(root)
    ended = statuses(serving.put(descriptor, payload))
    stored = [status is STORED for status in ended]
    assert set(ended) == {STORED, NO_SPACE}
    assert stored.index(False) > 16, "a prefix is stored, not a tail that nobody can use"
    assert sum(stored) > 20, "28 would fit"
    assert serving.client.lookup(descriptor).hits == stored
    assert temp_files(root) == []
    assert len(chunk_files(root)) == sum(stored)
    size = chunk_files(root)[0].stat().st_size
    # A few pages are the names of models and servers.
    assert tmpfs.used_bytes - sum(stored) * size < 64 << 10
    assert "Traceback" not in serving.process.log()
    # What is stored stays readable on the full file system.
    expected = [HIT if is_stored else ABSENT for is_stored in stored]
    assert statuses(serving.get(descriptor, payload)) == expected
    tmpfs.resize(size="32m")
    again = statuses(serving.put(descriptor, payload))
    assert again == [KNOWN if is_stored else STORED for is_stored in stored]
    assert statuses(serving.get(descriptor, payload)) == [HIT] * chunks


def test_more_chunks_than_inodes(tmpfs: Tmpfs, serve: Serve) -> None:
    root = tmpfs.mount(size="32m", nr_inodes=40)
    descriptor = small_descriptor(chunks=64)
    payload = payload_for(descriptor)
    serving = serve(root)
    ended = statuses(serving.put(descriptor, payload))
    stored = [status is STORED for status in ended]
    assert set(ended) == {STORED, NO_SPACE}
    assert stored[0]
    assert temp_files(root) == []
    assert len(chunk_files(root)) == sum(stored)
    expected = [HIT if is_stored else ABSENT for is_stored in stored]
    assert statuses(serving.get(descriptor, payload)) == expected
    tmpfs.resize(nr_inodes=1000)
    assert set(statuses(serving.put(descriptor, payload))) == {STORED, KNOWN}
    assert statuses(serving.get(descriptor, payload)) == [HIT] * 64


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"size": "256k"}, {"size": "4m"}),
        ({"size": "1m", "nr_inodes": 40}, {"size": "4m", "nr_inodes": 1000}),
    ],
    ids=["bytes", "inodes"],
)
def test_a_server_starts_on_a_full_tree(
    tmpfs: Tmpfs, serve: Serve, limits: dict[str, object], room: dict[str, object]
) -> None:
    """It says so and serves what is stored; other models' chunks end as NO_SPACE; then all is well.

    Whoever has to start servers again just then needs their reads the most.
    """
    root = tmpfs.mount(**limits)
    descriptor = small_descriptor(chunks=4)
    payload = payload_for(descriptor)
    first = serve(root)
    assert statuses(first.put(descriptor, payload)) == [STORED] * 4
    first.end()
    fill(root)
    serving = serve(root)
    assert f"the root {root} is full" in serving.process.log()
    assert statuses(serving.get(descriptor, payload)) == [HIT] * 4
    other = small_descriptor(chunks=4, tenant="other")
    assert statuses(serving.put(other, payload)) == [NO_SPACE] * 4
    assert statuses(serving.get(other, payload)) == [ABSENT] * 4
    tmpfs.resize(**room)
    assert statuses(serving.put(other, payload)) == [STORED] * 4
    assert statuses(serving.get(other, payload)) == [HIT] * 4
    until(lambda: any((root / ".servers").iterdir()))
    assert "Traceback" not in serving.process.log()


def fill(root: Path) -> None:
    """Takes what is left: bytes and inodes."""
    with suppress(OSError), (root / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError):
        for number in range(10_000):
            (root / f"filling{number}").touch()
