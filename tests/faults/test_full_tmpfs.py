"""A file system that is full (T4), of bytes and of inodes: a small tmpfs under a real server."""

from collections.abc import Callable

import pytest

from kvclient import ChunkStatus
from tests.faults.mounts import (
    Serving,
    Tmpfs,
    chunk_file,
    chunk_files,
    statuses,
    temp_files,
)
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
    size = chunk_file(root, descriptor, stored.index(True)).stat().st_size
    # A few pages are the names of models and servers.
    assert tmpfs.used_bytes - sum(stored) * size < 64 << 10
    # What is stored stays readable on the full file system.
    expected = [HIT if is_stored else ABSENT for is_stored in stored]
    assert statuses(serving.get(descriptor, payload)) == expected
    tmpfs.resize(size="32m")
    again = statuses(serving.put(descriptor, payload))
    assert again == [KNOWN if is_stored else STORED for is_stored in stored]
    assert statuses(serving.get(descriptor, payload)) == [HIT] * chunks
