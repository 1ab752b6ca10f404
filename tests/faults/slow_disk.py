"""A disk whose cache takes long to flush, as a FUSE file for a loop device; run as a program.

`python -m tests.faults.slow_disk MOUNTPOINT IMAGE FLUSH_S COUNT_FILE`: the file `disk` under
MOUNTPOINT has the bytes of IMAGE; each flush waits FLUSH_S, and its number is in COUNT_FILE.
"""

import os
import stat
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError, Popen, run
from types import TracebackType
from typing import Any, Self

import mfusepy


class _Disk(mfusepy.Operations):
    use_ns = True

    def __init__(self, image: Path, flush_s: float, count: Path) -> None:
        self._fd = os.open(image, os.O_RDWR)
        self._flush_s = flush_s
        self._count = count
        self._flushes = 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        size_bytes = os.fstat(self._fd).st_size
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size_bytes}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", "disk"]

    def open(self, path: str, flags: int) -> int:
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(self._fd, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._flushes += 1
        self._count.write_text(str(self._flushes))
        time.sleep(self._flush_s)
        return 0


class SlowDisk:
    """ext4 on such a disk, mounted at `path` while it is a context.

    Raises:
        OSError, CalledProcessError: this machine cannot do it; nothing is left mounted.
    """

    def __init__(self, directory: Path, *, size_bytes: int, flush_s: float) -> None:
        self.path = directory / "slow"
        self._fuse = directory / "fuse"
        self._image = directory / "image"
        self._count = directory / "flushes"
        self._size_bytes = size_bytes
        self._flush_s = flush_s
        self._stack = ExitStack()

    @property
    def flushes(self) -> int:
        return int(self._count.read_text())

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._mount(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _mount(self, stack: ExitStack) -> None:
        self.path.mkdir()
        self._fuse.mkdir()
        self._count.write_text("0")
        with self._image.open("wb") as image:
            image.truncate(self._size_bytes)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        arguments = [str(it) for it in (self._fuse, self._image, self._flush_s, self._count)]
        process = Popen([sys.executable, "-m", __name__, *arguments])
        stack.callback(process.wait, 10)
        stack.callback(run, ["umount", "--lazy", str(self._fuse)], check=False)
        disk = self._fuse / "disk"
        for _ in range(100):
            if disk.exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        device = _run("losetup", "--find", "--show", str(disk))
        stack.callback(run, ["losetup", "--detach", device], check=False)
        _run("mount", device, str(self.path))
        stack.callback(run, ["umount", str(self.path)], check=True)


def _run(*command: str) -> str:
    try:
        return run(command, check=True, capture_output=True, text=True).stdout.strip()
    except CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from error


if __name__ == "__main__":
    mountpoint, image_path, flush, count_path = sys.argv[1:]
    operations = _Disk(Path(image_path), float(flush), Path(count_path))
    mfusepy.FUSE(operations, mountpoint, foreground=True)
