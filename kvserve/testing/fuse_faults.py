"""The process behind `fuse_mount.FaultyMount`: a pass-through file system that fails on demand.

`python -m kvserve.testing.fuse_faults BACKING MOUNT direct` (or `cached`) mounts with libfuse and
serves until its standard input ends. Each line there is a JSON command, each answered by a line on
standard output; the first line there says that the mount is up. Needs libfuse 3 and `mfusepy`.

Every operation goes to the backing directory as it is. Before, the first `Fault` that matches it is
carried out: an errno, a delay, a hang until released, half the bytes, or a flipped bit.
"""

import errno
import fnmatch
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

OPERATIONS = frozenset(
    [
        "getattr",
        "open",
        "create",
        "read",
        "write",
        "flush",
        "fsync",
        "fsyncdir",
        "rename",
        "unlink",
        "mkdir",
        "rmdir",
        "readdir",
        "statfs",
        "truncate",
        "chmod",
        "utimens",
    ]
)
_THREADS_MAX = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to operations named `on` (`flush` is what a close does) of files like `path`.

    The first `skip` matching ones are spared, the next `count` (None: all) are not. `path` is
    matched as a shell pattern against the path in the mount; for a rename, against the new one.
    """

    on: str
    path: str = "*"
    error: str = ""
    hangs: bool = False
    delay_s: float = 0.0
    halves: bool = False
    flips: bool = False
    skip: int = 0
    count: int | None = None

    def __post_init__(self) -> None:
        if self.on not in OPERATIONS:
            raise ValueError(f"no operation {self.on!r}; there are {', '.join(sorted(OPERATIONS))}")
        if self.error and not hasattr(errno, self.error):
            raise ValueError(f"no errno is named {self.error!r}")


class Faults:
    """The faults in force and how often each struck. Used from all of libfuse's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._matched: list[int] = []
        self._struck: list[int] = []
        self._hanging = 0
        self._released = threading.Event()

    def command(self, command: dict[str, Any]) -> dict[str, Any]:
        """`faults` replaces all of them, `release` lets go of what hangs; the reply has counts."""
        with self._lock:
            if "faults" in command:
                self._faults = [Fault(**fault) for fault in command["faults"]]
                self._matched = [0] * len(self._faults)
                self._struck = [0] * len(self._faults)
            if command.get("release"):
                self._released.set()
                self._released = threading.Event()
            return {"struck": self._struck, "hanging": self._hanging}

    def strike(self, on: str, path: str) -> Fault | None:
        """Carries out what can be done before the operation; the fault, for what comes after."""
        with self._lock:
            fault = self._next(on, path)
            released = self._released
            if fault is not None and fault.hangs:
                self._hanging += 1
        if fault is None:
            return None
        if fault.hangs:
            released.wait()
            with self._lock:
                self._hanging -= 1
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.error:
            raise OSError(getattr(errno, fault.error), os.strerror(getattr(errno, fault.error)))
        return fault

    def _next(self, on: str, path: str) -> Fault | None:
        for number, fault in enumerate(self._faults):
            if fault.on != on or not fnmatch.fnmatchcase(path, fault.path):
                continue
            self._matched[number] += 1
            behind = self._matched[number] - fault.skip
            if behind > 0 and (fault.count is None or behind <= fault.count):
                self._struck[number] += 1
                return fault
        return None


class PassThrough:
    """libfuse's operations on the backing directory.

    Handles are descriptors there; libfuse gives no path with a handle, so the paths are kept here.
    """

    use_ns = True

    def __init__(self, backing: str, faults: Faults, *, is_direct: bool) -> None:
        self._backing = backing
        self._faults = faults
        self._is_direct = is_direct
        self._paths: dict[int, str] = {}

    def init_with_config(self, connection: object, config: Any) -> None:
        config.nullpath_ok = config.use_ino = config.hard_remove = 1
        config.direct_io = int(self._is_direct)
        config.kernel_cache = int(not self._is_direct)
        # The kernel asks for names and attributes each time: faults reach whoever looks.
        config.entry_timeout = config.attr_timeout = config.negative_timeout = 0.0
        _say({"mounted": True})

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, float]:
        self._faults.strike("getattr", self._path(path, fh))
        found = os.fstat(fh) if fh is not None else os.lstat(self._real(path))
        names = ["mode", "ino", "dev", "nlink", "uid", "gid", "size", "blocks"]
        attributes = {f"st_{name}": getattr(found, f"st_{name}") for name in names}
        for name in ("atime", "mtime", "ctime"):
            attributes[f"st_{name}"] = getattr(found, f"st_{name}_ns")
        return attributes

    def open(self, path: str, flags: int) -> int:
        self._faults.strike("open", path)
        return self._keep(os.open(self._real(path), flags & ~os.O_DIRECT), path)

    def create(self, path: str, mode: int, flags: int) -> int:
        self._faults.strike("create", path)
        return self._keep(os.open(self._real(path), flags | os.O_CREAT, mode), path)

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        fault = self._faults.strike("read", self._path(path, fh))
        if fault is not None and fault.halves and size > 1:
            size //= 2
        data = os.pread(fh, size, offset)
        if fault is not None and fault.flips and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        return data

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
        fault = self._faults.strike("write", self._path(path, fh))
        if fault is not None and fault.halves and len(data) > 1:
            data = data[: len(data) // 2]
        return os.pwrite(fh, data, offset)

    def flush(self, path: str | None, fh: int) -> int:
        self._faults.strike("flush", self._path(path, fh))
        return 0

    def release(self, path: str | None, fh: int) -> int:
        self._paths.pop(fh, None)
        os.close(fh)
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        self._faults.strike("fsync", self._path(path, fh))
        os.fsync(fh)
        return 0

    def opendir(self, path: str) -> int:
        return self._keep(os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY), path)

    releasedir = release

    def fsyncdir(self, path: str | None, datasync: int, fh: int) -> int:
        self._faults.strike("fsyncdir", self._path(path, fh))
        os.fsync(fh)
        return 0

    def readdir(self, path: str | None, fh: int) -> list[tuple[str, dict[str, int], int]]:
        self._faults.strike("readdir", self._path(path, fh))
        with os.scandir(fh) as entries:
            # An entry without an inode number is none to the C library.
            return [(entry.name, {"st_ino": entry.inode()}, 0) for entry in entries]

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        self._faults.strike("truncate", self._path(path, fh))
        os.truncate(fh if fh is not None else self._real(path), length)
        return 0

    def chmod(self, path: str | None, mode: int) -> int:
        self._faults.strike("chmod", self._path(path, None))
        os.chmod(self._real(path), mode)
        return 0

    def utimens(self, path: str | None, times: tuple[int, int] | None = None) -> int:
        self._faults.strike("utimens", self._path(path, None))
        os.utime(self._real(path), ns=times or (time.time_ns(),) * 2)
        return 0

    def rename(self, old: str, new: str) -> int:
        self._faults.strike("rename", new)
        os.rename(self._real(old), self._real(new))
        for fh, path in list(self._paths.items()):
            if path == old:
                self._paths[fh] = new
        return 0

    def unlink(self, path: str) -> int:
        self._faults.strike("unlink", path)
        os.unlink(self._real(path))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._faults.strike("mkdir", path)
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        self._faults.strike("rmdir", path)
        os.rmdir(self._real(path))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        self._faults.strike("statfs", path)
        found = os.statvfs(self._backing)
        names = [
            "bsize",
            "frsize",
            "blocks",
            "bfree",
            "bavail",
            "files",
            "ffree",
            "favail",
            "namemax",
        ]
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    def _keep(self, fh: int, path: str) -> int:
        self._paths[fh] = path
        return fh

    def _path(self, path: str | None, fh: int | None) -> str:
        return path if path is not None else self._paths.get(fh or 0, "")

    def _real(self, path: str | None) -> str:
        return f"{self._backing}{path}"


def encode_faults(faults: tuple[Fault, ...]) -> list[dict[str, Any]]:
    """As `Faults.command` takes them."""
    return [asdict(fault) for fault in faults]


def _say(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _obey(faults: Faults, mount: str) -> None:
    for line in sys.stdin:
        _say(faults.command(json.loads(line)))
    # Whoever started this is gone or done: leave no mount behind, whatever hangs.
    subprocess.run(["umount", "--lazy", mount], check=False, stderr=subprocess.DEVNULL)
    os._exit(0)


def main(backing: str, mount: str, mode: str) -> None:
    """Mounts and serves."""
    os.environ["FUSE_LIBRARY_NAME"] = "fuse3"
    import mfusepy  # from the dev extra; the parent says so when it is missing

    os.umask(0)
    faults = Faults()
    threading.Thread(target=_obey, args=(faults, mount), daemon=True).start()
    options: dict[str, Any] = {"fsname": "kvserve-faults"}
    if (mfusepy.fuse_version_major, mfusepy.fuse_version_minor) >= (3, 12):
        # A hung operation holds a thread; ten of them is the default.
        options["max_threads"] = _THREADS_MAX
    operations = PassThrough(backing, faults, is_direct=mode == "direct")
    mfusepy.FUSE(operations, mount, foreground=True, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
