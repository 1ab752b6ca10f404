"""A real mount that fails on demand, for tests of whatever runs on it: see `fuse_faults`.

The mount is a process of its own, so what a server meets there is what a kernel gives it: errnos,
hangs that no signal ends, a mount that is dead. Needs root, /dev/fuse, libfuse 3 and `mfusepy`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvserve.testing.fuse_faults import Fault, encode_faults

_END_TIMEOUT_S = 10.0


def why_no_fuse() -> str:
    """What is missing here for a `FaultyMount`; empty if nothing is."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is missing: pip install mfusepy"
    if find_library("fuse3") is None:
        return "libfuse 3 is missing: apt-get install fuse3"
    return ""


class FaultyMount:
    """`backing` seen through `path`. Starts on entry; on exit nothing is mounted any more."""

    def __init__(self, backing: Path, path: Path, *, is_direct: bool = True) -> None:
        self.backing = backing
        self.path = path
        self.log_path = backing.with_name(f"{backing.name}.fuse.log")
        self._mode = "direct" if is_direct else "cached"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Mounts; returns once it is up. Again after `kill` or `unmount`, too.

        Raises:
            OSError: it could not be mounted; the message has libfuse's words.
        """
        command = [sys.executable, "-m", "kvserve.testing.fuse_faults"]
        command += [str(self.backing), str(self.path), self._mode]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.kill()
            raise OSError(f"no mount at {self.path}:\n{self.log_path.read_text('utf-8')}")
        return self

    def inject(self, *faults: Fault) -> None:
        """These and no others from now on; what hangs goes on hanging."""
        self._command({"faults": encode_faults(faults)})

    def heal(self) -> None:
        """No faults any more, and what hangs goes on."""
        self._command({"faults": [], "release": True})

    def struck(self) -> list[int]:
        """By injected fault: how many operations it struck."""
        counts: list[int] = self._command({})["struck"]
        return counts

    def hanging(self) -> int:
        """Operations that hang now."""
        count: int = self._command({})["hanging"]
        return count

    def kill(self) -> None:
        """SIGKILL to the file system's process: the mount stays and is dead (ENOTCONN)."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def unmount(self) -> None:
        """Takes the mount away, also from under open files: `path` is an empty directory then.

        What hangs is let go with an error.
        """
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)
        process, self._process = self._process, None
        if process is not None:
            try:
                process.communicate(timeout=_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.unmount()
