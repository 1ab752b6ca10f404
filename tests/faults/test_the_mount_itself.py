"""Without faults the failing mount is a file system like any other: what all its tests rest on."""

import errno
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from kvserve.fs import FileSystem, PosixFileSystem
from kvserve.testing.fuse_faults import Fault
from kvserve.testing.fuse_mount import FaultyMount
from tests.contract.file_system_contract import FileSystemContract
from tests.faults.mounts import Case, Serving, until

_TREES = count()


class TestPosixOnTheMount(FileSystemContract):
    @pytest.fixture
    def fs(self) -> FileSystem:
        return PosixFileSystem()

    @pytest.fixture
    def tree(self, shared: tuple[FaultyMount, Serving]) -> str:
        directory = shared[0].path / f"tree{next(_TREES)}"
        directory.mkdir()
        return str(directory)

    def put(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def get(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).exists() else None


def test_its_kind(shared: tuple[FaultyMount, Serving]) -> None:
    assert PosixFileSystem().kind(str(shared[0].path)) == "fuse"


def test_faults_are_counted_and_end(case: Case) -> None:
    case.tree.mkdir()
    path = case.mount.path / case.tree.name / "file"
    path.write_bytes(b"kv" * 100)
    case.mount.inject(Fault("read", "*/file", error="EIO", skip=1, count=2))
    fd = os.open(path, os.O_RDONLY)
    results = []
    for _ in range(4):
        try:
            results.append(os.pread(fd, 2, 0))
        except OSError as error:
            results.append(error.errno)
    os.close(fd)
    assert results == [b"kv", errno.EIO, errno.EIO, b"kv"]
    assert case.mount.struck() == [2]


def test_unknown_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="no operation 'raed'"):
        Fault("raed")
    with pytest.raises(ValueError, match="no errno is named 'EOI'"):
        Fault("read", error="EOI")


_VANISHING = """
import os, sys
from pathlib import Path
from kvserve.testing.fuse_mount import FaultyMount
FaultyMount(Path(sys.argv[1]), Path(sys.argv[2])).start()
assert os.path.ismount(sys.argv[2])
os._exit(0)
"""


def test_it_ends_with_whoever_started_it(mount: FaultyMount) -> None:
    """A test run that is killed leaves no mount behind."""
    mount.unmount()
    command = [sys.executable, "-c", _VANISHING, str(mount.backing), str(mount.path)]
    subprocess.run(command, check=True, timeout=20)
    until(lambda: str(mount.path) not in Path("/proc/mounts").read_text("utf-8"))
