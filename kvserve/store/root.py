"""Whether the root can be used, and whether it is still the one that the server started on."""

import logging

from kvserve.errors import QuotaExceeded, StorageError, StorageFull, StorageUnavailable
from kvserve.fs import FileSystem
from kvserve.store.paths import SERVERS_DIR, TempNames
from kvserve.store.temp_file import create_temp_blocking, remove_temp_blocking

log = logging.getLogger(__name__)


class Root:
    """The root of one tree. All methods block."""

    def __init__(self, fs: FileSystem, root: str, names: TempNames) -> None:
        self._fs = fs
        self._root = root
        self._names = names
        self._is_claimed = False

    def check_blocking(self) -> None:
        """Writes, syncs, renames and removes a small file in the root.

        A full file system is only warned of: what is stored there can be served.

        Raises:
            StorageError: with the step, the path and the errno that refused.
        """
        self._fs.make_dirs(self._root)
        self._is_claimed = self._has_claims()
        for retries_left in range(self._fs.full_retries, -1, -1):
            try:
                self._probe()
            except StorageFull as error:
                if retries_left and not isinstance(error, QuotaExceeded):
                    continue  # another file may land where there is room
                log.warning(
                    "the root %s is full: what is stored is served, new chunks end as NO_SPACE: %s",
                    self._root,
                    error,
                )
            return

    def check_mounted_blocking(self) -> None:
        """Before a store.

        Raises:
            StorageError: this is not the file system that the server started on: under a mount that
                is gone there is an empty directory, most likely on a local disk.
        """
        if self._is_claimed and not self._has_claims():
            raise StorageUnavailable(
                f"{self._root} has no {SERVERS_DIR} any more: is its file system still mounted?"
            )

    def _has_claims(self) -> bool:
        return self._fs.stat(f"{self._root}/{SERVERS_DIR}") is not None

    def _probe(self) -> None:
        # A name of its own: servers start together, with the same pid in their containers.
        probe, fd = create_temp_blocking(
            self._fs, f"{self._root}/probe", self._names, survives_power_loss=False
        )
        try:
            try:
                self._fs.write_all(fd, b"kvserve", 0)
                self._fs.sync(fd)
            finally:
                self._fs.close(fd)
            # A name that a sweep knows, too: this server may be killed right here.
            renamed = self._names.beside(f"{self._root}/probe")
            self._fs.rename(probe, renamed)
        except StorageError:
            remove_temp_blocking(self._fs, self._names, probe)
            raise
        self._fs.unlink(renamed)
