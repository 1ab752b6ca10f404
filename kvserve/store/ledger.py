"""How much is stored, by tenant: counted as it happens, corrected by a count of the tree.

Chunks that are being written count as soon as they are let in, so that usage never exceeds a limit
by what is under way. Several servers share a tree: each knows its own changes at once and those of
the others as of their last exchange (`usage_files.py`).

A count of the whole tree takes a while, during which chunks come and go. The walk visits
directories in order, so a change in a directory that it has passed is added to the count. One in a
directory ahead is added only if the walk never comes there: it may be newer than the listing that
the walk goes by. A change at the very moment that its directory is listed may be counted twice or
not at all; the next count corrects that.
"""

import threading
from collections.abc import Mapping

from kvserve.policy.quota import (
    Allowed,
    Amount,
    Pressure,
    Quotas,
    above_floor,
    chunks_allowed,
    pressures,
)

UsageByTenant = dict[str, Amount]


class Ledger:
    """Safe from any thread; does no I/O."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._lock = threading.Lock()
        self._reserved: UsageByTenant = {}
        # All that was stored before this server and by others, and this server's own changes.
        self._base: UsageByTenant = {}
        self._own: UsageByTenant = {}
        # The sum of the three, kept so that letting a store in costs no sum over tenants.
        self._usage: UsageByTenant = {}
        self._total = Amount()
        self._cursor: tuple[str, ...] | None = None
        self._passed: UsageByTenant = {}
        # By directory ahead of the walk.
        self._ahead: dict[str, tuple[str, Amount]] = {}

    def __repr__(self) -> str:
        return f"<Ledger {self._total.size_bytes} bytes, {self._total.files} files>"

    def reserve(self, tenant: str, chunk_size_bytes: int, chunks: int) -> "Reservation":
        """Lets in as many of `chunks` new chunks as the limits allow."""
        with self._lock:
            allowed = chunks_allowed(
                self.quotas,
                tenant,
                own=self._usage.get(tenant, Amount()),
                total=self._total,
                chunk_size_bytes=chunk_size_bytes,
            )
            refused_by = None
            if allowed is not None and allowed.chunks < chunks:
                chunks, refused_by = allowed.chunks, allowed
            self._count(self._reserved, tenant, Amount(chunks * chunk_size_bytes, chunks))
            return Reservation(self, tenant, chunk_size_bytes, chunks, refused_by=refused_by)

    def unreserve(self, room: "Reservation", chunks: int) -> None:
        """Chunks that were let in are stored (and counted as such), or will not be."""
        with self._lock:
            chunks = min(chunks, room.left_chunks)
            room.left_chunks -= chunks
            size_bytes = chunks * room.chunk_size_bytes
            self._count(self._reserved, room.tenant, Amount(-size_bytes, -chunks))

    def changed(self, tenant: str, directory: str, size_bytes: int, files: int) -> None:
        """Files in `directory` came (or, negative, went) with so many bytes in all."""
        change = Amount(size_bytes, files)
        with self._lock:
            self._count(self._own, tenant, change)
            if self._cursor is None:
                return
            if _place(directory) <= self._cursor:
                _add(self._passed, tenant, change)
            else:
                _, before = self._ahead.get(directory, (tenant, Amount()))
                self._ahead[directory] = (tenant, before + change)

    def usage(self) -> UsageByTenant:
        """Stored and let in, by tenant."""
        with self._lock:
            return dict(self._usage)

    def own_changes(self) -> UsageByTenant:
        """What this server has stored less what it has removed, since it started."""
        with self._lock:
            return dict(self._own)

    def set_base(self, base: Mapping[str, Amount]) -> None:
        """What is on the tree without this server's own changes."""
        with self._lock:
            self._base = dict(base)
            self._sum_up()

    def above_floor(self, tenant: str) -> int:
        """Bytes that eviction for the others may take from a tenant."""
        with self._lock:
            return above_floor(self.quotas, self._usage, tenant)

    def pressures(self) -> list[Pressure]:
        with self._lock:
            return pressures(self.quotas, self._usage)

    def start_count(self) -> None:
        """A walk of the tree begins."""
        with self._lock:
            self._cursor, self._passed, self._ahead = (), {}, {}

    def pass_directory(self, directory: str) -> None:
        """The walk is about to list this directory; they come in the order of their parts."""
        with self._lock:
            self._cursor = _place(directory)
            self._ahead.pop(directory, None)

    def drop_count(self) -> None:
        """The walk has failed: as if it had not begun."""
        with self._lock:
            self._cursor, self._passed, self._ahead = None, {}, {}

    def end_count(self, counted: Mapping[str, Amount]) -> tuple[UsageByTenant, UsageByTenant]:
        """The walk has seen `counted`.

        Returns what is stored now, from which on usage is counted, and this server's own changes up
        to now, which are contained in it.
        """
        with self._lock:
            found = dict(counted)
            for tenant, change in (*self._passed.items(), *self._ahead.values()):
                _add(found, tenant, change)
            self._cursor, self._passed, self._ahead = None, {}, {}
            self._base = {
                tenant: found.get(tenant, Amount()) - self._own.get(tenant, Amount())
                for tenant in {*found, *self._own}
            }
            self._sum_up()
            return found, dict(self._own)

    def _count(self, part: UsageByTenant, tenant: str, change: Amount) -> None:
        _add(part, tenant, change)
        _add(self._usage, tenant, change)
        self._total += change

    def _sum_up(self) -> None:
        self._usage, self._total = {}, Amount()
        for part in (self._base, self._own, self._reserved):
            for tenant, amount in part.items():
                _add(self._usage, tenant, amount)
                self._total += amount


class Reservation:
    """What one store may still store. Safe from any thread.

    `refused_by`: the limit that lets in fewer chunks than were asked for.
    """

    def __init__(
        self,
        ledger: Ledger,
        tenant: str,
        chunk_size_bytes: int,
        chunks: int,
        *,
        refused_by: Allowed | None,
    ) -> None:
        self._ledger = ledger
        self.tenant = tenant
        self.chunk_size_bytes = chunk_size_bytes
        self.chunks = chunks
        self.left_chunks = chunks
        self.refused_by = refused_by

    def chunk_stored(self) -> None:
        """One of the chunks is on the tree and counted there; harmless after `close`."""
        self._ledger.unreserve(self, 1)

    def close(self) -> None:
        """The store has ended: the other chunks will not come."""
        self._ledger.unreserve(self, self.left_chunks)


def _add(to: UsageByTenant, tenant: str, amount: Amount) -> None:
    # A tenant with nothing leaves no entry: names are the clients' to choose.
    if total := to.get(tenant, Amount()) + amount:
        to[tenant] = total
    else:
        to.pop(tenant, None)


def _place(directory: str) -> tuple[str, ...]:
    return tuple(directory.split("/"))
