"""Leases that are released at another server than the one that granted them.

A client asks whichever server its connection leads to (`kvserve serve --workers`), so each server
tells the others whose leases it was asked to release, by `.leases/<tag>.released`, and they release
what they had granted before. Told a while later, once for all of them; what gets lost (a file that
was begun anew) holds nothing for longer than the lease's ttl.
"""

import threading
from collections.abc import Iterable, Mapping
from hashlib import sha256

from kvserve.fs import FileSystem
from kvserve.store.journal import JournalReader, JournalWriter, Record, RecordKind
from kvserve.store.leases import LeaseOwner, Leases

_SUFFIX = ".released"
_PENDING_MAX = 1 << 16


def owner_key(owner: LeaseOwner) -> int:
    """Stands for the owner in records. Cryptographic: a tenant must not hit on another's."""
    tenant, request = owner
    return int.from_bytes(sha256(f"{tenant}\0{request}".encode()).digest()[:8], "little")


class Releases:
    """This server's side. `note` does no I/O; the others block, from one thread at a time."""

    def __init__(self, fs: FileSystem, directory: str, tag: str, leases: Leases) -> None:
        self._fs = fs
        self._directory = directory
        self._own_name = f"{tag}{_SUFFIX}"
        self._leases = leases
        self._lock = threading.Lock()
        self._pending: dict[int, float] = {}
        self._writer = JournalWriter(fs, f"{directory}/{self._own_name}")
        self._readers: dict[str, JournalReader] = {}

    def note(self, owner: LeaseOwner) -> None:
        """This server was asked to release what the owner holds, here or elsewhere."""
        with self._lock:
            self._pending[owner_key(owner)] = self._leases.clock()
            if len(self._pending) > _PENDING_MAX:
                del self._pending[next(iter(self._pending))]

    def hear_blocking(self, names: Iterable[str]) -> int:
        """Releases what others were asked to; how many chunks. `names`: of the directory."""
        told = {it for it in names if it.endswith(_SUFFIX) and it != self._own_name}
        for name in set(self._readers) - told:
            self._readers.pop(name).close()
        released: dict[int, float] = {}
        for name in told:
            reader = self._readers.get(name)
            if reader is None:
                reader = JournalReader(self._fs, f"{self._directory}/{name}")
                self._readers[name] = reader
            for record in reader.read_blocking()[0]:
                if record.kind is RecordKind.RELEASED:
                    released[record.key] = max(record.at, released.get(record.key, 0.0))
        return self._release(released) if released else 0

    def tell_blocking(self, *, is_alone: bool) -> None:
        """Tells the others what was noted; nobody, if no other server has granted a lease."""
        with self._lock:
            noted, self._pending = self._pending, {}
        if is_alone or not noted:
            return
        records = [Record(key, RecordKind.RELEASED, at) for key, at in noted.items()]
        try:
            self._writer.append(records, lambda: records)
        except BaseException:
            with self._lock:
                self._pending = {**noted, **self._pending}
            raise

    def close_blocking(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._writer.close()

    def _release(self, released: Mapping[int, float]) -> int:
        chunks = 0
        for owner in self._leases.owners():
            at = released.get(owner_key(owner))
            if at is not None:
                chunks += self._leases.release(owner, granted_before=at)
        return chunks
