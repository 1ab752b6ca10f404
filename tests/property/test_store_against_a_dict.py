"""The chunk store against a dict, under any sequence of puts, deletes, damage and restarts.

The model: a chunk is absent, whole or damaged. Two stores work on one tree, as two servers do, and
see the same. Whatever happened before, a read gives the original bytes or a miss.
"""

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvserve.format.chunk_file import checksum
from kvserve.model import ChunkStatus, Verdict
from kvserve.store.chunk_store import ChunkStore
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from tests.trees import tree_on
from tests.unit.samples import SMALL, descriptor_of, slice_of

CHUNKS = 4
DESCRIPTOR = descriptor_of(CHUNKS)
LAYERS = range(SMALL.layer_count)
chunk_indexes = st.integers(0, CHUNKS - 1)
servers = st.integers(0, 1)


def slices_of(index: int) -> list[bytes]:
    return [slice_of(layer, index, SMALL.slice_sizes[layer]) for layer in LAYERS]


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one tree, few descriptors each, so that both ways of reading are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(prefix="kvserve-test-"))
        self.baseline = len(os.listdir("/proc/self/fd"))
        self.stores = [self._store(), self._store()]
        self.whole: set[int] = set()
        self.damaged: set[int] = set()
        self.writers: list[tuple[int, ChunkWriter]] = []

    writing = Bundle("writing")

    def _store(self) -> ChunkStore:
        return tree_on(self.root, open_files_max=2).store

    def _path(self, index: int) -> Path:
        return Path(self.stores[0].locate(DESCRIPTOR).path(index))

    def _read(self, server: int, index: int) -> list[bytes] | Verdict:
        store = self.stores[server]
        chunk = store.open_blocking(store.locate(DESCRIPTOR), index)
        if isinstance(chunk, Verdict):
            return chunk
        try:
            return self._slices(store, chunk)
        finally:
            store.open_chunks.release(chunk)

    def _slices(self, store: ChunkStore, chunk: OpenChunk) -> list[bytes] | Verdict:
        slices = []
        for layer in LAYERS:
            buffer = bytearray(SMALL.slice_sizes[layer])
            fault = store.read_blocking(chunk, layer, 0, memoryview(buffer))
            if fault is None and checksum(buffer) != chunk.checksums[layer]:
                fault = Verdict(ChunkStatus.MISS_CORRUPT, "checksum")
            if fault is not None:
                if fault.status is ChunkStatus.MISS_CORRUPT:
                    store.reject_blocking(chunk)
                return fault
            slices.append(bytes(buffer))
        return slices

    @rule(target=writing, server=servers, index=chunk_indexes)
    def begin(self, server: int, index: int) -> tuple[int, ChunkWriter]:
        store = self.stores[server]
        writer = store.writer(store.locate(DESCRIPTOR), index)

        writer.write_blocking(0, 0, memoryview(slices_of(index)[0]))
        self.writers.append((index, writer))
        return index, writer

    @rule(begun=writing)
    def commit(self, begun: tuple[int, ChunkWriter]) -> None:
        if begun not in self.writers:
            return
        index, writer = begun
        self.writers.remove(begun)
        slices = slices_of(index)
        writer.write_blocking(1, 0, memoryview(slices[1]))
        writer.commit_blocking([checksum(data) for data in slices])
        self.whole.add(index)
        self.damaged.discard(index)

    @rule(begun=writing)
    def abandon(self, begun: tuple[int, ChunkWriter]) -> None:
        begun[1].abandon_blocking()
        if begun in self.writers:
            self.writers.remove(begun)

    @rule(server=servers, index=chunk_indexes)
    def delete(self, server: int, index: int) -> None:
        store = self.stores[server]
        found = store.delete_blocking(store.locate(DESCRIPTOR), index)
        was_there = index in self.whole or index in self.damaged
        assert found is (ChunkStatus.DELETED if was_there else ChunkStatus.MISS_ABSENT)
        self.whole.discard(index)
        self.damaged.discard(index)

    @rule(index=chunk_indexes, size=st.integers(0, 12_287))
    def truncate(self, index: int, size: int) -> None:
        if index in self.whole | self.damaged:
            os.truncate(self._path(index), size)
            self._now_damaged(index)

    @rule(index=chunk_indexes, layer=st.sampled_from(LAYERS), at=st.integers(0, 255))
    def flip(self, index: int, layer: int, at: int) -> None:
        if index in self.whole:
            offset = 4096 * (layer + 1) + at
            with self._path(index).open("r+b") as file:
                file.seek(offset)
                old = file.read(1)
                file.seek(offset)
                file.write(bytes([old[0] ^ 0xFF]))
            self._now_damaged(index)

    def _now_damaged(self, index: int) -> None:
        self.whole.discard(index)
        self.damaged.add(index)

    @rule(server=servers, index=chunk_indexes)
    def read(self, server: int, index: int) -> None:
        """Original bytes or a miss; a file still open may outlive its name, never its bytes."""
        found = self._read(server, index)
        if index in self.whole:
            # A store that still has an older, damaged file of this name open says so once, and may
            # set aside what has the name now (tests/contract/test_damage.py has the case).
            if isinstance(found, Verdict):
                assert found.status is ChunkStatus.MISS_CORRUPT
                if not self._path(index).exists():
                    self.whole.discard(index)
            else:
                assert found == slices_of(index)
            return
        if isinstance(found, list):
            assert found == slices_of(index), "wrong bytes were delivered as good"
        elif index in self.damaged and not self._path(index).exists():
            self.damaged.discard(index)

    @rule(server=servers, index=chunk_indexes)
    def lookup(self, server: int, index: int) -> None:
        store = self.stores[server]
        status = store.status_blocking(store.locate(DESCRIPTOR), index).status
        if index in self.whole:
            assert status is ChunkStatus.HIT
        elif index in self.damaged:
            assert status in (ChunkStatus.HIT, ChunkStatus.MISS_CORRUPT), "by size alone"
        else:
            assert status is ChunkStatus.MISS_ABSENT

    @rule(server=servers)
    def restart(self, server: int) -> None:
        self.stores[server].open_chunks.close_idle_blocking()
        self.stores[server] = self._store()

    @invariant()
    def only_chunks_and_open_writers_have_files(self) -> None:
        names = [
            path.name
            for path in self.root.rglob("*")
            if path.is_file() and ".quarantine" not in path.parts
        ]
        chunks = sorted(name for name in names if not name.startswith("."))
        wanted = self.whole | self.damaged
        assert chunks == sorted(DESCRIPTOR.chunk_hashes[index].hex() for index in wanted)
        assert len(names) - len(chunks) == len(self.writers)

    def teardown(self) -> None:
        for _, writer in self.writers:
            writer.abandon_blocking()
        for store in self.stores:
            store.open_chunks.close_idle_blocking()
        shutil.rmtree(self.root)
        assert len(os.listdir("/proc/self/fd")) == self.baseline, "descriptors leaked"


TestStoreAgainstADict = StoreMachine.TestCase
TestStoreAgainstADict.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
