"""Stores over nixl, client side: the server reads the region over NIXL.

The client registers its region and tells the server how to reach it. It offers frames over the data
connection, and the server says of each when it has it. Over TCP, and while connecting, the server
gets nothing unless this end asks NIXL, so it does, once in a millisecond while frames are offered.

T6 here: a read that is under way cannot be recalled, and only the server knows of it. So whatever
ends a store early, the plane waits for the server's word that it reads no more (QUIET). A server
that dies says nothing, and one that hangs says it late: then the region's agent is closed, after
which no network reads the region. One that hangs on this host may read once more when it wakes up.
That changes no byte, and nobody publishes it, so unlike a fetch a store does not wait for it.
"""

import asyncio
from collections.abc import Sequence

from kvclient.nixl_region import RegionAgent
from kvclient.planes.base import StoreCall
from kvclient.planes.nixl import agent_of, poll
from kvclient.planes.outlast import outlast
from kvclient.planes.region_store import UNTAKEN_MAX, RegionStorePlane
from kvclient.planes.tcp import DataConnections, raise_status, receive_kind
from kvclient.region import Region
from kvserve.data_socket import DataSocket
from kvserve.errors import KvserveError, ServerFault, ServerUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.format.records import HEAD_SIZE_BYTES, RecordKind
from kvserve.format.remote_region import encode_remote_region
from kvserve.v1 import kvserve_pb2 as pb

_QUIET_S = 3.0


class NixlStorePlane(RegionStorePlane):
    """Implements `StorePlane`."""

    def __init__(
        self,
        call: StoreCall,
        connections: DataConnections,
        offer: pb.DataOffer,
        region: Region,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(call, connections, offer, region, spans)
        self._is_quiet = False
        self._error: tuple[type[KvserveError], str] | None = None
        # Set whenever one of these, or the number of frames that are not taken, has changed.
        self._news = asyncio.Event()
        self._agent: RegionAgent | None = None
        self._reading: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._agent = agent = await agent_of(self._region)
        self._connection = connection = await self._connections.open(self._offer, "nixl")
        region = encode_remote_region(agent.address, agent.size_bytes, agent.metadata, self._spans)
        try:
            await self._send((region,))
        except ServerUnavailable:
            await raise_status(self._call)  # it refused the region
            raise
        self._reading = asyncio.create_task(self._read(connection))

    async def send(self, header: FrameHeader, views: Sequence[memoryview]) -> None:
        await self._until_untaken(UNTAKEN_MAX - 1)
        if self._polling is None:
            assert self._agent is not None, "not open"
            self._polling = asyncio.create_task(self._poll(self._agent))
        await self._offer_frame(header, views)

    async def settle(self) -> None:
        await self._until_untaken(0)

    async def close(self, *, is_clean: bool) -> None:
        connection, self._connection = self._connection, None
        has_failed = self._error is not None
        self._fail(ServerUnavailable("the store has ended"))
        try:
            if connection is None:
                return
            if not is_clean:
                await self._until_quiet(connection)
            elif has_failed or self._untaken:
                connection.close()
            else:
                await self._stop_reading()
                self._connections.keep(connection)
        finally:
            if self._polling is not None:
                self._polling.cancel()

    async def _until_untaken(self, count_max: int) -> None:
        """Waits until no more frames than that are untaken; raises what has failed."""
        while self._untaken > count_max or self._error is not None:
            if self._error is not None:
                kind, text = self._error
                raise kind(text)
            self._news.clear()
            await self._news.wait()
        if not self._untaken and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def _read(self, connection: DataSocket) -> None:
        """Takes the server's answers, to the last."""
        head = memoryview(bytearray(HEAD_SIZE_BYTES))
        try:
            while not self._is_quiet:
                kind = await receive_kind(connection, head)
                if kind is RecordKind.QUIET:
                    self._is_quiet = True
                    raise ServerUnavailable("the server has ended the store")
                if kind is not RecordKind.TAKEN or not self._untaken:
                    raise ServerFault(f"a record of kind {kind.name} in a store")
                self._untaken -= 1
                self._news.set()
        except KvserveError as error:
            self._fail(error)

    async def _poll(self, agent: RegionAgent) -> None:
        try:
            await poll(agent)
        except ServerUnavailable as error:  # another transfer's server has died
            self._fail(error)

    def _fail(self, error: KvserveError) -> None:
        # Not the error itself, which holds the frames that it went through, and so this plane.
        self._error = self._error or (type(error), str(error))
        self._news.set()

    async def _stop_reading(self) -> None:
        assert self._reading is not None, "open, or it could not be clean"
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _until_quiet(self, connection: DataSocket) -> None:
        """Waits for the server's word or end, for a while."""
        assert self._agent is not None, "there is a connection"
        connection.finish_sending()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll(self._agent))
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _QUIET_S
        reading = self._reading or asyncio.create_task(self._read(connection))

        async def is_over() -> bool:
            await asyncio.wait([reading], timeout=max(0.0, ends_at - loop.time()))
            return reading.done() or loop.time() >= ends_at

        try:
            await outlast(is_over)
        finally:
            reading.cancel()
            connection.close()
            if not self._is_quiet:
                self._agent.close()
