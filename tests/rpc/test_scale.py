"""Very many chunk files (T14): a start that does not wait for them, lookups that do not list them.

200,000 files in memory (/dev/shm), or 20,000 in the temporary directory where there is none;
`KVSERVE_SCALE_FILES` for another number.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import Client
from kvserve.fs import Entry, FileStat, PosixFileSystem
from kvserve.model import ChunkStatus
from kvserve.store.paths import chunk_path, fan_dirs, shard_dir
from kvserve.testing.many_chunks import (
    LOOKUP_CHUNKS,
    ManyChunks,
    many_descriptor,
    many_hashes,
)
from kvserve.testing.metrics_page import MetricsPage
from kvserve.testing.server_process import ServerProcess
from tests.trees import tree_on

_MEMORY = Path("/dev/shm")
_IN_MEMORY = os.access(_MEMORY, os.W_OK) and os.statvfs(_MEMORY).f_favail > 1_000_000
FILES = int(os.environ.get("KVSERVE_SCALE_FILES", "200000" if _IN_MEMORY else "20000"))
READY_S_MAX = 5.0
READY_S_MORE_MAX = 2.0
"""Than on an empty tree, where that alone takes so long: the interpreter and its imports are most
of a start, and wait for others on a busy machine."""
COUNTED_S_MAX = 120.0
ENTRIES_MAX = 4096

pytestmark = pytest.mark.timeout(60 + COUNTED_S_MAX + FILES / 4000)


@pytest.fixture(scope="module")
def many() -> Iterator[ManyChunks]:
    directory = Path(tempfile.mkdtemp(prefix="kvserve-scale-", dir=_MEMORY if _IN_MEMORY else None))
    try:
        chunks = ManyChunks(directory / "kv")
        chunks.grow_blocking(FILES)
        yield chunks
    finally:
        shutil.rmtree(directory)


class CountingFileSystem(PosixFileSystem):
    """Counts the calls that ask about names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def stat(self, path: str) -> FileStat | None:
        self.calls["stat"] += 1
        return super().stat(path)

    def open_read(self, path: str) -> int | None:
        self.calls["open_read"] += 1
        return super().open_read(path)

    def list_dir(self, path: str) -> list[str]:
        self.calls["list_dir"] += 1
        return super().list_dir(path)

    def scan(self, path: str) -> Iterator[Entry]:
        self.calls["scan"] += 1
        return super().scan(path)


def test_a_lookup_asks_for_each_unknown_chunk_once_and_lists_nothing(many: ManyChunks) -> None:
    fs = CountingFileSystem()
    store = tree_on(many.root, fs).store
    fs.calls.clear()
    known = store.locate(many_descriptor(many_hashes(0, LOOKUP_CHUNKS)))
    absent = store.locate(many_descriptor(many_hashes(FILES, FILES + LOOKUP_CHUNKS)))
    for where, status in ((known, ChunkStatus.HIT), (absent, ChunkStatus.MISS_ABSENT)):
        asked = store.unknown(where)
        assert len(asked) == LOOKUP_CHUNKS
        assert {store.status_blocking(where, index).status for index in asked} == {status}
        assert fs.calls == {"stat": LOOKUP_CHUNKS}
        fs.calls.clear()
    assert store.unknown(known) == {}, "known by now: a second lookup costs nothing"


def test_no_directory_grows_beyond_4096_entries(many: ManyChunks) -> None:
    """The fans of a shard are as many as that; ten million chunks spread evenly over them."""
    assert many.entries_max_blocking() <= ENTRIES_MAX
    shard = shard_dir(many_descriptor(many_hashes(0, 1)).key(0))
    assert len(fan_dirs(shard)) <= ENTRIES_MAX
    in_fan = Counter(
        chunk_path(shard, chunk_hash).rsplit("/", 1)[0] for chunk_hash in many_hashes(0, FILES)
    )
    mean = FILES / len(fan_dirs(shard))
    # Chance alone makes a spread of the root of the mean; six times that is no chance.
    fullest = max(in_fan.values())
    assert fullest < mean + 6 * mean**0.5 + 6
    of_ten_million = 10_000_000 / len(fan_dirs(shard))
    assert of_ten_million + 6 * of_ten_million**0.5 < ENTRIES_MAX


def ready_on_an_empty_tree_s(root: Path) -> float:
    started = time.monotonic()
    with ServerProcess(root) as process, Client(process.address) as client:
        client.lookup(many_descriptor(many_hashes(0, LOOKUP_CHUNKS)))
        return time.monotonic() - started


def test_a_server_answers_before_it_has_counted_and_counts_right(
    many: ManyChunks, root: Path
) -> None:
    empty_s = ready_on_an_empty_tree_s(root)
    page = MetricsPage()
    started = time.monotonic()
    with (
        ServerProcess(many.root, settings=(page.setting,)) as process,
        Client(process.address) as client,
    ):
        assert client.lookup(many_descriptor(many_hashes(0, LOOKUP_CHUNKS))).prefix_chunks == 64
        ready_s = time.monotonic() - started
        assert ready_s < max(READY_S_MAX, empty_s + READY_S_MORE_MAX)
        assert page.value_blocking("kvserve_stored_chunks") < FILES, "counted before it answered"
        lookups = 0
        while page.value_blocking("kvserve_stored_chunks") != FILES:
            assert time.monotonic() - started < COUNTED_S_MAX, "the count does not end"
            start = lookups * LOOKUP_CHUNKS % (FILES - LOOKUP_CHUNKS)
            asked = many_descriptor(many_hashes(start, start + LOOKUP_CHUNKS))
            assert client.lookup(asked).prefix_chunks == LOOKUP_CHUNKS
            lookups += 1
            time.sleep(0.05)
        counted_s = time.monotonic() - started
        ready = f"ready {ready_s:.2f} s ({empty_s:.2f} s on an empty tree)"
        print(f"{FILES} files: {ready}, counted {counted_s:.1f} s, {lookups} lookups")
        assert page.value_blocking("kvserve_stored_bytes") == many.size_bytes
        found = subprocess.run(
            ["find", str(many.root), "-type", "f", "-name", "?" * 64, "-printf", "%s\n"],
            capture_output=True,
            check=True,
        )
        sizes = [int(size) for size in found.stdout.split()]
        assert (len(sizes), sum(sizes)) == (FILES, many.size_bytes)
