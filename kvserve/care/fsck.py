"""Checks a whole tree: walks it in order, checks its files in threads, tells what it finds.

Safe beside running servers, and without any:

* Nothing of a published chunk is ever written. A repair moves a damaged file to `.quarantine`, only
  the very file that was read (`store/quarantine.py`).
* A check claims a tag as a server does (`store/owners.py`). It is the clock that other claims are
  compared with: a temporary file is an orphan only if its writer's claim is gone or expired at that
  moment.
* What is not named as kvserve names its files is told, and never opened.

Memory: files in work, one window for each thread, the names of one directory per level, at most
`tally.FINDINGS_MAX` findings.
"""

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from random import SystemRandom
from typing import Final

from kvserve.care.chunk_check import Checked, ChunkCheck
from kvserve.care.identity_file import NamespaceIdentity, read_namespace_blocking
from kvserve.care.order import Batch, InOrder
from kvserve.care.saved_run import Progress, SavedRun, describe
from kvserve.care.tally import Finding, Kind, Tally
from kvserve.errors import InvalidRequest, KvserveError, StorageError
from kvserve.fs import REFUSED, Entry, FileSystem
from kvserve.store.owners import Owner
from kvserve.store.paths import IDENTITY_NAME, temp_owner
from kvserve.store.quarantine import set_aside_no_file_blocking
from kvserve.store.tree import (
    FAN,
    NAMESPACE,
    ROOT,
    Directory,
    is_chunk_name,
    is_ours,
    walk_blocking,
)

SAVE_INTERVAL_S: Final = 1.0
_FILES_A_THREAD: Final = 2
"""In work or waiting: a thread that is done finds its next file at once."""
_WHAT: Final = {"file": "file", "directory": "directory, not entered", "other": "no plain file"}


@dataclass(frozen=True, slots=True)
class FsckOptions:
    """`owner_lease_s` must be the servers' own (`store.owner_lease_s`)."""

    repairs: bool = False
    resumes: bool = False
    threads: int = 8
    owner_lease_s: float = 60.0
    save_interval_s: float = SAVE_INTERVAL_S


@dataclass(frozen=True, slots=True)
class FsckResult:
    """A finished check, the part before an interruption included."""

    tally: Tally
    took_s: float
    is_resumed: bool
    warnings: tuple[str, ...]


class Watcher:
    """What a check tells while it runs; all calls come from its main thread."""

    def found(self, finding: Finding) -> None:
        """A file that is not simply good, as soon as it is known."""

    def moved(self, directory: str, seen: InOrder) -> None:
        """After each file and directory."""


class Fsck:
    """One check of one tree; `run_blocking` once."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        options: FsckOptions,
        *,
        watcher: Watcher | None = None,
    ) -> None:
        self._fs = fs
        self._root = root
        self._options = options
        self._watcher = watcher or Watcher()
        self._owner = Owner(fs, root, SystemRandom(), lease_s=options.owner_lease_s, may_lead=False)
        self._saved = SavedRun(fs, root)
        self._seen = InOrder()
        self._work: dict[Future[Checked | None], Batch] = {}
        self._checks = threading.local()
        self._namespace = NamespaceIdentity("")
        self._namespace_path = ""
        self._warnings: dict[str, None] = {}
        self._beaten_at = self._saved_at = self._started_at = time.monotonic()
        self._took_before_s = 0.0

    def run_blocking(self) -> FsckResult:
        """Checks everything, or what an interrupted check has left to do.

        Interrupted (KeyboardInterrupt or any error) it leaves its state behind.

        Raises:
            InvalidRequest: the state of the interrupted check is damaged.
            StorageError: the root cannot be listed or written to.
        """
        self._owner.claim_blocking()
        try:
            is_resumed = self._begin_blocking()
            with ThreadPoolExecutor(self._options.threads, thread_name_prefix="fsck") as pool:
                try:
                    self._walk_blocking(pool)
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    self._save_blocking()
                    raise
            self._saved.finish_blocking()
        finally:
            self._owner.release_blocking()
        return FsckResult(self._seen.settled, self._took_s(), is_resumed, tuple(self._warnings))

    def _begin_blocking(self) -> bool:
        left = self._saved.load_blocking() if self._options.resumes else None
        if left is None:
            self._saved.forget_blocking()
            return False
        self._seen = InOrder(mark=left.mark, settled=left.tally)
        self._took_before_s = left.took_s
        if self._options.repairs and not left.repairs and left.tally.problems:
            text = "the interrupted check ran without repair: what it had found is left as it is"
            self._warnings[text] = None
        for finding in left.tally.findings:
            self._watcher.found(finding)
        return True

    def _walk_blocking(self, pool: ThreadPoolExecutor) -> None:
        for directory in walk_blocking(self._fs, self._root, after=self._seen.mark):
            batch = self._seen.begin(directory.parts)
            try:
                for entry in directory.entries():
                    self._take(pool, batch, directory, entry)
            except REFUSED as error:
                if directory.level == ROOT:
                    raise
                place = "/".join(directory.parts)
                self._count(batch, Finding(f"{place}/", Kind.UNREADABLE, str(error)))
            batch.is_listed = True
            self._settle(batch)
            self._watcher.moved("/".join(directory.parts), self._seen)
        while self._work:
            self._collect()

    def _take(
        self, pool: ThreadPoolExecutor, batch: Batch, directory: Directory, entry: Entry
    ) -> None:
        """One entry, in this order: 1. a directory of ours, or a dot one in the root: the walk's
        business; 2. a chunk or identity file: checked by a thread; 3. what is none and has the
        name of one; 4. a temporary file; 5. unknown.
        """
        parts = (*directory.parts, entry.name)
        place = "/".join(parts)
        is_identity = directory.level == NAMESPACE and entry.name == IDENTITY_NAME
        has_name_of_ours = is_identity or (directory.level == FAN and is_chunk_name(entry.name))
        if has_name_of_ours and entry.kind == "file":
            self._submit(pool, batch, place)
            return
        if has_name_of_ours:
            self._count(batch, self._judge_no_file_blocking(place, entry))
            return
        if entry.kind == "directory" and directory.level < FAN:
            if is_ours(parts) or (directory.level == ROOT and entry.name.startswith(".")):
                return
        elif entry.kind == "file":
            tag = temp_owner(entry.name)
            if tag is not None:
                self._count(batch, self._judge_temp_blocking(place, tag))
                return
        self._count(batch, Finding(place, Kind.UNKNOWN, f"not kvserve's: {_WHAT[entry.kind]}"))

    def _submit(self, pool: ThreadPoolExecutor, batch: Batch, place: str) -> None:
        while len(self._work) >= _FILES_A_THREAD * self._options.threads:
            self._collect()
        batch.files_in_work += 1
        namespace = self._namespace_of_blocking(place)
        self._work[pool.submit(self._check_blocking, place, namespace)] = batch

    def _check_blocking(self, place: str, namespace: NamespaceIdentity) -> Checked | None:
        """In a thread of the pool."""
        check: ChunkCheck | None = getattr(self._checks, "check", None)
        if check is None:
            check = ChunkCheck(self._fs, self._root, repairs=self._options.repairs)
            self._checks.check = check
        return check.check_blocking(place, namespace)

    def _collect(self) -> None:
        """Waits for at least one file; meanwhile the claim is kept."""
        done, _ = wait(
            self._work, timeout=self._options.owner_lease_s / 3, return_when=FIRST_COMPLETED
        )
        for future in done:
            batch = self._work.pop(future)
            batch.files_in_work -= 1
            checked = future.result()
            if checked is not None:
                self._count(batch, checked.finding)
                self._seen.count_bytes(batch, checked.size_bytes, is_direct=checked.is_direct)
            self._settle(batch)
        self._beat_blocking()

    def _count(self, batch: Batch, finding: Finding | None) -> None:
        self._seen.count(batch, finding)
        if finding is not None:
            self._watcher.found(finding)
        self._watcher.moved("/".join(batch.parts), self._seen)

    def _judge_temp_blocking(self, place: str, tag: str) -> Finding:
        self._beat_blocking()
        try:
            if self._owner.lives_blocking(tag):
                return Finding(place, Kind.LIVE, f"server {tag} lives and may be writing it")
            reason = f"left by server {tag}, which is dead"
            if self._options.repairs:
                self._fs.unlink(f"{self._root}/{place}")
            return Finding(place, Kind.ORPHAN, reason, is_repaired=self._options.repairs)
        except StorageError as error:
            return Finding(place, Kind.UNREADABLE, str(error))

    def _judge_no_file_blocking(self, place: str, entry: Entry) -> Finding:
        reason = f"{_WHAT[entry.kind]}, in the place of a file of kvserve's"
        is_repaired = False
        if self._options.repairs:
            try:
                path = f"{self._root}/{place}"
                is_repaired = set_aside_no_file_blocking(self._fs, self._root, path)
            except KvserveError as error:
                reason = f"{reason}; it could not be set aside: {error}"
        return Finding(place, Kind.MISPLACED, reason, is_repaired=is_repaired)

    def _namespace_of_blocking(self, place: str) -> NamespaceIdentity:
        path = "/".join((self._root, *place.split("/")[:NAMESPACE]))
        if path != self._namespace_path:
            self._namespace = read_namespace_blocking(self._fs, path)
            self._namespace_path = path
        return self._namespace

    def _settle(self, batch: Batch) -> None:
        has_moved = self._seen.settle(batch)
        if has_moved and time.monotonic() - self._saved_at >= self._options.save_interval_s:
            self._save_blocking()

    def _save_blocking(self) -> None:
        if self._seen.mark is None:
            return
        self._saved_at = time.monotonic()
        progress = Progress(
            self._seen.mark, self._seen.settled, self._options.repairs, self._took_s()
        )
        try:
            self._saved.save_blocking(progress)
        except StorageError as error:
            self._warnings[describe(error)] = None

    def _beat_blocking(self) -> None:
        """A claim that gets old only makes other claims look younger: no harm, but a warning."""
        if time.monotonic() - self._beaten_at < self._options.owner_lease_s / 3:
            return
        self._beaten_at = time.monotonic()
        try:
            self._owner.beat_blocking()
        except StorageError as error:
            self._warnings[f"orphans may have been taken for live ones: {error}"] = None

    def _took_s(self) -> float:
        return self._took_before_s + time.monotonic() - self._started_at


def fsck_blocking(
    fs: FileSystem, root: str, options: FsckOptions, *, watcher: Watcher | None = None
) -> FsckResult:
    """See `Fsck.run_blocking`. A root that is missing is not made."""
    if fs.stat(root) is None:
        raise InvalidRequest(f"there is no directory {root}")
    return Fsck(fs, root.rstrip("/") or "/", options, watcher=watcher).run_blocking()
