"""New files under temporary names: see `paths.temp_path` for their form."""

from random import Random

from kvserve.fs import FileSystem
from kvserve.store.paths import temp_path

_TRIES = 8


def create_temp_blocking(fs: FileSystem, path: str, random: Random) -> tuple[str, int]:
    """A new empty file beside `path`, its directory made if need be; its name and descriptor.

    Raises:
        StorageError, Overloaded: the file system refused.
    """
    for _ in range(_TRIES):
        temp = temp_path(path, random)
        try:
            fd = fs.create(temp)
            if fd is None:
                fs.make_dirs(temp.rpartition("/")[0])
                fd = fs.create(temp)
        except FileExistsError:
            continue
        if fd is not None:
            return temp, fd
    raise AssertionError(f"no free temporary name beside {path}")
