"""What the servers of one tree tell one another, through small files on it: usage, leases, and
which chunks are being evicted.

Theory of operation. One server evicts, others grant leases; no chunk may be both leased and gone.
Each side first says what it is about to do, then looks at what the others have said:

    grant:  write LEASED    -> read the evictors' journals -> a chunk that is LEAVING is a miss
    evict:  write LEAVING   -> read everybody's leases     -> a chunk that is leased has STAYED

Whoever writes second sees the first, so at least one of them gives way (Dekker's algorithm). The
file system has to show one host's finished write to another host's later read, as POSIX demands
and Lustre does; NFS with attribute caching does not.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvserve.fs import FileSystem
from kvserve.store.departures import Departures
from kvserve.store.journal import (
    JournalReader,
    JournalWriter,
    Record,
    RecordKind,
    read_all_blocking,
)
from kvserve.store.known import KnownChunks
from kvserve.store.leases import LeaseOwner, Leases
from kvserve.store.paths import EVICTED_DIR, LEASES_DIR
from kvserve.store.releases import Releases

log = logging.getLogger(__name__)

_LATE_S = 2.0
"""Leases of other hosts hold so much longer here: their clocks may differ."""
_KEPT_S = 60.0
LEASE_TTL_S_MAX = 86_400.0 + 2 * _KEPT_S
"""Longer than any server may be set to grant (`capacity.lease_ttl_s_max`)."""


class Exchange:
    """This server's side; `tag` names its files. All methods block, from any thread."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        tag: str,
        *,
        leases: Leases,
        departures: Departures,
        known: KnownChunks,
    ) -> None:
        self._fs = fs
        self._leases_dir = f"{root}/{LEASES_DIR}"
        self._evicted_dir = f"{root}/{EVICTED_DIR}"
        self._tag = tag
        self.leases = leases
        self.departures = departures
        self._known = known
        self._leasing = threading.Lock()
        self._lease_file = JournalWriter(fs, f"{self._leases_dir}/{tag}")
        self._is_lease_file_stale = False
        self._reading = threading.Lock()
        self._readers: dict[str, JournalReader] = {}
        self._evicted_file = JournalWriter(fs, f"{self._evicted_dir}/{tag}")
        self._releases = Releases(fs, self._leases_dir, tag, leases)

    def grant_blocking(
        self, owner: LeaseOwner, shard: str, keys: Sequence[int], ttl_s: float
    ) -> None:
        """Leases chunks of a shard, whether they are stored or not, for all servers to see.

        Afterwards look at `departures.is_leaving`, then at the tree: what is there then stays.

        Raises:
            Overloaded: too many chunks are leased.
            StorageError: the tree refused; the owner holds what it held before.
        """
        held = self.leases.held(owner, shard)
        expires_at = self.leases.grant(owner, shard, keys, ttl_s)
        records = [Record(key, RecordKind.LEASED, expires_at) for key in keys]
        try:
            with self._leasing:
                self._lease_file.append(records, self._lease_records)
            self.read_departures_blocking()
        except BaseException:
            # Not `release`: the owner's other leases have been promised.
            self.leases.put_back(owner, shard, held)
            self._is_lease_file_stale = True
            raise

    def narrow(self, owner: LeaseOwner, shard: str, keys: Sequence[int]) -> None:
        """Narrows a lease to the chunks that turned out to be stored. Does no I/O."""
        self.leases.narrow(owner, shard, keys)
        self._is_lease_file_stale = True

    def release(self, owner: LeaseOwner) -> int:
        """How many chunks were given free. Does no I/O: others learn of it with `tell_blocking`,
        and then release what they have granted to the owner."""
        self._releases.note(owner)
        released = self.leases.release(owner)
        self._is_lease_file_stale = self._is_lease_file_stale or released > 0
        return released

    def tell_blocking(self) -> None:
        """Brings the lease file up to date with what was released, here or elsewhere, or has
        expired."""
        entries = [it.name for it in self._fs.scan(self._leases_dir) if it.kind == "file"]
        before = self.leases.chunks
        self._releases.hear_blocking(entries)
        self.leases.drop_expired()
        with self._leasing:
            is_lost = self._lease_file.is_lost_blocking()
        if is_lost or self._is_lease_file_stale or self.leases.chunks != before:
            self._is_lease_file_stale = False
            try:
                with self._leasing:
                    self._lease_file.replace(self._lease_records())
            except BaseException:
                self._is_lease_file_stale = True
                raise
        self._releases.tell_blocking(
            is_alone=all(it.partition(".")[0] == self._tag for it in entries)
        )

    def leased_by_others_blocking(self, now: float) -> set[int]:
        """The chunks that other servers have leased."""
        leased: set[int] = set()
        for name in self._names(self._leases_dir):
            if name != self._tag:
                records = read_all_blocking(self._fs, f"{self._leases_dir}/{name}")
                # No lease lasts longer than a day: a time beyond that is a clock that went wrong.
                leased.update(
                    it.key for it in records if now < it.at + _LATE_S < now + LEASE_TTL_S_MAX
                )
        return leased

    def announce_picks_blocking(self, keys: Iterable[int], now: float) -> None:
        """Tells everybody, this server first, which chunks are about to be evicted."""
        records = [Record(key, RecordKind.LEAVING, now) for key in keys]
        self.departures.apply(self._tag, records)
        # No other pick is open here: in a new file readers miss nothing.
        self._evicted_file.append(records, lambda: records)

    def announce_outcomes_blocking(self, outcomes: Mapping[int, RecordKind], now: float) -> None:
        """Tells everybody what became of the chunks that were picked."""
        records = [Record(key, kind, now) for key, kind in outcomes.items()]
        self.departures.apply(self._tag, records)
        self._evicted_file.append(records, lambda: records)

    def read_departures_blocking(self) -> None:
        """Learns what other servers have evicted or are about to."""
        with self._reading:
            names = {name for name in self._names(self._evicted_dir) if name != self._tag}
            for name in set(self._readers) - names:
                self._readers.pop(name).close()
            for name in names:
                reader = self._readers.get(name)
                if reader is None:
                    reader = JournalReader(self._fs, f"{self._evicted_dir}/{name}")
                    self._readers[name] = reader
                records, is_replaced = reader.read_blocking()
                self.departures.apply(name, records)
                for record in records:
                    if record.kind is not RecordKind.STAYED:
                        self._known.discard(record.key)
                if is_replaced:
                    self._known.clear()

    def forget_dead_blocking(self, lives: Callable[[str], bool], now: float) -> None:
        """Removes the files of servers that no longer live, once nothing in them counts.

        A server that stops leaves its files: its leases hold until they expire.
        """
        for directory in (self._leases_dir, self._evicted_dir):
            for entry in self._fs.scan(directory):
                name, path = entry.name, f"{directory}/{entry.name}"
                if entry.kind != "file":
                    continue
                tag, _, is_unfinished = name.partition(".")
                if tag == self._tag or lives(tag):
                    continue
                if is_unfinished:
                    self._fs.unlink(path)
                    continue
                records = read_all_blocking(self._fs, path)
                counts = any(now < it.at + _KEPT_S < now + LEASE_TTL_S_MAX for it in records)
                # Asked again: it may have come back meanwhile, and written.
                if not counts and not lives(tag):
                    self._fs.unlink(path)

    def close_blocking(self) -> None:
        """The server stops; its files stay for the others."""
        with self._reading:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
        try:
            self._lease_file.close()
            self._releases.close_blocking()
        finally:
            self._evicted_file.close()

    def _lease_records(self) -> list[Record]:
        return [Record(key, RecordKind.LEASED, at) for key, at in self.leases.records()]

    def _names(self, directory: str) -> list[str]:
        # Files only: what else may lie there is not a server's.
        entries = self._fs.scan(directory)
        return [it.name for it in entries if it.kind == "file" and "." not in it.name]
