"""Files that grow under a temporary name; see `paths.TempNames` for its form.

Where each file has its own part of the space (Lustre: its storage targets), a full part is left:
what was written moves to a new temporary file, which lands elsewhere, and the refused write is done
again there, with at most `FileSystem.full_retries` new files in all. What fills up may have lost
what it had taken before, so whoever publishes a file that `has_moved` reads it back first.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from kvserve.errors import KvserveError, QuotaExceeded, StorageError, StorageFull
from kvserve.fs import FileSystem
from kvserve.store.paths import TempNames

_TRIES = 8
_PIECE_SIZE_BYTES = 1 << 20
# Files that could not be removed and are remembered; what is beyond waits for this server's end.
_LEFT_MAX = 65_536


class OpenFiles(Protocol):
    """The bound on open descriptors; see `OpenChunks`."""

    def take_blocking(self) -> bool:
        """Counts a descriptor in; False if there is no room for one."""

    def give(self) -> None:
        """Counts a descriptor out."""


def create_temp_blocking(
    fs: FileSystem, path: str, names: TempNames, *, survives_power_loss: bool
) -> tuple[str, int]:
    """A new empty file beside `path`, its directory made if need be; its name and descriptor.

    With `survives_power_loss` the names of directories made here do so, too: else a chunk that was
    acknowledged could vanish with its directory.

    Raises:
        StorageError, Overloaded: the file system refused.
    """
    for _ in range(_TRIES):
        temp = names.beside(path)
        try:
            fd = fs.create(temp)
            if fd is None:
                for directory in fs.make_dirs(temp.rpartition("/")[0]):
                    if survives_power_loss:
                        fs.sync_dir(directory.rpartition("/")[0])
                fd = fs.create(temp)
        except FileExistsError:
            continue
        if fd is not None:
            return temp, fd
    raise AssertionError(f"no free temporary name beside {path}")


def _nothing() -> None:
    pass


class TempFile:
    """The file that will be `path`. Ends with `publish_blocking` or `abandon_blocking`.

    Writes may come from several threads at once; everything else only when no write runs. `files`
    counts its descriptor; None for a file that is written at once. Its first `head_size_bytes` are
    taken when it is made, so that what is written there last finds space.
    """

    def __init__(
        self,
        fs: FileSystem,
        files: OpenFiles | None,
        names: TempNames,
        *,
        path: str,
        survives_power_loss: bool,
        head_size_bytes: int = 0,
    ) -> None:
        self.path = path
        self._head_size_bytes = head_size_bytes
        self.has_moved = False
        self._fs = fs
        self._files = files
        self._names = names
        self._survives_power_loss = survives_power_loss
        self._temp: str | None = None
        # None also while there is no room for one: then the file is opened for each write.
        self._fd: int | None = None
        # A file that this one has left, until it is removed.
        self._left: str | None = None
        self._retries = fs.full_retries
        # Threads that write now. A move closes the descriptor, so it waits until there are none.
        self._writing = 0
        self._changed = threading.Condition()

    @property
    def is_open(self) -> bool:
        """There is a file: to be published or abandoned."""
        return self._temp is not None

    @property
    def holds_descriptor(self) -> bool:
        return self._fd is not None

    def write_blocking(self, data: bytes | memoryview, offset: int) -> None:
        """The first write creates the file, its directory too if need be."""
        while True:
            with self._changed:
                if self._temp is None:
                    self._open()
                temp, fd = self._temp, self._fd
                assert temp is not None
                self._writing += 1
            try:
                self._write(temp, fd, data, offset)
                return
            except StorageFull as error:
                full = error
            finally:
                with self._changed:
                    self._writing -= 1
                    self._changed.notify_all()
            with self._changed:
                while self._writing:
                    self._changed.wait()
                if self._temp == temp:  # else another thread has moved it meanwhile
                    self._move(full)

    def read_blocking(self, into: memoryview, offset: int) -> int:
        """Reads back; like `FileSystem.read_into`."""
        with self._descriptor(self._temp, self._fd) as fd:
            return self._fs.read_into(fd, into, offset)

    def publish_blocking(self, check: Callable[[], None] = _nothing) -> bool:
        """Closes the file, synced if it has to survive power loss, and gives it its name.

        False if it replaced another file, whose mark (a pin) it keeps, also one that is set
        meanwhile. `check` is called right before: if it raises, the file does not get its name.
        """
        fd = self._give_up_fd()
        if fd is None:
            assert self._temp is not None
            fd = self._fs.open_write(self._temp)
        try:
            if self._survives_power_loss:
                self._fs.sync(fd)
        finally:
            self._fs.close(fd)
        assert self._temp is not None
        replaced = self._fs.stat(self.path)
        if replaced is None:
            check()
            self._rename(self._temp)
            return True
        if replaced.is_marked:
            self._fs.mark(self._temp, is_marked=True)
        fd = None
        # A damaged file may not be openable: it is replaced all the same.
        with suppress(KvserveError):
            fd = self._fs.open_read(self.path)
        try:
            check()
            self._rename(self._temp)
            # Whoever marks by the name from here on marks this file.
            if fd is not None and not replaced.is_marked and self._is_marked(fd):
                self._fs.mark(self.path, is_marked=True)
        finally:
            if fd is not None:
                self._fs.close(fd)
        return False

    def _is_marked(self, fd: int) -> bool:
        try:
            return self._fs.stat_open(fd).is_marked
        except StorageError:
            return False  # a file that was replaced because it is out of reach

    def abandon_blocking(self) -> None:
        """Removes what was written; does nothing once published. May be called twice, and by two
        threads at once."""
        with self._changed:
            fd = self._give_up_fd()
            temp, self._temp = self._temp, None
        try:
            if fd is not None:
                self._fs.close(fd)
        finally:
            try:
                self._remove_left()
            finally:
                if temp is not None:
                    remove_temp_blocking(self._fs, self._names, temp)

    def _rename(self, temp: str) -> None:
        self._fs.rename(temp, self.path)
        self._temp = None

    def _open(self) -> None:
        while True:
            try:
                self._temp, fd = self._create()
                break
            except StorageFull as full:
                self._use_retry(full)
        if self._files is None or self._files.take_blocking():
            self._fd = fd
        else:
            self._fs.close(fd)

    def _give_up_fd(self) -> int | None:
        fd, self._fd = self._fd, None
        if fd is not None and self._files is not None:
            self._files.give()
        return fd

    def _create(self) -> tuple[str, int]:
        temp, fd = create_temp_blocking(
            self._fs, self.path, self._names, survives_power_loss=self._survives_power_loss
        )
        try:
            if self._head_size_bytes:
                self._fs.write_all(fd, bytes(self._head_size_bytes), 0)
        except BaseException:
            self._close_quietly(fd)
            remove_temp_blocking(self._fs, self._names, temp)
            raise
        return temp, fd

    def _use_retry(self, full: StorageFull) -> None:
        if isinstance(full, QuotaExceeded) or not self._fs.full_retries:
            raise full
        if not self._retries:
            raise StorageFull(f"{full}, as {self._fs.full_retries} files before it") from full
        self._retries -= 1

    def _write(self, temp: str, fd: int | None, data: bytes | memoryview, offset: int) -> None:
        with self._descriptor(temp, fd) as used:
            self._fs.write_all(used, data, offset)

    def _move(self, full: StorageFull) -> None:
        """Moves to a file with room. Nobody writes meanwhile."""
        is_moved = False
        while not is_moved:
            self._use_retry(full)
            try:
                self._move_once()
                is_moved = True
            except StorageFull as error:
                full = error
            finally:
                self._remove_left()

    def _move_once(self) -> None:
        """A copy takes the file's place; what is then useless, the old or the new, is `_left`."""
        self._left, new_fd = self._create()
        try:
            self._copy(new_fd)
        except BaseException:
            self._close_quietly(new_fd)
            raise
        if self._fd is None:
            self._fs.close(new_fd)
        else:
            self._close_quietly(self._fd)
            self._fd = new_fd
        self._temp, self._left = self._left, self._temp
        self.has_moved = True

    def _remove_left(self) -> None:
        if self._left is not None:
            left, self._left = self._left, None
            remove_temp_blocking(self._fs, self._names, left)

    def _copy(self, target: int) -> None:
        with self._descriptor(self._temp, self._fd, close=self._close_quietly) as fd:
            piece = memoryview(bytearray(_PIECE_SIZE_BYTES))
            offset = 0
            while got := self._fs.read_into(fd, piece, offset):
                self._fs.write_all(target, piece[:got], offset)
                offset += got

    @contextmanager
    def _descriptor(
        self, temp: str | None, fd: int | None, *, close: Callable[[int], None] | None = None
    ) -> Iterator[int]:
        """`fd`, or if there was no room for one the file open for this time, then closed."""
        if fd is not None:
            yield fd
            return
        assert temp is not None
        fd = self._fs.open_write(temp)
        try:
            yield fd
        finally:
            (close or self._fs.close)(fd)

    def _close_quietly(self, fd: int) -> None:
        # Of a file that is left: what was lost with it is found when the new one is read back.
        with suppress(StorageError):
            self._fs.close(fd)


def remove_temp_blocking(fs: FileSystem, names: TempNames, temp: str) -> None:
    """Removes a temporary file. One that cannot be is tried again by `remove_left_blocking`: no
    sweep would, since its owner lives.

    Raises:
        StorageError: the file system refused.
    """
    try:
        fs.unlink(temp)
    except StorageError:
        if len(names.left) < _LEFT_MAX:
            names.left.add(temp)
        raise


def remove_left_blocking(fs: FileSystem, names: TempNames) -> None:
    """Another try for what could not be removed."""
    for temp in list(names.left):
        with suppress(StorageError):  # until the next round
            fs.unlink(temp)
            names.left.discard(temp)
