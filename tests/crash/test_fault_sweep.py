"""The n-th file call fails, for every n, over a store, a fetch and a start-up; and power loss.

The service, its pumps and the store are the real ones; only the transport is in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kvserve.config import LimitsConfig
from kvserve.errors import KvserveError, StorageError, StorageFull, StorageUnavailable
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.metrics import Metrics
from kvserve.model import ChunkStatus, Descriptor, Verdict
from kvserve.service import Service
from kvserve.storage_health import StorageHealth
from kvserve.store.owners import Owner
from kvserve.store.sweep import sweep_blocking
from kvserve.testing.faulty_fs import CHANGING, READING, FaultyFileSystem
from kvserve.testing.full_targets import FullTargetsFileSystem
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from tests.payload import payload_for, small_descriptor
from tests.trees import tree_on

DESCRIPTOR = small_descriptor(chunks=3, layers=2)
PAYLOAD = payload_for(DESCRIPTOR)
SIZE = DESCRIPTOR.layout.slice_sizes[0]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def service_over(
    fs: FaultyFileSystem, root: Path, threads: ThreadPoolExecutor, *, power: bool = False
) -> Service:
    durability = "power" if power else "process"
    tree = tree_on(root, fs, store={"durability": durability, "known_ttl_s": 0.0})
    limits = LimitsConfig()
    return Service(
        tree,
        threads,
        limits,
        Metrics(tree),
        staging=Staging(limits.staging_size_bytes, limits.frame_size_bytes),
        pace=ReadPace(4),
        health=StorageHealth(),
        lease_ttl_s_max=60.0,
        store_refused=lambda: None,
    )


class Sender:
    """A client that stores all of `DESCRIPTOR`."""

    is_finished = False

    def __init__(self) -> None:
        self.needed: list[int] = []
        self.verdicts: list[Verdict] = []

    async def needs(self, statuses: list[ChunkStatus]) -> None:
        self.needed = [i for i, status in enumerate(statuses) if status is ChunkStatus.NEEDED]

    async def frames(self) -> AsyncIterator[tuple[FrameHeader, memoryview]]:
        for layer in range(2):
            for chunk in self.needed:
                at = DESCRIPTOR.payload_offsets[layer] + chunk * SIZE
                part = memoryview(PAYLOAD)[at : at + SIZE]
                yield FrameHeader(layer, chunk, 0, checksum(part).to_bytes(8, "little")), part
        self.is_finished = True

    async def layer_stored(self, layer_index: int) -> None:
        pass

    async def result(self, verdicts: list[Verdict]) -> None:
        self.verdicts = verdicts


class _Frame:
    is_in_place = False

    def __init__(self, header: FrameHeader, size: int) -> None:
        self.header = header
        self.payload = memoryview(bytearray(size))


class Receiver:
    """A client that fetches all of `DESCRIPTOR` and keeps what is delivered as good."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.slices: dict[tuple[int, int], bytes] = {}

    async def head(self, verdicts: list[Verdict]) -> None:
        self.verdicts = list(verdicts)

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> _Frame:
        return _Frame(header, payload_size_bytes)

    async def send(self, frame: _Frame) -> None:
        for number in range(len(frame.payload) // SIZE):
            chunk = frame.header.first_chunk + number
            part = frame.payload[number * SIZE : (number + 1) * SIZE]
            self.slices[frame.header.layer_index, chunk] = bytes(part)

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        self.verdicts[chunk_index] = verdict


def expected(layer: int, chunk: int) -> bytes:
    at = DESCRIPTOR.payload_offsets[layer] + chunk * SIZE
    return bytes(PAYLOAD[at : at + SIZE])


async def store(service: Service, sender: Sender) -> None:
    await service.store(service.locate(DESCRIPTOR), sender)


async def fetch(service: Service, descriptor: Descriptor = DESCRIPTOR) -> Receiver:
    receiver = Receiver()
    await service.fetch(service.locate(descriptor), (), receiver)  # type: ignore[arg-type]
    for (layer, chunk), data in receiver.slices.items():
        assert data == expected(layer, chunk), "wrong bytes were delivered as good"
    for chunk, verdict in enumerate(receiver.verdicts):
        if verdict.status is ChunkStatus.HIT:
            assert {(0, chunk), (1, chunk)} <= receiver.slices.keys(), "a hit without its bytes"
    return receiver


def temp_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*.*") if path.is_file()]


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
@pytest.mark.parametrize("error", [StorageUnavailable("EIO"), StorageFull("ENOSPC")], ids=str)
async def test_every_call_of_a_store_fails_once(
    tmp_path: Path, threads: ThreadPoolExecutor, error: StorageError, power: bool
) -> None:
    """Whole or absent, said truthfully; a second store heals it; what the others had is kept."""
    for fails_at in range(1, 500):
        root = tmp_path / str(fails_at)
        fs = FaultyFileSystem(fails_at, error, verbs=CHANGING | {"size"})
        sender = Sender()
        raised = False
        try:
            await store(service_over(fs, root, threads, power=power), sender)
        except KvserveError:
            raised = True  # refused as a whole, before any chunk
        clean = service_over(FaultyFileSystem(), root, threads)
        receiver = await fetch(clean)
        for said, found in zip(sender.verdicts, receiver.verdicts, strict=False):
            if said.status is ChunkStatus.STORED:
                assert found.status is ChunkStatus.HIT, f"call {fails_at}: acknowledged and lost"
            else:
                assert said.status in (ChunkStatus.STORE_ERROR, ChunkStatus.NO_SPACE), said
                assert found.status is ChunkStatus.MISS_ABSENT, f"call {fails_at}: {found}"
        if not fs.has_failed:
            assert all(verdict.status is ChunkStatus.STORED for verdict in sender.verdicts)
            assert fails_at > 20, "the sweep covers a whole store"
            return
        failed = [v for v in sender.verdicts if v.status is not ChunkStatus.STORED]
        assert raised or len(failed) <= 1 or fs.calls[fails_at - 1] in ("make_dirs", "size")
        left = [path for path in temp_files(root) if fs.calls[fails_at - 1] != "unlink"]
        assert left == [], f"call {fails_at} ({fs.calls[fails_at - 1]}) left files"
        again = Sender()
        await store(clean, again)
        assert all(verdict.status.is_stored for verdict in again.verdicts)
    raise AssertionError("the sweep did not end")


@pytest.mark.parametrize("full", [(0,), (0, 1, 2)], ids=["one full", "all full"])
async def test_full_storage_targets(
    tmp_path: Path, threads: ThreadPoolExecutor, full: tuple[int, ...]
) -> None:
    """B3: one full target costs a move, all of them are NO_SPACE; nothing is left behind."""
    # The second layer does not fit.
    fs = FullTargetsFileSystem(full=full, room_bytes=2 * SIZE + 100)
    sender = Sender()
    await store(service_over(fs, tmp_path, threads), sender)
    is_full = len(full) == 3
    expected_status = ChunkStatus.NO_SPACE if is_full else ChunkStatus.STORED
    assert {verdict.status for verdict in sender.verdicts} == {expected_status}
    assert fs.created > len(sender.verdicts) + 1, "no file but the identity's had to move"
    receiver = await fetch(service_over(FaultyFileSystem(), tmp_path, threads))
    found = ChunkStatus.MISS_ABSENT if is_full else ChunkStatus.HIT
    assert {verdict.status for verdict in receiver.verdicts} == {found}
    assert temp_files(tmp_path) == []


async def test_every_call_of_a_fetch_fails_once(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """A miss with its reason for that chunk only; the next fetch has everything."""
    root = tmp_path / "kv"
    await store(service_over(FaultyFileSystem(), root, threads), Sender())
    for fails_at in range(1, 500):
        fs = FaultyFileSystem(fails_at, verbs=READING | CHANGING)
        service = service_over(fs, root, threads)
        receiver = await fetch(service)
        misses = [v for v in receiver.verdicts if v.status is not ChunkStatus.HIT]
        if not fs.has_failed:
            assert misses == []
            assert fails_at > 6, "the sweep covers a whole fetch"
            return
        assert len(misses) <= 1
        assert all(verdict.status is ChunkStatus.MISS_ERROR for verdict in misses)
        after = await fetch(service_over(FaultyFileSystem(), root, threads))
        assert all(verdict.status is ChunkStatus.HIT for verdict in after.verdicts)
    raise AssertionError("the sweep did not end")


def test_every_call_of_a_start_up_fails_once(tmp_path: Path) -> None:
    """It starts or says why not; the next start works, and a sweep removes what is left."""
    for fails_at in range(1, 500):
        root = tmp_path / str(fails_at)
        fs = FaultyFileSystem(fails_at, verbs=READING | CHANGING)
        with suppress(StorageError):
            tree = tree_on(root, fs)
            tree.owner.claim_blocking()
            tree.store.check_root_blocking()
            tree.ledger.set_base(tree.usage_files.base_for({}))
            tree.exchange.read_departures_blocking()
            list(sweep_blocking(fs, str(root), tree.owner))
        if not fs.has_failed:
            assert fails_at > 10
            return
        healthy = Owner(FaultyFileSystem(), str(root), Random(3), lease_s=60.0)
        healthy.claim_blocking()
        list(sweep_blocking(FaultyFileSystem(), str(root), healthy))
    raise AssertionError("the sweep did not end")


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
async def test_power_loss(tmp_path: Path, threads: ThreadPoolExecutor, power: bool) -> None:
    """With "power" nothing acknowledged is lost; without, what is torn is found and is a miss."""
    root = tmp_path / "kv"
    root.mkdir()
    fs = FaultyFileSystem()
    sender = Sender()
    await store(service_over(fs, root, threads, power=power), sender)
    assert all(verdict.status is ChunkStatus.STORED for verdict in sender.verdicts)
    await asyncio.to_thread(fs.lose_unsynced)
    receiver = await fetch(service_over(FaultyFileSystem(), root, threads))
    if power:
        assert all(verdict.status is ChunkStatus.HIT for verdict in receiver.verdicts)
    else:
        assert all(verdict.status is not ChunkStatus.HIT for verdict in receiver.verdicts)
    again = Sender()
    await store(service_over(FaultyFileSystem(), root, threads), again)
    assert all(verdict.status.is_stored for verdict in again.verdicts)


async def test_a_known_chunk_is_acknowledged_once_its_name_stays(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """Another writer may have renamed it and not synced the directory yet."""
    root = tmp_path / "kv"
    root.mkdir()
    fs = FaultyFileSystem()
    await store(service_over(fs, root, threads), Sender())  # "process": no name is synced
    chunks = {str(path) for path in root.glob("*/*/*/*/*")}
    assert len(chunks) == DESCRIPTOR.chunk_count
    fs._synced_sizes.clear()  # its bytes and directories are, say
    fs._unsynced_names &= chunks
    again = Sender()
    await store(service_over(fs, root, threads, power=True), again)
    assert {verdict.status for verdict in again.verdicts} == {ChunkStatus.KNOWN}
    await asyncio.to_thread(fs.lose_unsynced)
    assert {str(path) for path in root.glob("*/*/*/*/*")} == chunks
