"""What a check of the tree finds, counted; the worst trees must not fill the memory."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

FINDINGS_MAX: Final = 10_000
"""Findings that are kept one by one; further ones are only counted."""


class Kind(StrEnum):
    """What a file is found to be."""

    OK = "ok"
    CORRUPT = "corrupt"
    MISPLACED = "misplaced"
    UNREADABLE = "unreadable"
    ORPHAN = "orphan"
    LIVE = "live"
    UNKNOWN = "unknown"

    @property
    def is_problem(self) -> bool:
        """What is not kvserve's, and what a living server is writing, is none."""
        return self not in (Kind.OK, Kind.LIVE, Kind.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Finding:
    """One file (or directory) that is worth a line. `path` is relative to the root."""

    path: str
    kind: Kind
    reason: str
    is_repaired: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "kind": self.kind.value,
            "reason": self.reason,
            "repaired": self.is_repaired,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Finding":
        return cls(value["path"], Kind(value["kind"]), value["reason"], bool(value["repaired"]))


@dataclass(slots=True)
class Tally:
    """Counts of files by kind, and the findings behind them."""

    directories: int = 0
    size_bytes: int = 0
    direct_files: int = 0
    repaired: int = 0
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0

    @property
    def files(self) -> int:
        return sum(self.counts.values())

    @property
    def problems(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind.is_problem)

    def count_ok(self) -> None:
        self.counts[Kind.OK] += 1

    def count(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        self.repaired += finding.is_repaired
        self._keep([finding])

    def merge(self, other: "Tally") -> None:
        self.directories += other.directories
        self.size_bytes += other.size_bytes
        self.direct_files += other.direct_files
        self.repaired += other.repaired
        for kind, count in other.counts.items():
            self.counts[kind] += count
        self._keep(other.findings)
        self.findings_left_out += other.findings_left_out

    def _keep(self, findings: list[Finding]) -> None:
        room = FINDINGS_MAX - len(self.findings)
        self.findings.extend(findings[:room])
        self.findings_left_out += max(0, len(findings) - room)

    def to_json(self) -> dict[str, Any]:
        return {
            "directories": self.directories,
            "size_bytes": self.size_bytes,
            "direct_files": self.direct_files,
            "repaired": self.repaired,
            "counts": {kind.value: count for kind, count in self.counts.items()},
            "findings": [finding.to_json() for finding in self.findings],
            "findings_left_out": self.findings_left_out,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Tally":
        """Raises KeyError, TypeError or ValueError for what `to_json` has not made."""
        return cls(
            directories=int(value["directories"]),
            size_bytes=int(value["size_bytes"]),
            direct_files=int(value["direct_files"]),
            repaired=int(value["repaired"]),
            counts={kind: int(value["counts"][kind.value]) for kind in Kind},
            findings=[Finding.from_json(finding) for finding in value["findings"]],
            findings_left_out=int(value["findings_left_out"]),
        )
