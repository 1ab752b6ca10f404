"""What the nixl plane of one server shares: the agent, staging memory, who can be written to.

Theory of operation. Frames are read and verified in slots of memory that is registered once.
A write goes from a slot into a client's region, without the client's doing. NIXL tells nothing by
itself: while writes are in flight one task asks for their states, at first each turn of the loop,
later once in a millisecond; with nothing in flight nothing runs.

A write cannot be taken back. A transfer that ends early hands its connection and what it has in
flight to `retire`, which tells the client once all of it has ended: then the region is quiet (T6).
A client that takes nothing any more is disconnected after some seconds, and not told.

Bounds: slots; remote agents (those that nobody uses give way, or go after a while); retirings, of
which each holds one of the port's connections.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

from kvserve.config import Config
from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest, Overloaded, ServerUnavailable
from kvserve.format.records import encode_quiet
from kvserve.nixl_agent import NixlAgent, Piece, Write
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.planes.nixl_slots import Slot, Slots

log = logging.getLogger(__name__)

IN_FLIGHT_MAX = 4
"""Writes of one fetch."""
_EAGER_POLLS = 50
_POLL_S = 0.001
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
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class InFlight:
    """A write; `ended` gets its error, or None. It holds its slot until then."""

    remote: Remote
    write: Write
    slot: Slot | None
    ended: "asyncio.Future[ServerUnavailable | None]"


class NixlWriter:
    """One per server; made on a thread, since an agent takes a while."""

    def __init__(self, *, frame_size_bytes: int, to_read_into: int, to_write_from: int) -> None:
        """Numbers of slots, see `Slots`. Raises `InvalidRequest`, see `NixlAgent`."""
        self._agent = NixlAgent()
        self.slots = Slots(
            frame_size_bytes,
            to_read_into=to_read_into,
            to_write_from=to_write_from,
            register=self._agent.register,
        )
        self._remotes: dict[bytes, Remote] = {}
        self._in_flight: list[InFlight] = []
        self._polling: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return (
            f"<NixlWriter {len(self._remotes)} remotes, {len(self._in_flight)} writes, "
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
        """
        known = self._remotes.get(metadata)
        if known is not None:
            return known
        self._forget_idle()
        if len(self._remotes) >= _REMOTES_MAX:
            raise Overloaded(f"{_REMOTES_MAX} regions are fetched into over nixl")
        loop = asyncio.get_running_loop()
        name = await loop.run_in_executor(None, self._agent.add_remote, metadata)
        known = self._remotes.get(metadata)  # by another fetch, meanwhile
        if known is None:
            if name == self._agent.name or any(it.name == name for it in self._remotes.values()):
                raise InvalidRequest(f"NIXL agent {name} is known with other metadata")
            known = self._remotes[metadata] = Remote(name, metadata, used_at=loop.time())
        return known

    def write(self, remote: Remote, slot: Slot, there: Sequence[Piece]) -> InFlight:
        """Starts a write from the slot's begin on; it may have ended on return.

        Raises:
            ServerUnavailable: the client is gone.
        """
        loop = asyncio.get_running_loop()
        if remote.is_gone:
            raise ServerUnavailable(f"{remote.name} was disconnected")
        ends = accumulate(size for _, size in there)
        here = [
            (slot.address + end - size, size) for end, (_, size) in zip(ends, there, strict=True)
        ]
        try:
            write = self._agent.write(remote.name, here, there)
        except ServerUnavailable:
            self.disconnect(remote)
            raise
        started = InFlight(remote, write, slot, loop.create_future())
        if not self._settle(started):
            self._in_flight.append(started)
            if self._polling is None:
                self._polling = loop.create_task(self._poll())
        return started

    def retire(
        self, port: DataPort, connection: DataSocket, remote: Remote, writes: Sequence[InFlight]
    ) -> None:
        """A fetch ended early: waits for its writes, says so, and closes the connection."""
        retiring = asyncio.get_running_loop().create_task(
            self._retire(port, connection, remote, writes)
        )
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def disconnect(self, remote: Remote) -> None:
        """Whatever is in flight to it fails."""
        if remote.is_gone:
            return
        remote.is_gone = True
        self._remotes.pop(remote.metadata, None)
        gone = ServerUnavailable(f"{remote.name} was disconnected: it is gone, or takes nothing")
        for it in [it for it in self._in_flight if it.remote is remote]:
            self._in_flight.remove(it)
            self._end(it, gone)
        self._agent.remove_remote(remote.name)

    async def stop(self) -> None:
        """When all transfers have ended: waits for what they left, and disconnects."""
        if self._retiring:
            await asyncio.wait(list(self._retiring))
        if self._polling is not None:
            await asyncio.wait([self._polling])
        for remote in list(self._remotes.values()):
            self.disconnect(remote)
        self._agent.close()

    def _forget_idle(self) -> None:
        """Room for one more: those not used for a while go, and else the one longest unused."""
        now = asyncio.get_running_loop().time()
        unused = sorted(
            (it for it in self._remotes.values() if not it.users), key=lambda it: it.used_at
        )
        for index, remote in enumerate(unused):
            is_full = not index and len(self._remotes) >= _REMOTES_MAX
            if is_full or now - remote.used_at > _REMOTE_IDLE_S:
                self.disconnect(remote)

    async def _poll(self) -> None:
        quiet_polls = 0
        while self._in_flight:
            left = [it for it in list(self._in_flight) if not self._settle(it)]
            quiet_polls = quiet_polls + 1 if len(left) == len(self._in_flight) else 0
            self._in_flight = left
            await asyncio.sleep(0 if quiet_polls < _EAGER_POLLS else _POLL_S)
        self._polling = None

    def _settle(self, it: InFlight) -> bool:
        """Whether it has ended."""
        if it.ended.done():
            return True
        error: ServerUnavailable | None = None
        try:
            if not it.write.check():
                return False
        except ServerUnavailable as found:
            error = found
        self._end(it, error)
        if error is not None:
            self.disconnect(it.remote)
        return True

    @staticmethod
    def _end(it: InFlight, error: ServerUnavailable | None) -> None:
        it.write.release()
        it.slot = None
        if not it.ended.done():
            it.ended.set_result(error)

    async def _retire(
        self, port: DataPort, connection: DataSocket, remote: Remote, writes: Sequence[InFlight]
    ) -> None:
        try:
            with self.using(remote):
                left = [it.ended for it in writes if not it.ended.done()]
                if left and (await asyncio.wait(left, timeout=_RETIRE_S))[1]:
                    log.warning("%s takes no writes: disconnected", connection.peer)
                    self.disconnect(remote)
                # Of one that was disconnected nobody here knows what is still under way.
                if not remote.is_gone:
                    await say_quiet(connection)
        finally:
            port.close(connection)


def open_writer_blocking(config: Config) -> NixlWriter:
    """Raises `InvalidRequest`: NIXL is not there, or the settings leave no data connections."""
    if not config.server.has_data_port:
        raise InvalidRequest("server.nixl needs the tcp plane: set server.data_listen to HOST:PORT")
    limits = config.limits
    return NixlWriter(
        frame_size_bytes=limits.frame_size_bytes,
        to_read_into=limits.staging_size_bytes // limits.frame_size_bytes,
        to_write_from=limits.transfers_max * IN_FLIGHT_MAX,
    )


async def say_quiet(connection: DataSocket) -> None:
    """Nothing of this fetch is written any more."""
    with suppress(ServerUnavailable, TimeoutError):
        async with asyncio.timeout(_SAY_QUIET_S):
            await connection.send((encode_quiet(),))
