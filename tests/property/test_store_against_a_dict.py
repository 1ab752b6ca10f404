"""The chunk store against a dict, under any sequence of puts, deletes, evictions, leases, pins,
damage, failing file calls and restarts.

The model: a chunk is absent, whole or damaged; it may be pinned, or leased by requests. Two stores
work on one tree, as two servers do, and see the same. Whatever happened before, a read gives the
original bytes or a miss, and a chunk that was acknowledged is there unless it was deleted, evicted
or damaged. Eviction takes neither what is pinned nor what was a hit of a lease.
"""

import os
import shutil
from itertools import permutations
from pathlib import Path
from string import ascii_lowercase
from tempfile import mkdtemp

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvserve.errors import StorageError
from kvserve.format.chunk_file import checksum
from kvserve.model import ChunkStatus, Verdict
from kvserve.open_tree import OpenTree
from kvserve.store.chunk_store import HIT, ChunkStore
from kvserve.store.evict import EvictionResult
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from kvserve.testing.faulty_fs import CHANGING, READING, FaultyFileSystem
from tests.descriptors import open_files
from tests.trees import tree_on
from tests.unit.samples import SMALL, descriptor_of, slice_of

CHUNKS = 4
DESCRIPTOR = descriptor_of(CHUNKS)
LAYERS = range(SMALL.layer_count)
chunk_indexes = st.integers(0, CHUNKS - 1)
servers = st.integers(0, 1)
requests = st.sampled_from("rs")


def slices_of(index: int) -> list[bytes]:
    return [slice_of(layer, index, SMALL.slice_sizes[layer]) for layer in LAYERS]


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one tree, few descriptors each, so that both ways of reading are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(prefix="kvserve-test-"))
        self.baseline = open_files()
        # A server that starts again has another tag.
        self.tags = (f"{one}{other.upper()}3" for one, other in permutations(ascii_lowercase, 2))
        self.trees = [self._tree(), self._tree()]
        self.leased: dict[tuple[int, str], set[int]] = {}
        self.pinned: set[int] = set()
        self.whole: set[int] = set()
        self.damaged: set[int] = set()
        self.writers: list[tuple[int, ChunkWriter]] = []

    writing = Bundle("writing")

    @property
    def stores(self) -> list[ChunkStore]:
        return [tree.store for tree in self.trees]

    def _tree(self) -> OpenTree:
        fs = FaultyFileSystem(verbs=READING | CHANGING)
        return tree_on(self.root, fs, tag=next(self.tags), open_files_max=2)

    def _gone(self, index: int) -> None:
        self.whole.discard(index)
        self.damaged.discard(index)
        self.pinned.discard(index)
        for hits in self.leased.values():
            hits.discard(index)

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
            fault = store.read_blocking(chunk, [(layer, 0, memoryview(buffer))])
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
        self._gone(index)

    def _evict(self, server: int, index: int) -> int:
        result = EvictionResult()
        directory = str(self._path(index).parent)
        self.trees[server].evictor.expire_blocking(directory, 0.0, result)
        return result.evicted.files

    def _may_go(self, index: int) -> bool:
        is_leased = any(index in hits for hits in self.leased.values())
        return not is_leased and index not in self.pinned

    @rule(server=servers, index=chunk_indexes)
    def evict(self, server: int, index: int) -> None:
        was_there = index in self.whole | self.damaged
        assert self._evict(server, index) == (was_there and self._may_go(index))
        if self._may_go(index):
            self._gone(index)

    def _lease(self, server: int, request: str, indexes: set[int]) -> None:
        tree, where = self.trees[server], self.stores[server].locate(DESCRIPTOR)
        keys = [where.known_key(index) for index in indexes]
        # Named for the server: a release at one is a release at all.
        owner = (DESCRIPTOR.tenant, f"{request}{server}")
        tree.exchange.grant_blocking(owner, where.shard, keys, 600.0)
        hits = {it for it in indexes if tree.store.leased_status_blocking(where, it) is HIT}
        tree.exchange.narrow(owner, where.shard, [where.known_key(it) for it in hits])
        self.leased[server, request] = hits

    @rule(server=servers, request=requests, indexes=st.sets(chunk_indexes))
    def lease(self, server: int, request: str, indexes: set[int]) -> None:
        self._lease(server, request, indexes)
        hits = self.leased[server, request]
        assert self.whole & indexes <= hits <= (self.whole | self.damaged)

    @rule(server=servers, request=requests)
    def release(self, server: int, request: str) -> None:
        """And tells it, so that the model need not know what others still believe."""
        exchange = self.trees[server].exchange
        exchange.release((DESCRIPTOR.tenant, f"{request}{server}"))
        exchange.tell_blocking()
        self.leased.pop((server, request), None)

    @rule(server=servers)
    def tell(self, server: int) -> None:
        self.trees[server].exchange.tell_blocking()
        self.trees[server].exchange.read_departures_blocking()

    @rule(server=servers, index=chunk_indexes, is_pinned=st.booleans())
    def pin(self, server: int, index: int, is_pinned: bool) -> None:
        store = self.stores[server]
        found = store.pin_blocking(store.locate(DESCRIPTOR), index, is_pinned=is_pinned)
        if index not in self.whole | self.damaged:
            assert found in (ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_EVICTED)
            return
        assert found is (ChunkStatus.PINNED if is_pinned else ChunkStatus.UNPINNED)
        (self.pinned.add if is_pinned else self.pinned.discard)(index)

    @rule(
        server=servers,
        index=chunk_indexes,
        what=st.sampled_from(["put", "delete", "evict", "lease", "read", "lookup"]),
        number=st.integers(1, 20),
    )
    def something_with_a_failing_call(
        self, server: int, index: int, what: str, number: int
    ) -> None:
        """It happened or it did not; what was acknowledged before is there."""
        fs = self.trees[server].store.fs
        assert isinstance(fs, FaultyFileSystem)
        fs.fails_at = len(fs.calls) + number
        is_acknowledged = False
        try:
            self._do(server, index, what)
            is_acknowledged = True
        except StorageError:
            assert fs.has_failed
        finally:
            fs.fails_at = 0
        self.stores[server].left_writers.remove_blocking()
        self.trees[server].evictor._stubborn.clear()
        is_there = self._path(index).exists()
        if what == "put" and is_there and (is_acknowledged or index not in self.damaged):
            self.whole.add(index)
            self.damaged.discard(index)
        assert is_there or what != "put" or not is_acknowledged
        if index in self.whole | self.damaged and not is_there:
            is_wanted = what == "delete" or (what == "evict" and self._may_go(index))
            assert is_wanted or (what == "read" and index in self.damaged)
            self._gone(index)

    def _do(self, server: int, index: int, what: str) -> None:
        store = self.stores[server]
        where = store.locate(DESCRIPTOR)
        if what == "put":
            self._put(store, index)
        elif what == "delete":
            store.delete_blocking(where, index)
        elif what == "evict":
            self._evict(server, index)
        elif what == "lease":
            self._lease(server, "r", {index})
        elif what == "read":
            found = self._read(server, index)
            assert isinstance(found, Verdict) or found == slices_of(index)
        else:
            store.status_blocking(where, index)

    def _put(self, store: ChunkStore, index: int) -> None:
        writer = store.writer(store.locate(DESCRIPTOR), index)
        try:
            for layer, data in enumerate(slices_of(index)):
                writer.write_blocking(layer, 0, memoryview(data))
            writer.commit_blocking([checksum(data) for data in slices_of(index)])
        finally:
            writer.abandon_blocking()

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
                    self._gone(index)
            else:
                assert found == slices_of(index)
            return
        if isinstance(found, list):
            assert found == slices_of(index), "wrong bytes were delivered as good"
        elif index in self.damaged and not self._path(index).exists():
            self._gone(index)

    @rule(server=servers, index=chunk_indexes)
    def lookup(self, server: int, index: int) -> None:
        store = self.stores[server]
        status = store.status_blocking(store.locate(DESCRIPTOR), index).status
        if index in self.whole:
            assert status is ChunkStatus.HIT
        elif index in self.damaged:
            assert status in (ChunkStatus.HIT, ChunkStatus.MISS_CORRUPT), "by size alone"
        else:
            assert status in (ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_EVICTED)

    @rule(server=servers)
    def restart(self, server: int) -> None:
        """Its leases hold until they expire; nobody can release them any more."""
        self._close(server)
        self.trees[server] = self._tree()
        for owner in [owner for owner in self.leased if owner[0] == server]:
            self.leased[-1, f"{len(self.leased)} {owner}"] = self.leased.pop(owner)

    def _close(self, server: int) -> None:
        self.trees[server].exchange.tell_blocking()  # as a server that stops does
        self.trees[server].exchange.close_blocking()
        self.stores[server].open_chunks.close_idle_blocking()

    @invariant()
    def only_chunks_and_open_writers_have_files(self) -> None:
        names = [
            path.name
            for path in self.root.rglob("*")
            if path.is_file() and not path.relative_to(self.root).parts[0].startswith(".")
        ]
        chunks = sorted(name for name in names if not name.startswith("."))
        wanted = self.whole | self.damaged
        assert chunks == sorted(DESCRIPTOR.chunk_hashes[index].hex() for index in wanted)
        assert len(names) - len(chunks) == len(self.writers)

    def teardown(self) -> None:
        for _, writer in self.writers:
            writer.abandon_blocking()
        for server in range(2):
            self._close(server)
        shutil.rmtree(self.root)
        assert open_files() == self.baseline, "descriptors leaked"


TestStoreAgainstADict = StoreMachine.TestCase
TestStoreAgainstADict.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
