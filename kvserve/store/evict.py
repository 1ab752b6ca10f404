"""Takes chunks off the tree to keep it within its limits, in the background.

One server of a tree evicts, see `upkeep.py`; requests never wait for it. It looks at the files of
some directories, picks the oldest (`policy/eviction.py`), tells the other servers, leaves out what
is leased, pinned or being read here, and deletes the rest. A file that cannot be deleted is
reported, skipped, and not tried again for a while.

A reader that has the file open, on this or another host, reads the original bytes to the end.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from kvserve.errors import StorageError
from kvserve.fs import REFUSED, FileSystem
from kvserve.policy.eviction import SAMPLE_MIN, TAKEN_OF_SAMPLE, Candidate, choose
from kvserve.policy.quota import Amount, Pressure, above_floor
from kvserve.store.counted_size import counted_size_blocking
from kvserve.store.departures import LEAVING_S_MAX
from kvserve.store.exchange import Exchange
from kvserve.store.journal import RecordKind
from kvserve.store.known import KnownChunks, known_key
from kvserve.store.ledger import Ledger
from kvserve.store.open_chunks import OpenChunks
from kvserve.store.tree import NAMESPACE, is_chunk_name, is_ours, shard_of, walk_blocking

log = logging.getLogger(__name__)

_SHARDS_A_ROUND = 64
_BATCH_MAX = 256
_STUBBORN_MAX = 4096
_STUBBORN_S = 600.0
_PICKS_HOLD_S = LEAVING_S_MAX / 2
"""On a tree so slow that a batch takes longer, the rest of it stays: others stop believing it."""
_UNREADABLE_MAX = 16
"""Directories in a round that cannot be listed; with more the tree is at fault, not they."""


@dataclass(slots=True)
class EvictionResult:
    """Counts of one round. `held`: picked, but leased, pinned, under a floor, or used just now."""

    evicted: Amount = field(default_factory=Amount)
    held: int = 0
    failed: int = 0

    def __str__(self) -> str:
        text = f"evicted {self.evicted.files} chunks of {self.evicted.size_bytes} bytes in all"
        if self.held:
            text += f"; {self.held} stay, which are leased, pinned, under a floor or were just used"
        if self.failed:
            text += f"; {self.failed} could not be looked at or deleted"
        return text


class Evictor:
    """All methods block; one thread at a time. `clock`: wall time, as files are stamped with."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        *,
        ledger: Ledger,
        exchange: Exchange,
        open_chunks: OpenChunks,
        known: KnownChunks,
        random: Random,
        clock: Callable[[], float],
    ) -> None:
        self._fs = fs
        self._root = root
        self._ledger = ledger
        self._exchange = exchange
        self._open_chunks = open_chunks
        self._known = known
        self._random = random
        self._clock = clock
        # By path: when a file that could not be deleted may be tried again.
        self._stubborn: dict[str, float] = {}

    def relieve_blocking(self, pressure: Pressure) -> Iterator[EvictionResult]:
        """Evicts until the pressure is gone or every chunk of some shards was looked at once; a
        tree of many shards gets its other ones in later rounds.

        Yields the running counts after each step, so that the caller sets the pace.
        """
        result = EvictionResult()
        wanted = pressure.excess
        pool: list[Candidate] = []
        fresh = unreadable = 0
        deck = self._deck(pressure.tenant)
        while wanted.size_bytes > 0 or wanted.files > 0:
            directory = next(deck, None)
            if directory is not None:
                try:
                    seen = self._candidates(directory)
                except REFUSED as error:
                    # One bad directory must not keep the rest of the tree from being evicted.
                    result.failed += 1
                    unreadable += 1
                    if unreadable > _UNREADABLE_MAX:
                        raise
                    log.warning("cannot evict from %s: %s", directory, error)
                    seen = []
                pool += seen
                fresh += len(seen)
                if fresh < SAMPLE_MIN:
                    yield result
                    continue
            # Of a sample only a part, since the next may hold older ones. Nothing is chosen twice,
            # whatever comes of it: a round ends.
            part = fresh // TAKEN_OF_SAMPLE if directory is not None else _BATCH_MAX
            chosen, pool = choose(pool, wanted, chunks_max=min(part, _BATCH_MAX))
            fresh = 0
            if not chosen:
                return
            before = result.evicted
            self.evict_blocking(chosen, result, for_others=pressure.tenant is None)
            gone = result.evicted - before
            wanted = Amount(
                max(0, wanted.size_bytes - gone.size_bytes), max(0, wanted.files - gone.files)
            )
            yield result

    def expire_blocking(self, directory: str, unused_s: float, result: EvictionResult) -> None:
        """Evicts the chunks of one directory that nobody has used for so long."""
        try:
            expired = self.expired_blocking(directory, unused_s)
        except REFUSED as error:
            result.failed += 1
            log.warning("cannot evict from %s: %s", directory, error)
            return
        for at in range(0, len(expired), _BATCH_MAX):
            self.evict_blocking(expired[at : at + _BATCH_MAX], result, for_others=False)

    def expired_blocking(self, directory: str, unused_s: float) -> list[Candidate]:
        """The chunks of one directory that nobody has used for so long, pinned ones left out."""
        before = self._clock() - unused_s
        return [it for it in self._candidates(directory) if it.used_at <= before]

    def evict_blocking(
        self, chosen: Sequence[Candidate], result: EvictionResult, *, for_others: bool
    ) -> None:
        """Deletes the chosen chunks but those in use; adds to `result`.

        `for_others`: to relieve the total, which takes no tenant below its floor.
        """
        keys = {it: self._key(it) for it in chosen}
        now = self._clock()
        outcomes = dict.fromkeys(keys.values(), RecordKind.STAYED)
        try:
            self._exchange.announce_picks_blocking(keys.values(), now)
            leased = self._exchange.leased_by_others_blocking(now)
            for candidate, key in keys.items():
                may_go = (
                    self._clock() - now < _PICKS_HOLD_S
                    and key not in leased
                    and not self._exchange.leases.holds(key)
                    and (not for_others or self._may_take(candidate))
                )
                if not may_go:
                    result.held += 1
                elif self._delete(candidate, key, result):
                    result.evicted += Amount(candidate.size_bytes, 1)
                    outcomes[key] = RecordKind.GONE
        finally:
            self._exchange.announce_outcomes_blocking(outcomes, now)

    def _may_take(self, candidate: Candidate) -> bool:
        return self._ledger.above_floor(candidate.tenant) >= candidate.size_bytes

    def _delete(self, candidate: Candidate, key: int, result: EvictionResult) -> bool:
        path = f"{candidate.directory}/{candidate.name}"
        try:
            # Looked at again, after it was announced: pinned, used or replaced meanwhile?
            found = self._fs.stat(path)
            if found is None:
                return False
            is_wanted = found.is_marked or found.modified_at > candidate.used_at
            if is_wanted or not self._open_chunks.forget_idle(path):
                result.held += 1
                return False
            size_bytes = counted_size_blocking(self._fs, path, found.size_bytes)
            is_gone = self._fs.unlink(path)
        except StorageError as error:
            result.failed += 1
            self._skip(path, error)
            return False
        self._known.discard(key)
        if is_gone:
            self._ledger.changed(candidate.tenant, candidate.directory, -size_bytes, -1)
        self._open_chunks.close_released_blocking()
        return is_gone

    def _skip(self, path: str, error: StorageError) -> None:
        log.warning("cannot evict %s, skipped for %.0f s: %s", path, _STUBBORN_S, error)
        self._stubborn[path] = self._clock() + _STUBBORN_S
        while len(self._stubborn) > _STUBBORN_MAX:
            del self._stubborn[next(iter(self._stubborn))]

    def _candidates(self, directory: str) -> list[Candidate]:
        """The chunks in one directory that may go, as far as one look tells."""
        tenant = directory[len(self._root) + 1 :].split("/", 1)[0]
        now = self._clock()
        found: list[Candidate] = []
        for name in self._fs.list_dir(directory):
            path = f"{directory}/{name}"
            if not is_chunk_name(name) or self._stubborn.get(path, 0.0) > now:
                continue
            try:
                seen = self._fs.stat(path)
            except StorageError as error:
                self._skip(path, error)
                continue
            if seen is None or seen.is_marked:
                continue
            size_bytes = counted_size_blocking(self._fs, path, seen.size_bytes)
            found.append(Candidate(tenant, directory, name, size_bytes, seen.modified_at))
        return found

    def _deck(self, tenant: str | None) -> Iterator[str]:
        """The directories to look at, each once, in random order."""
        tenants = {tenant} if tenant is not None else self._tenants_above_floor()
        shards: list[str] = []
        for directory in walk_blocking(
            self._fs,
            self._root,
            wants=lambda parts: parts[0] in tenants and len(parts) <= NAMESPACE,
        ):
            if directory.level == NAMESPACE:
                with suppress(*REFUSED):  # what cannot be listed cannot be evicted from
                    names = (entry.name for entry in directory.entries())
                    shards += [f"{directory.path}/{it}" for it in names if shard_of(it)]
        self._random.shuffle(shards)
        fans: list[str] = []
        for shard in shards[:_SHARDS_A_ROUND]:
            with suppress(*REFUSED):
                names = (entry.name for entry in self._fs.scan(shard))
                fans += [f"{shard}/{it}" for it in names if is_ours(("", "", "", it))]
        self._random.shuffle(fans)
        yield from fans

    def _tenants_above_floor(self) -> set[str]:
        usage = self._ledger.usage()
        return {name for name in usage if above_floor(self._ledger.quotas, usage, name) > 0}

    def _key(self, candidate: Candidate) -> int:
        shard = candidate.directory[len(self._root) + 1 :].rpartition("/")[0]
        return known_key(shard, bytes.fromhex(candidate.name))
