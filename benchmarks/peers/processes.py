"""The two processes of a peer as the benchmark sees them, and its cases."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.recipes import Recipe
from kvserve.bench.child import Child
from kvserve.bench.rounds import Case, Timing
from kvserve.errors import ServerFault, ServerUnavailable

ROOT = Path(__file__).parents[2]
WAYS = {"layers": "by layer", "chunks": "whole chunks"}


class PeerChild(Child):
    """A child in the peer's environment, its errors in a log, in a process group of its own.

    The group ends with it, so that no program that it started is left.
    """

    def __init__(
        self, recipe: Recipe, side: str, work: Mapping[str, Any], *, python: Path, log: Path
    ) -> None:
        super().__init__("benchmarks.peers.child", recipe.module, side, json.dumps(work))
        self._command[0] = str(python)
        self._log = log
        self._environment = {
            # Nothing of the project's own environment, but for these very files.
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            "PYTHONPATH": str(ROOT),
            **recipe.variables,
        }

    def __enter__(self) -> Self:
        super().__enter__()
        if "error" in self.hello:
            self._stop()
            raise ServerUnavailable(self.hello["error"])
        return self

    def ask(self, question: str) -> dict[str, Any]:
        answer = super().ask(question)
        if "error" in answer:
            raise ServerFault(answer["error"])
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=self._environment,
                process_group=0,
            )

    def _stop(self) -> None:
        super()._stop()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class RunningPeer:
    """Both processes of a peer, connected, the unit stored."""

    def __init__(self, recipe: Recipe, server: PeerChild, client: PeerChild) -> None:
        self.recipe = recipe
        self.server = server
        self.client = client
        self.server_pids: list[int] = server.hello["pids"]
        self.version: str = server.hello.get("version", "")
        self.failure = ""

    def check(self) -> None:
        """Fetches both ways into scrubbed memory and compares with the source.

        Raises:
            KvserveError: it cannot do it.
        """
        for way in WAYS:
            self.server.ask("begin")
            self.client.ask(f"check {way}")
            self.server.ask("end")

    def ask(self, question: str, *, of: PeerChild) -> dict[str, Any]:
        """As the child's; after a failure nothing more is asked, or answers would not match."""
        if self.failure:
            raise ServerUnavailable(self.failure)
        try:
            return of.ask(question)
        except (ServerFault, ServerUnavailable) as error:
            self.failure = str(error)
            raise


@contextmanager
def running(
    recipe: Recipe, work: Mapping[str, Any], *, python: Path, log: Path
) -> Iterator[RunningPeer]:
    """Starts the peer, stores the unit, connects.

    Raises:
        ServerUnavailable: it does not start; the log says more.
    """
    work = {**work, "options": recipe.options}
    with (
        PeerChild(recipe, "server", work, python=python, log=log) as server,
        PeerChild(
            recipe, "client", {**work, "served": server.hello}, python=python, log=log
        ) as client,
    ):
        yield RunningPeer(recipe, server, client)


class PeerCase(Case):
    """One way to fetch the unit from a peer."""

    is_ceiling = False
    may_fail = True

    def __init__(self, peer: RunningPeer, way: str) -> None:
        self.name = f"{peer.recipe.name}_{way}"
        self.label = f"{peer.recipe.title}, {WAYS[way]}"
        self.plane = peer.recipe.plane
        self.client_pid = peer.client.pid
        if peer.server_pids:
            self.server_pid, *more = peer.server_pids
            self.more_server_pids = tuple(more)
        self._peer = peer
        self._way = way

    async def prepare(self) -> None:
        self._peer.ask("begin", of=self._peer.server)

    async def run(self) -> Timing:
        return Timing(**self._peer.ask(self._way, of=self._peer.client))

    async def clean_up(self) -> None:
        self._peer.ask("end", of=self._peer.server)
