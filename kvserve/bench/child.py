"""Child processes of a benchmark: one line of JSON answers each line on standard input.

A child says hello with one line once it is ready, and ends when its standard input closes, so none
outlives the benchmark, however that ends.
"""

import asyncio
import json
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import uvloop

from kvserve.errors import ServerUnavailable

_READY_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


class Child:
    """The parent's side: starts `python -m MODULE ARGUMENTS` on entry, ends it on exit.

    `hello` is the child's first line.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.hello: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self._running().pid

    def ask(self, question: str) -> dict[str, Any]:
        """Blocks for the answer; a child that has nothing else to do answers at once.

        Raises:
            ServerUnavailable: the child has ended or does not answer.
        """
        self.tell(question)
        return self.answer()

    def tell(self, question: str) -> None:
        """Asks without waiting for the answer; raises like `ask`."""
        stdin = self._running().stdin
        assert stdin is not None
        try:
            stdin.write(question.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise ServerUnavailable(f"{' '.join(self._command)} has ended") from error

    def answer(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The next answer to what was told; blocks, and raises like `ask`."""
        stdout = self._running().stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if ready else b""
        if not line:
            raise ServerUnavailable(f"{' '.join(self._command)} ended or did not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        try:
            self.hello = self.answer(_READY_TIMEOUT_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        process = self._running()
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "not started"
        return self._process


def run_child(work: Coroutine[Any, Any, None]) -> None:
    """The child's `main`. Ctrl-C reaches it too, but only its parent says when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(work)


async def answer_parent(
    hello: dict[str, Any], answer: Callable[[], dict[str, Any]] | None = None
) -> None:
    """The child's side: says hello, answers every line, returns when the parent closes the pipe."""

    async def answer_any(_: str) -> dict[str, Any]:
        return answer() if answer is not None else {}

    await answer_questions(hello, answer_any)


async def answer_questions(
    hello: dict[str, Any], answer: Callable[[str], Awaitable[dict[str, Any]]]
) -> None:
    """The same for a child that is asked different things, one after the other."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say(hello)
    while question := await reader.readline():
        _say(await answer(question.decode()))


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
