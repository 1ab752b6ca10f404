"""What the nixl plane of one server shares: the agent, staging memory, who can be reached.

Theory of operation. Frames lie in slots of memory that is registered once. A copy goes from a slot
into a client's region (fetch) or from there into a slot (store), without the client's doing. NIXL
tells nothing by itself: while copies are in flight one task asks for their states, at first each
turn of the loop, later once in a millisecond. With nothing in flight NIXL is asked once in a
second, and not at all where no client is known: what UCX keeps of a client that was killed (its
sockets) goes only then.

A copy cannot be taken back. A transfer that ends early hands its connection and what it has in
flight to `retire`, which tells the client once all of it has ended: then the region is quiet (T6).
A client that moves nothing any more is given up after some seconds, and not told. What is in flight
to it keeps its slots until NIXL says that it has ended, by the client's death at the latest: a
stopped client that goes on after an hour gets, and sends, its bytes then.

Bounds: slots; remote agents (those that nobody uses give way, or go after a while); retirings, of
which each holds one of the port's connections. A client that was given up is not served before all
that it holds has ended, so it holds no more than the transfers that it had.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

from kvserve.config import Config
from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest, Overloaded, ServerUnavailable
from kvserve.format.records import encode_quiet
from kvserve.nixl_agent import Copy, NixlAgent, Piece
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.planes.nixl_slots import Slot, Slots

log = logging.getLogger(__name__)

IN_FLIGHT_MAX = 4
"""Copies of one transfer."""
_EAGER_POLLS = 50
_POLL_S = 0.001
# With nothing in flight, or only what was given up.
_IDLE_POLL_S = 1.0
_GIVEN_UP_POLL_S = 0.05
_IDLE_POLLS = 8
_REMOTES_MAX = 1024
_REMOTE_IDLE_S = 120.0
_RETIRE_S = 5.0
_SAY_QUIET_S = 1.0


@dataclass(slots=True, eq=False)
class Remote:
    """A client's agent, that is one region of it."""

    name: str
    metadata: bytes
    users: int = 0
    used_at: float = 0.0
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class InFlight:
    """A copy. `ended` gets its error, or None; it is an error too that its client is given up.
    Only then may it go on, and it holds its slot until it does not."""

    remote: Remote
    copy: Copy
    slot: Slot | None
    ended: "asyncio.Future[ServerUnavailable | None]"


class NixlPort:
    """One per server; made on a thread, since an agent takes a while."""

    def __init__(self, *, frame_size_bytes: int, to_keep: int, to_pass: int) -> None:
        """Numbers of slots, see `Slots`. Raises `InvalidRequest`, see `NixlAgent`."""
        self._agent = NixlAgent()
        self.slots = Slots(
            frame_size_bytes,
            to_keep=to_keep,
            to_pass=to_pass,
            register=self._agent.register,
        )
        self._remotes: dict[bytes, Remote] = {}
        self._in_flight: list[InFlight] = []
        self._polling: asyncio.Task[None] | None = None
        self._starts = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return (
            f"<NixlPort {len(self._remotes)} remotes, {len(self._in_flight)} in flight, "
            f"{len(self._retiring)} retiring, {self.slots.taken} of {self.slots.count} slots>"
        )

    @contextmanager
    def using(self, remote: Remote) -> Iterator[Remote]:
        """Keeps it connected during the block."""
        remote.users += 1
        try:
            yield remote
        finally:
            remote.users -= 1
            remote.used_at = asyncio.get_running_loop().time()

    async def remote(self, metadata: bytes) -> Remote:
        """The agent that the metadata is of.

        Raises:
            InvalidRequest: it is of none, or of one that is known with other metadata.
            Overloaded: as many as can be are in use.
            ServerUnavailable: it was given up, and holds what was in flight.
        """
        known = self._remotes.get(metadata)
        if known is not None:
            self._check(known)
            return known
        self._forget_idle()
        if len(self._remotes) >= _REMOTES_MAX:
            raise Overloaded(f"{_REMOTES_MAX} regions are in use over nixl")
        loop = asyncio.get_running_loop()
        name = await loop.run_in_executor(None, self._agent.add_remote, metadata)
        known = self._remotes.get(metadata)  # by another fetch, meanwhile
        if known is None:
            if name == self._agent.name or any(it.name == name for it in self._remotes.values()):
                raise InvalidRequest(f"NIXL agent {name} is known with other metadata")
            known = self._remotes[metadata] = Remote(name, metadata, used_at=loop.time())
            if self._polling is None:
                self._polling = loop.create_task(self._poll())
        self._check(known)
        return known

    def write(self, remote: Remote, slot: Slot, there: Sequence[Piece]) -> InFlight:
        """Starts a copy from the slot's begin on to the client; it may have ended on return.

        Raises:
            ServerUnavailable: the client is gone.
        """
        return self._start(self._agent.write, remote, slot, there)

    def read(self, remote: Remote, slot: Slot, there: Sequence[Piece]) -> InFlight:
        """The same from the client into the slot."""
        return self._start(self._agent.read, remote, slot, there)

    def retire(
        self, port: DataPort, connection: DataSocket, remote: Remote, copies: Sequence[InFlight]
    ) -> None:
        """A transfer ended early: waits for its copies, says so, and closes the connection."""
        retiring = asyncio.get_running_loop().create_task(
            self._retire(port, connection, remote, copies)
        )
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def give_up(self, remote: Remote) -> None:
        """It is gone, or moves nothing, or is not needed: its transfers fail, and it goes once
        nothing is in flight to it any more."""
        remote.is_given_up = True
        gone = ServerUnavailable(f"{remote.name} was given up: it is gone, or moves nothing")
        for it in self._in_flight:
            if it.remote is remote and not it.ended.done():
                it.ended.set_result(gone)
        self._remove_if_unused(remote)

    async def stop(self) -> None:
        """When all transfers have ended: waits for what they left, and disconnects."""
        if self._retiring:
            await asyncio.wait(list(self._retiring))
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        for it in self._in_flight:  # of clients that were given up
            it.copy.release()
        self._in_flight.clear()
        for remote in list(self._remotes.values()):
            self.give_up(remote)
        self._agent.close()

    def _start(
        self,
        start: Callable[[str, Sequence[Piece], Sequence[Piece]], Copy],
        remote: Remote,
        slot: Slot,
        there: Sequence[Piece],
    ) -> InFlight:
        self._check(remote)
        ends = accumulate(size for _, size in there)
        here = [
            (slot.address + end - size, size) for end, (_, size) in zip(ends, there, strict=True)
        ]
        try:
            copy = start(remote.name, here, there)
        except ServerUnavailable:
            self.give_up(remote)
            raise
        ended = asyncio.get_running_loop().create_future()
        started = InFlight(remote, copy, slot, ended)
        if not self._settle(started):
            self._in_flight.append(started)
            self._starts.set()
        return started

    @staticmethod
    def _check(remote: Remote) -> None:
        if remote.is_given_up:
            raise ServerUnavailable(f"{remote.name} was given up: it is gone, or moved nothing")

    def _forget_idle(self) -> None:
        """Room for one more: those not used for a while go, and else the one longest unused."""
        now = asyncio.get_running_loop().time()
        unused = sorted(
            (it for it in self._remotes.values() if not it.users and not it.is_given_up),
            key=lambda it: it.used_at,
        )
        for index, remote in enumerate(unused):
            is_full = not index and len(self._remotes) >= _REMOTES_MAX
            if is_full or now - remote.used_at > _REMOTE_IDLE_S:
                self.give_up(remote)

    def _remove_if_unused(self, remote: Remote) -> None:
        is_known = self._remotes.get(remote.metadata) is remote
        if is_known and not any(it.remote is remote for it in self._in_flight):
            del self._remotes[remote.metadata]
            self._agent.remove_remote(remote.name)

    async def _poll(self) -> None:
        """As long as any remote is known, and once more: UCX lets go of its sockets then."""
        quiet_polls = 0
        while self._remotes:
            ended: list[InFlight] = []
            left: list[InFlight] = []
            for it in self._in_flight:
                (ended if self._settle(it) else left).append(it)
            self._in_flight = left
            quiet_polls = 0 if ended else quiet_polls + 1
            for it in ended:
                if it.remote.is_given_up:
                    self._remove_if_unused(it.remote)
            if all(it.ended.done() for it in self._in_flight):
                await self._idle(_GIVEN_UP_POLL_S if self._in_flight else _IDLE_POLL_S)
                quiet_polls = 0
            else:
                await asyncio.sleep(0 if quiet_polls < _EAGER_POLLS else _POLL_S)
        self._ask()
        self._polling = None

    async def _idle(self, wait_s: float) -> None:
        """Until a copy is started, at most for so long."""
        self._ask()
        self._forget_idle()
        self._starts.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._starts.wait()

    def _ask(self) -> None:
        try:
            for _ in range(_IDLE_POLLS):
                self._agent.poll()
        except ServerUnavailable as error:
            log.warning("%s", error)

    def _settle(self, it: InFlight) -> bool:
        """Whether it is over: nothing of it goes on, and its slot is free."""
        error: ServerUnavailable | None = None
        try:
            if not it.copy.check():
                return False
        except ServerUnavailable as found:
            error = found
        it.copy.release()
        it.slot = None
        if not it.ended.done():
            it.ended.set_result(error)
        if error is not None and not it.remote.is_given_up:
            self.give_up(it.remote)
        return True

    async def _retire(
        self, port: DataPort, connection: DataSocket, remote: Remote, copies: Sequence[InFlight]
    ) -> None:
        try:
            with self.using(remote):
                left = [it.ended for it in copies if not it.ended.done()]
                if left and (await asyncio.wait(left, timeout=_RETIRE_S))[1]:
                    log.warning("%s moves nothing: given up", connection.peer)
                    self.give_up(remote)
                # Of one that was given up nobody here knows what is still under way.
                if not remote.is_given_up:
                    await say_quiet(connection)
        finally:
            port.close(connection)


def open_port_blocking(config: Config) -> NixlPort:
    """Raises `InvalidRequest`: NIXL is not there, or the settings leave no data connections."""
    if not config.server.has_data_port:
        raise InvalidRequest("server.nixl needs the tcp plane: set server.data_listen to HOST:PORT")
    limits = config.limits
    return NixlPort(
        frame_size_bytes=limits.frame_size_bytes,
        to_keep=limits.staging_size_bytes // limits.frame_size_bytes,
        to_pass=limits.transfers_max * IN_FLIGHT_MAX,
    )


async def say_quiet(connection: DataSocket) -> None:
    """Nothing of this transfer is in flight any more."""
    with suppress(ServerUnavailable, TimeoutError):
        async with asyncio.timeout(_SAY_QUIET_S):
            await connection.send((encode_quiet(),))
