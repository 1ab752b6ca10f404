"""Which server made a temporary file, and whether that server still lives.

Several servers share one tree, on several hosts, so neither age nor a process id proves that a
writer is dead. Each server claims a tag of three letters by making `.servers/<tag>`, puts it into
the names of its temporary files, and touches its file every third of `lease_s`. A tag without a
file, or whose file was not touched for `lease_s`, has no live owner. Times are compared between
files of the same tree, so the hosts' clocks do not matter.
"""

import json
import logging
import os
import socket
from random import Random

from kvserve.errors import QuotaExceeded, StorageError, StorageFull, StorageUnavailable
from kvserve.fs import FileSystem
from kvserve.store.paths import SERVERS_DIR, is_tag, new_tag

log = logging.getLogger(__name__)

_TRIES = 32


class Owner:
    """This server's claim. All methods block; `beat_blocking` every `lease_s / 3`."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        random: Random,
        *,
        lease_s: float,
        may_lead: bool = True,
    ) -> None:
        """`may_lead`: whether it may become the tree's steward; a tool may not."""
        self._may_lead = may_lead
        self._fs = fs
        self._root = root
        self._directory = f"{root}/{SERVERS_DIR}"
        self._random = random
        self.lease_s = lease_s
        self.tag = ""

    def claim_blocking(self) -> None:
        """Takes a free tag. A full tree is no hindrance: what is stored there can be served.

        Raises:
            StorageError: the tree refused.
        """
        self._fs.make_dirs(self._root)
        self._fs.make_dirs(self._directory)
        retries_left = self._fs.full_retries
        for _ in range(_TRIES):
            tag = new_tag(self._random)
            try:
                fd = self._create(tag)
                self._write(fd)
            except FileExistsError:
                continue
            except StorageFull as error:
                # Another file may land where there is room. Else an empty claim is one, and without
                # any the tag is good until a beat succeeds: where no file can be made, there is
                # none whose owner could be asked for.
                if retries_left and not isinstance(error, QuotaExceeded):
                    self._fs.unlink(self._path(tag))
                    retries_left -= 1
                    continue
                log.warning("this server's claim is not written: %s", error)
            self.tag = tag
            return
        raise StorageError(f"no free server tag in {self._directory}: remove what is left there")

    def beat_blocking(self) -> None:
        """Shows that this server lives; makes its file again if somebody removed it.

        Raises:
            StorageError: the claim cannot be written; others will take this server for dead after
                `lease_s`, and its open stores may then fail.
        """
        try:
            fd = self._create(self.tag)
        except FileExistsError:
            fd = self._fs.open_write(self._path(self.tag))
        self._write(fd)

    def dead_blocking(self) -> set[str]:
        """The tags whose server is dead, by the claims that are there now."""
        # What else may lie there is not a server's.
        tags = [it.name for it in self._fs.scan(self._directory) if it.kind == "file"]
        return {tag for tag in tags if is_tag(tag) and not self.lives_blocking(tag)}

    def lives_blocking(self, tag: str) -> bool:
        """Whether the server with this tag lives, asked of the tree at this moment.

        A claim is made before the first temporary file, so a file whose claim is missing has no
        living owner, also when that server started after a sweep began.
        """
        if tag == self.tag:
            return True
        seen = self._fs.stat(self._path(tag))
        own = self._fs.stat(self._path(self.tag))
        if own is None:
            # Somebody removed this server's own claim: until it beats, no age can be told.
            return True
        # A stamp from the future (a clock that was set back) is no sign of life either.
        return seen is not None and abs(own.modified_at - seen.modified_at) <= self.lease_s

    def is_first_blocking(self) -> bool:
        """Whether this server's tag is the first of the living ones: it is the tree's steward."""
        for tag in self._fs.list_dir(self._directory):
            if tag < self.tag and is_tag(tag) and self.lives_blocking(tag):
                claim = self._fs.stat(self._path(tag))
                if claim is not None and not claim.is_marked:
                    return False
        return True

    def forget_blocking(self, tags: set[str]) -> None:
        """Removes the claims of dead servers, once their files are gone."""
        for tag in tags:
            if not self.lives_blocking(tag):
                self._fs.unlink(self._path(tag))

    def release_blocking(self) -> None:
        """The server stops and leaves nothing behind."""
        if self.tag:
            self._fs.unlink(self._path(self.tag))

    def _create(self, tag: str) -> int:
        fd = self._fs.create(self._path(tag))
        if fd is None:
            raise StorageUnavailable(
                f"{self._directory} is gone: is the file system of the root still mounted?"
            )
        try:
            if not self._may_lead:
                self._fs.mark(self._path(tag), is_marked=True)
        except BaseException:
            self._fs.close(fd)
            raise
        return fd

    def _write(self, fd: int) -> None:
        record = {"host": socket.gethostname(), "pid": os.getpid()}
        try:
            self._fs.write_all(fd, json.dumps(record).encode(), 0)
        finally:
            self._fs.close(fd)

    def _path(self, tag: str) -> str:
        return f"{self._directory}/{tag}"
