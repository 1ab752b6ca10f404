"""New files under temporary names: see `paths.TempNames` for their form."""

import contextlib

from kvserve.errors import StorageError
from kvserve.fs import FileSystem
from kvserve.store.paths import TempNames

_TRIES = 8
# Files that could not be removed and are remembered; what is beyond waits for this server's end.
_LEFT_MAX = 65536


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
        with contextlib.suppress(StorageError):  # until the next round
            fs.unlink(temp)
            names.left.discard(temp)
