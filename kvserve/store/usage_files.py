"""How servers share what they know of usage: `.usage/` on the tree, one small file each.

`.usage/<tag>` has what the server with this tag has stored less what it has removed, by tenant,
since its tag was new. `.usage/base` has a count of the whole tree and, for each tag, how much of
that server's changes the count contains. So

    usage = base + sum over tags of (changes - changes contained in base)

and a server that starts knows the usage at once, from a few small files. A server that stops
leaves its file; the next count makes it superfluous. Files are replaced whole, never changed.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvserve.fs import FileSystem
from kvserve.names import is_tenant
from kvserve.policy.quota import Amount
from kvserve.store.ledger import UsageByTenant
from kvserve.store.paths import USAGE_DIR, is_tag
from kvserve.store.small_file import read_small_blocking, replace_small_blocking

log = logging.getLogger(__name__)

_BASE = "base"
_SIZE_BYTES_MAX = 256 << 20
_COUNT_MAX = 1 << 63


@dataclass(frozen=True, slots=True)
class Base:
    """A count of the tree, and which changes of each tag are in it."""

    counted: UsageByTenant = field(default_factory=dict)
    contained: dict[str, UsageByTenant] = field(default_factory=dict)


class UsageFiles:
    """Reads and writes `.usage/`. `tag`: whose changes this server writes. All methods block."""

    def __init__(self, fs: FileSystem, root: str, tag: str) -> None:
        self._fs = fs
        self._directory = f"{root}/{USAGE_DIR}"
        self._tag = tag
        # What an earlier server with the same tag left: ours are counted on from there.
        self._offset: UsageByTenant | None = None
        self._written: UsageByTenant | None = None

    def base_for(self, own: Mapping[str, Amount]) -> UsageByTenant:
        """Usage by all, less this server's `own` changes; also tells the others of these."""
        self._write_own(own)
        base = self._read_base()
        usage = dict(base.counted)
        for tag in self._tags():
            changes = self._offset or {} if tag == self._tag else self._changes(tag)
            for sign, part in ((1, changes), (-1, base.contained.get(tag, {}))):
                for tenant, amount in part.items():
                    signed = amount if sign > 0 else Amount() - amount
                    usage[tenant] = usage.get(tenant, Amount()) + signed
        return usage

    def changes_of_others(self) -> dict[str, UsageByTenant]:
        """By tag, as of now."""
        return {tag: self._changes(tag) for tag in self._tags() if tag != self._tag}

    def write_base(
        self,
        counted: Mapping[str, Amount],
        own: Mapping[str, Amount],
        others: Mapping[str, UsageByTenant],
    ) -> None:
        """After a count of the tree. `own`: this server's changes that are in it; `others`: those
        of other servers as of when the count began. What they stored meanwhile may then count
        twice, never not at all: caps hold."""
        contained = {tag: others.get(tag, {}) for tag in self._tags() if tag != self._tag}
        contained[self._tag] = self._with_offset(own)
        self._write_own(own)
        record = {
            "counted": _plain(counted),
            "contained": {tag: _plain(changes) for tag, changes in contained.items()},
        }
        self._write(_BASE, record)

    def forget(self, tags: set[str], contained: Mapping[str, UsageByTenant]) -> None:
        """Removes the files of dead servers; only right after `write_base`.

        `contained`: what it was given. A file that says something else by now (of a server that
        came, or went on, while the tree was counted) is not in the base: it waits for the next.
        """
        for tag in tags & contained.keys() & set(self._tags()):
            if self._changes(tag) == contained[tag]:
                self._fs.unlink(f"{self._directory}/{tag}")

    def forget_unfinished(self, lives: Callable[[str], bool]) -> None:
        """Removes what servers that are dead had not finished writing, `NAME.TAG`."""
        for entry in self._fs.scan(self._directory):
            name, _, tag = entry.name.rpartition(".")
            is_unfinished = entry.kind == "file" and name.isalnum() and is_tag(tag)
            if is_unfinished and not lives(tag):
                self._fs.unlink(f"{self._directory}/{entry.name}")

    def tags(self) -> set[str]:
        return set(self._tags())

    def _write_own(self, own: Mapping[str, Amount]) -> None:
        changes = self._with_offset(own)
        if changes != self._written:
            self._write(self._tag, _plain(changes))
            self._written = changes

    def _with_offset(self, own: Mapping[str, Amount]) -> UsageByTenant:
        if self._offset is None:
            self._offset = self._written = self._changes(self._tag)
        return {
            tenant: self._offset.get(tenant, Amount()) + own.get(tenant, Amount())
            for tenant in {*self._offset, *own}
        }

    def _tags(self) -> list[str]:
        # Files only: what else may lie there is not a server's.
        entries = self._fs.scan(self._directory)
        return [
            it.name
            for it in entries
            if it.kind == "file" and it.name.isalnum() and it.name != _BASE
        ]

    def _changes(self, tag: str) -> UsageByTenant:
        return _amounts(self._read(tag))

    def _read_base(self) -> Base:
        record = self._read(_BASE)
        contained = record.get("contained")
        if not isinstance(contained, dict):
            return Base()
        return Base(
            _amounts(record.get("counted")),
            {tag: _amounts(changes) for tag, changes in contained.items()},
        )

    def _read(self, name: str) -> dict[str, Any]:
        path = f"{self._directory}/{name}"
        encoded = read_small_blocking(self._fs, path, _SIZE_BYTES_MAX)
        if encoded is None:
            return {}
        try:
            record = json.loads(encoded)
        except (ValueError, RecursionError) as error:
            log.warning("%s is not readable (%s): usage is off until the next count", path, error)
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, name: str, record: object) -> None:
        path = f"{self._directory}/{name}"
        replace_small_blocking(
            self._fs, path, json.dumps(record).encode(), temp=f"{path}.{self._tag}"
        )


def _plain(usage: Mapping[str, Amount]) -> dict[str, list[int]]:
    return {tenant: [amount.size_bytes, amount.files] for tenant, amount in usage.items()}


def _amounts(record: object) -> UsageByTenant:
    """What is not well-formed counts as nothing: the next count of the tree corrects it."""
    if not isinstance(record, dict):
        return {}
    return {
        tenant: Amount(pair[0], pair[1])
        for tenant, pair in record.items()
        if isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))
        # It becomes a label of metrics.
        if is_tenant(tenant)
    }


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) < _COUNT_MAX
