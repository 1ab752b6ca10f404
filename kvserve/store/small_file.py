"""Small files that are read whole and replaced whole: a reader sees the old one or the new one."""

from kvserve.errors import StorageUnavailable
from kvserve.fs import FileSystem


def read_small_blocking(fs: FileSystem, path: str, size_bytes_max: int) -> bytes | None:
    """The file, or None if it is missing; of a larger one `size_bytes_max` + 1 bytes.

    Raises:
        StorageError, Overloaded: it cannot be read.
    """
    fd = fs.open_read(path)
    if fd is None:
        return None
    try:
        # One more than it has: what grows meanwhile is seen to be another file.
        buffer = bytearray(min(fs.stat_open(fd).size_bytes, size_bytes_max) + 1)
        got = fs.read_into(fd, memoryview(buffer), 0)
    finally:
        fs.close(fd)
    return bytes(buffer[:got])


def read_head_blocking(fs: FileSystem, path: str, size_bytes: int) -> bytes | None:
    """The first bytes of a file, fewer if it is shorter; None if it is missing. Raises alike."""
    fd = fs.open_read(path)
    if fd is None:
        return None
    try:
        buffer = bytearray(size_bytes)
        got = fs.read_into(fd, memoryview(buffer), 0)
    finally:
        fs.close(fd)
    return bytes(buffer[:got])


def replace_small_blocking(
    fs: FileSystem, path: str, data: bytes, *, temp: str, is_synced: bool = False
) -> None:
    """Makes `data` the file, by way of `temp` beside it, a name that only this writer uses.

    Raises:
        StorageError, Overloaded: the file system refused; the old file stands, `temp` may be left
            for the next try.
    """
    fs.make_dirs(path.rpartition("/")[0])
    fs.unlink(temp)
    try:
        fd = fs.create(temp)
    except FileExistsError as error:
        raise StorageUnavailable(f"{temp} is another's now") from error
    if fd is None:
        raise StorageUnavailable(f"{temp}: its directory vanished")
    try:
        fs.write_all(fd, data, 0)
        if is_synced:
            fs.sync(fd)
    finally:
        fs.close(fd)
    fs.rename(temp, path)
