"""A real `kvserve serve` process on loopback, for demos, benchmarks and tests."""

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvserve.errors import ServerUnavailable

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 40.0


class ServerProcess:
    """Starts on entry, SIGTERM on exit. `address` is where it answers; its log is `log_path`."""

    def __init__(
        self,
        root: Path,
        *,
        listen: str = "127.0.0.1:0",
        settings: tuple[str, ...] = (),
        config: Path | None = None,
    ) -> None:
        self.root = root
        self.log_path = root.with_name(f"{root.name}.log")
        self.address = ""
        self._address_file = root.with_name(f"{root.name}.address")
        self._command = [sys.executable, "-m", "kvserve", "serve", "--root", str(root)]
        self._command += ["--listen", listen, "--address-file", str(self._address_file)]
        if config is not None:
            self._command += ["--config", str(config)]
        for setting in settings:
            self._command += ["--set", setting]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def serving_pids(self) -> list[int]:
        """The processes that serve: the workers, or the only one."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("ascii")
        return [int(pid) for pid in children.split()] or [self.pid]

    def start(self) -> Self:
        """Returns once the server answers.

        Raises:
            ServerUnavailable: it ended or did not answer in time; the message has its log.
        """
        self._address_file.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._address_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerUnavailable(f"the server did not start:\n{self.log()}")
            time.sleep(0.02)
        self.address = self._address_file.read_text("utf-8")
        return self

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def stop(self) -> int:
        """SIGTERM, then waits; the exit status."""
        assert self._process is not None, "not started"
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Waits for the end, kills what takes too long; the exit status."""
        assert self._process is not None, "not started"
        try:
            return self._process.wait(_STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL; harmless when it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
