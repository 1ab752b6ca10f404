"""`kvserve bench metadata`: what a lookup costs on trees of very many chunk files.

One tree that grows from size to size, and at each size a fresh server on it: how soon it answers,
lookups of chunks that it has never looked for (a `stat` each) and of chunks that it knows, and what
the known ones take of its memory. The files are empty inside: nothing but names is measured.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from kvclient import AsyncClient
from kvserve.bench.latency import Latency, latency, timed
from kvserve.bench.measure import memory
from kvserve.bench.report import Bar, machine
from kvserve.bench.rounds import Step
from kvserve.bench.workspace import Workspace
from kvserve.errors import ServerFault
from kvserve.model import Descriptor
from kvserve.testing.many_chunks import (
    LOOKUP_CHUNKS,
    ManyChunks,
    many_descriptor,
    many_hashes,
)
from kvserve.testing.metrics_page import MetricsPage

READY_S_MAX = 2.0
KNOWN_BYTES_MAX = 200
FLAT_RATIO_MAX = 2.0
DIRECTORY_ENTRIES_MAX = 4096
_WARM_UP_LOOKUPS = 500
# Remembered to the end of the measurement, however many there are.
_KNOWN_TTL_S = 3600
_STEPS_A_SIZE = 5
_COUNT_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class MetadataSettings:
    """`counts`: chunk files on the tree, ascending. `root`: a directory to measure on."""

    counts: tuple[int, ...]
    lookups: int
    root: Path | None = None


@dataclass(frozen=True, slots=True)
class MetadataSize:
    """One size of the tree.

    `ready_s`: from the start of the process to its first answer. `counted_s`: until it had counted
    the files, in the background. Both before the lookups: `unknown`, each chunk once, from the
    tree; `known`, again, from memory.
    """

    chunk_files: int
    ready_s: float
    counted_s: float
    unknown: Latency
    known: Latency
    known_bytes_per_chunk: float
    directory_entries_max: int


@dataclass(frozen=True, slots=True)
class MetadataReport:
    """`kvserve bench metadata`."""

    benchmark: str
    lookup_chunks: int
    lookups: int
    machine: dict[str, Any]
    sizes: list[MetadataSize]
    bars: list[Bar]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def steps(settings: MetadataSettings) -> int:
    """How often `bench_metadata` calls `step`."""
    return _STEPS_A_SIZE * len(settings.counts)


async def bench_metadata(settings: MetadataSettings, step: Step) -> MetadataReport:
    """Grows the tree from size to size; a fresh server for each."""
    with Workspace(settings.root) as space:
        facts = machine(space.directory)
        tree = ManyChunks(space.chunks)
        sizes = []
        for count in settings.counts:
            step(f"making {count} chunk files")
            tree.grow_blocking(count)
            sizes.append(await _measure(space, tree, settings, step))
        return MetadataReport(
            benchmark="metadata",
            lookup_chunks=LOOKUP_CHUNKS,
            lookups=settings.lookups,
            machine=facts,
            sizes=sizes,
            bars=_bars(sizes),
        )


async def _measure(
    space: Workspace, tree: ManyChunks, settings: MetadataSettings, step: Step
) -> MetadataSize:
    page = MetricsPage()
    known = (f"store.known_ttl_s={_KNOWN_TTL_S}", f"store.known_chunks_max={max(settings.counts)}")
    step(f"{tree.count} chunk files: starting a server")
    started = perf_counter()
    with space.server((page.setting, *known)) as server:
        async with AsyncClient(server.address) as client:
            await client.server_info()
            ready_s = perf_counter() - started
            step(f"{tree.count} chunk files: it counts them")
            await _counted(page, tree.count)
            counted_s = perf_counter() - started
            asked = _Lookups(client)
            await asked.warm_up()
            before = memory(server.pid).resident_bytes
            step(f"{tree.count} chunk files: unknown chunks")
            unknown = await asked.measure(map(tree.descriptor, range(tree.lookups)))
            grown = memory(server.pid).resident_bytes - before
            step(f"{tree.count} chunk files: known chunks")
            known_again = Random(tree.count).choices(range(tree.lookups), k=settings.lookups)
            again = await asked.measure(map(tree.descriptor, known_again))
    name = str(tree.count)
    return MetadataSize(
        chunk_files=tree.count,
        ready_s=ready_s,
        counted_s=counted_s,
        unknown=latency(f"unknown_{name}", f"{tree.count:,} chunk files, unknown", unknown),
        known=latency(f"known_{name}", f"{tree.count:,} chunk files, known", again),
        known_bytes_per_chunk=grown / tree.count,
        directory_entries_max=tree.entries_max_blocking(),
    )


async def _counted(page: MetricsPage, count: int) -> None:
    """Until then, listing all directories would be a part of every figure."""
    until = perf_counter() + _COUNT_S_MAX
    while (counted := page.value_blocking("kvserve_stored_chunks")) != count:
        if perf_counter() > until:
            raise ServerFault(f"{counted:.0f} of {count} chunks counted in {_COUNT_S_MAX:.0f} s")
        await asyncio.sleep(0.2)


class _Lookups:
    """One after the other, by one client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def warm_up(self) -> None:
        """Of chunks that are nowhere, and so not remembered: fills the pools of the libraries."""
        for number in range(_WARM_UP_LOOKUPS):
            start = (1 << 60) + LOOKUP_CHUNKS * number
            await self._client.lookup(many_descriptor(many_hashes(start, start + LOOKUP_CHUNKS)))

    async def measure(self, descriptors: Iterable[Descriptor]) -> list[float]:
        """Seconds of each; every chunk must be a hit."""
        return [await timed(partial(self._hits, descriptor)) for descriptor in descriptors]

    async def _hits(self, descriptor: Descriptor) -> None:
        presence = await self._client.lookup(descriptor)
        if presence.prefix_chunks != descriptor.chunk_count:
            raise ServerFault(f"only {presence.prefix_chunks} chunks were found")


def _bars(sizes: Sequence[MetadataSize]) -> list[Bar]:
    smallest, largest = sizes[0], sizes[-1]
    flat = [
        Bar(
            f"{kind} lookup latency stays flat",
            f"p50 {large.p50_ms:.2f} ms with {largest.chunk_files:,} chunk files, at most "
            f"{FLAT_RATIO_MAX:g} times the {small.p50_ms:.2f} ms with {smallest.chunk_files:,}",
            large.p50_ms <= FLAT_RATIO_MAX * small.p50_ms,
        )
        for kind, small, large in (
            ("unknown", smallest.unknown, largest.unknown),
            ("known", smallest.known, largest.known),
        )
    ]
    slowest = max(size.ready_s for size in sizes)
    fullest = max(size.directory_entries_max for size in sizes)
    return [
        *flat,
        Bar(
            "memory of a known chunk",
            f"{largest.known_bytes_per_chunk:.0f} bytes with {largest.chunk_files:,} known, below "
            f"{KNOWN_BYTES_MAX}",
            largest.known_bytes_per_chunk < KNOWN_BYTES_MAX,
        ),
        Bar(
            "time to the first answer",
            f"{slowest:.2f} s at most, below {READY_S_MAX:.2f} s",
            slowest < READY_S_MAX,
        ),
        Bar(
            "entries of the fullest directory",
            f"{fullest:,}, at most {DIRECTORY_ENTRIES_MAX:,}",
            fullest <= DIRECTORY_ENTRIES_MAX,
        ),
    ]
