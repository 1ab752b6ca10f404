"""A NIXL agent with one UCX backend, typed, and with our errors. Both ends use it.

NIXL comes with the optional extra `nixl`; it is imported when the first agent is made. An agent has
no thread of its own here (NIXL's progress thread never sleeps): whoever has something in flight
calls `poll`. Making an agent takes tens of milliseconds, the first one in a process half a second:
do it on a thread. All other calls are short, and may come from any thread.
"""

import importlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from kvserve.errors import HandleClosed, InvalidRequest, ServerUnavailable

log = logging.getLogger(__name__)

_MODULES: Final = ("nixl_cu12", "nixl_cu13")
"""One for each CUDA version; on a machine without CUDA they are alike."""
_BACKEND: Final = "UCX"
HOW_TO_INSTALL: Final = (
    "the package nixl-cu12 is not installed: pip install 'PATH/TO/kvserve[nixl]' "
    "(without CUDA: pip install --no-deps nixl-cu12, and numpy)"
)
_of_another_process: list[object] = []


@lru_cache(maxsize=1)
def is_installed() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in _MODULES)


class NixlAgent:
    """One end of one-sided copies; its name is random and unique."""

    def __init__(self) -> None:
        """Raises `InvalidRequest` if NIXL is not installed, or does not work here."""
        nixl = load_nixl()
        self._errors = _errors_of(nixl)
        self.name = f"kv-{secrets.token_hex(16)}"
        self._pid = os.getpid()
        self._registered: list[Any] = []
        try:
            config = nixl.nixl_agent_config(
                enable_prog_thread=False,
                backends=[_BACKEND],
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            self._agent: Any = nixl.nixl_agent(self.name, config)
            if _BACKEND not in self._agent.backends:
                raise RuntimeError(f"it has no backend {_BACKEND}")
        except self._errors as error:
            raise InvalidRequest(f"NIXL does not work here: {error}") from error

    def __repr__(self) -> str:
        return f"<NixlAgent {self.name}{' closed' if self.is_closed else ''}>"

    @property
    def is_closed(self) -> bool:
        return self._agent is None

    def register(self, address: int, size_bytes: int) -> None:
        """Memory that is read or written; it must stay there until `close`.

        Raises:
            ServerUnavailable: it cannot be registered, with NIXL's words.
        """
        with self._translated("memory cannot be registered") as agent:
            memory = [(address, size_bytes, 0, "")]
            self._registered.append(agent.register_memory(memory, "DRAM", [_BACKEND]))

    def metadata(self) -> bytes:
        """What another agent must know to reach what is registered here."""
        with self._translated("no metadata") as agent:
            known: bytes = agent.get_agent_metadata()
            return known

    def add_remote(self, metadata: bytes) -> str:
        """The remote agent's name; takes tens of milliseconds.

        Raises:
            InvalidRequest: that is no metadata, or of an agent that cannot be reached.
        """
        if self._agent is None:
            raise HandleClosed("the NIXL agent is closed")
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise InvalidRequest(f"NIXL metadata cannot be used: {_words(error)}") from error
        return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)

    def remove_remote(self, name: str) -> None:
        """Disconnects, once nothing is in flight to or from it.

        Until then NIXL keeps the connection, and a copy under way goes on, whatever is done here:
        if the other side takes it up after an hour, it is made after an hour. And nothing tells any
        more how it ends. So the caller waits for the ends before this.
        """
        try:
            with self._translated(f"{name} cannot be removed") as agent:
                agent.remove_remote_agent(name)
        except ServerUnavailable as error:
            log.debug("%s", error)  # NIXL has dropped it already: the other side is gone

    def write(self, remote: str, here: Sequence["Piece"], there: Sequence["Piece"]) -> "Copy":
        """Starts a copy of pieces of registered memory from here to there; they pair up, with equal
        sizes.

        Raises:
            ServerUnavailable: the other side is gone, or what is there is not registered.
        """
        with self._translated(f"the write to {remote} failed"):
            return self._start("WRITE", remote, here, there)

    def read(self, remote: str, here: Sequence["Piece"], there: Sequence["Piece"]) -> "Copy":
        """The same from there to here."""
        with self._translated(f"the read from {remote} failed"):
            return self._start("READ", remote, here, there)

    def poll(self) -> None:
        """Moves on what is in flight, and lets go of connections to the dead. Over TCP and while
        connecting nothing moves without it, at the end that starts nothing as well.

        Raises:
            ServerUnavailable: the agent is closed.
        """
        with self._translated("nothing arrives") as agent:
            agent.get_new_notifs()

    def close(self) -> None:
        """Ends all connections, and gives up the memory: after this nothing reaches it over the
        network. Twice is fine."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._pid != os.getpid():
            # The parent uses the same sockets: NIXL must not say good-bye on them.
            _of_another_process.append(agent)
            return
        for memory in self._registered:
            try:
                agent.deregister_memory(memory, [_BACKEND])
            except self._errors as error:
                log.warning("%s: memory stays registered: %s", self.name, _words(error))
        self._registered.clear()

    def _start(
        self, operation: str, remote: str, here: Sequence["Piece"], there: Sequence["Piece"]
    ) -> "Copy":
        agent = self._agent
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs([(*piece, 0) for piece in here], "DRAM"),
            agent.get_xfer_descs([(*piece, 0) for piece in there], "DRAM"),
            remote,
            backends=[_BACKEND],
        )
        copy = Copy(self, handle)
        try:
            copy.state = agent.transfer(handle)
        except BaseException:
            copy.release()
            raise
        return copy

    @contextmanager
    def _translated(self, what: str) -> Iterator[Any]:
        if self._agent is None:
            raise ServerUnavailable(f"{what}: the NIXL agent is closed")
        try:
            yield self._agent
        except self._errors as error:
            # Without its traceback, whose frames would hold the caller's memory for a while.
            words = f"{what}: {_words(error)}"
            raise ServerUnavailable(words) from error.with_traceback(None)


Piece = tuple[int, int]
"""Address and size of a piece of memory."""


class Copy:
    """One copy in flight."""

    __slots__ = ("_agent", "_handle", "state")

    def __init__(self, agent: NixlAgent, handle: Any) -> None:
        self.state = "PROC"
        self._agent = agent
        self._handle = handle

    def check(self) -> bool:
        """Whether it is made; moves on what is in flight.

        Raises:
            ServerUnavailable: it never will.
        """
        if self.state == "PROC":
            with self._agent._translated("a copy failed") as agent:
                self.state = agent.check_xfer_state(self._handle)
        if self.state == "ERR":
            raise ServerUnavailable("a copy failed: NIXL does not say why")
        return bool(self.state == "DONE")

    def release(self) -> None:
        """Forgets it. One that has not ended goes on: see `remove_remote`."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.release()
        except self._agent._errors as error:
            log.debug("a NIXL handle is left to its agent: %s", _words(error))


def load_nixl() -> ModuleType:
    """The package itself. Raises `InvalidRequest` if it is not installed, or cannot be imported."""
    raises = logging.raiseExceptions
    for name in _MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise InvalidRequest(f"NIXL cannot be imported: {error}") from error
        # It logs each agent to standard output, and silences the errors of all logging.
        logging.raiseExceptions = raises
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return module
    raise InvalidRequest(HOW_TO_INSTALL)


def _errors_of(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """What it raises: classes of its own without a common base, and what its bindings make."""
    bindings = importlib.import_module(f"{nixl.__name__}._bindings")
    found = [getattr(bindings, name) for name in dir(bindings) if name.endswith("Error")]
    return (*found, RuntimeError, ValueError, TypeError)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
