"""New files under temporary names: see `paths.TempNames` for their form."""

from kvserve.fs import FileSystem
from kvserve.store.paths import TempNames

_TRIES = 8


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
