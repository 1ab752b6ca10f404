"""A store on a real tree, in short words for what tests do to it; a file system that fails."""

import time
from pathlib import Path
from random import Random

from kvserve.format.chunk_file import checksum
from kvserve.fs import FileSystem, PosixFileSystem
from kvserve.model import ChunkStatus, Descriptor, Verdict
from kvserve.policy.quota import Quotas
from kvserve.store.chunk_store import ChunkStore, StorePolicy
from kvserve.store.departures import Departures
from kvserve.store.known import KnownChunks
from kvserve.store.ledger import Ledger
from kvserve.store.locations import ChunkLocations
from kvserve.store.open_chunks import OpenChunk, OpenChunks
from kvserve.store.paths import TempNames
from kvserve.store.publish import ChunkWriter
from kvserve.store.quarantine import Quarantine
from tests.unit.samples import HYBRID, descriptor_of, slice_of

SIZES = HYBRID.slice_sizes
HIT = Verdict(ChunkStatus.HIT)
ABSENT = Verdict(ChunkStatus.MISS_ABSENT)


class Tree:
    """A store on `root` and one descriptor's chunks, with short words for what tests do."""

    def __init__(
        self,
        root: Path,
        *,
        fs: FileSystem | None = None,
        chunks: int = 5,
        open_files_max: int = 64,
        survives_power_loss: bool = False,
        ttl_s: float = 0.0,
        quarantine_size_bytes_max: int = 1 << 30,
    ) -> None:
        self.root = root
        self.fs = fs or PosixFileSystem()
        self.ledger = Ledger(Quotas())
        self.store = ChunkStore(
            self.fs,
            str(root),
            policy=StorePolicy(survives_power_loss=survives_power_loss, ttl_s=ttl_s),
            open_chunks=OpenChunks(self.fs, open_files_max),
            names=TempNames("aB3", Random(5)),
            known=KnownChunks(chunks_max=1000, ttl_s=60, clock=time.monotonic),
            ledger=self.ledger,
            departures=Departures(remembered_max=1000, clock=time.time),
            quarantine=Quarantine(self.fs, str(root), size_bytes_max=quarantine_size_bytes_max),
        )
        self.descriptor: Descriptor = descriptor_of(chunks, HYBRID)
        self.where: ChunkLocations = self.store.locate(self.descriptor)

    def file(self, index: int) -> Path:
        return Path(self.where.path(index))

    def files(self) -> list[str]:
        """Every file under the root, dot names too, directories not."""
        return sorted(
            str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()
        )

    def begin(self, index: int, layers: range = range(len(SIZES))) -> ChunkWriter:
        writer = self.store.writer(self.where, index)

        for layer in layers:
            writer.write_blocking(layer, 0, memoryview(slice_of(layer, index, SIZES[layer])))
        return writer

    def sums(self, index: int) -> list[int]:
        return [checksum(slice_of(layer, index, size)) for layer, size in enumerate(SIZES)]

    def write_whole(self, writer: ChunkWriter, index: int) -> None:

        for layer, size in enumerate(SIZES):
            writer.write_blocking(layer, 0, memoryview(slice_of(layer, index, size)))
        writer.commit_blocking(self.sums(index))

    def put(self, *indexes: int) -> None:
        for index in indexes:
            self.begin(index).commit_blocking(self.sums(index))

    def status(self, index: int) -> Verdict:
        return self.store.status_blocking(self.where, index)

    def open(self, index: int) -> OpenChunk | Verdict:
        return self.store.open_blocking(self.where, index)

    def opened(self, index: int) -> OpenChunk:
        found = self.open(index)
        assert isinstance(found, OpenChunk), found
        return found

    def read_open(self, chunk: OpenChunk, layer: int) -> bytes | Verdict:
        """One slice as a transfer gets it: verified, or why not."""
        buffer = bytearray(SIZES[layer])
        fault = self.store.read_blocking(chunk, [(layer, 0, memoryview(buffer))])
        if fault is not None:
            return fault
        if checksum(buffer) != chunk.checksums[layer]:
            return Verdict(ChunkStatus.MISS_CORRUPT, "checksum")
        return bytes(buffer)

    def read(self, index: int) -> list[bytes] | Verdict:
        """Every slice of a chunk, or the first reason why not."""
        chunk = self.open(index)
        if isinstance(chunk, Verdict):
            return chunk
        try:
            slices = []
            for layer in range(len(SIZES)):
                found = self.read_open(chunk, layer)
                if isinstance(found, Verdict):
                    return found
                slices.append(found)
            return slices
        finally:
            self.store.open_chunks.release(chunk)

    def is_whole(self, index: int) -> bool:
        return self.read(index) == [
            slice_of(layer, index, size) for layer, size in enumerate(SIZES)
        ]

    def quarantined(self) -> list[str]:
        return [name for name in self.files() if name.startswith(".quarantine/")]
