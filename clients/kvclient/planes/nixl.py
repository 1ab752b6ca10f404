"""Fetches over nixl, client side: the server writes into the region over NIXL (RDMA, where it is).

The client registers its region and tells the server how to reach it. Heads of records come over the
data connection, each after its bytes; the client checks them in the region as on any plane. Over
TCP, and while connecting, nothing arrives unless this end asks NIXL for it, so it does, once in a
millisecond for as long as a fetch is open.

T6 here: a write that is under way cannot be recalled, and only the server knows of it. So whatever
ends a fetch early, the plane cancels the call and reads on until the server says that it writes no
more (QUIET). A server that closes the connection without that word has died or given up: then the
region's agent is closed, after which no network brings anything into the region; a process on this
host that has ended cannot write either. One that hangs holds the cancel.
"""

import asyncio
from collections.abc import Sequence

from kvclient.fetch_session import FetchSession
from kvclient.nixl_region import RegionAgent, region_agent_blocking
from kvclient.planes.base import FetchCall, Took, Unreachable
from kvclient.planes.outlast import outlast
from kvclient.planes.tcp import DataConnections, raise_status
from kvclient.region import Region
from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest, MalformedMessage, ServerFault, ServerUnavailable
from kvserve.format.messages import chunk_status
from kvserve.format.records import (
    EXTRA_SIZE_BYTES_MAX,
    HEAD_SIZE_BYTES,
    RecordHead,
    RecordKind,
    decode_head,
    decode_text,
)
from kvserve.format.remote_region import encode_remote_region
from kvserve.model import Verdict
from kvserve.v1 import kvserve_pb2 as pb

_POLL_S = 0.001


class NixlFetchPlane:
    """Implements `FetchPlane`."""

    def __init__(
        self,
        connections: DataConnections,
        offer: pb.DataOffer,
        region: Region,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._connections = connections
        self._offer = offer
        self._region = region
        self._spans = spans

    async def receive(self, call: FetchCall, session: FetchSession, took: Took) -> None:
        agent = await agent_of(self._region)
        connection = await self._connections.open(self._offer, "nixl")
        records = Records(connection, session, took)
        reading = asyncio.create_task(records.read())
        polling = asyncio.create_task(poll(agent))
        is_clean = False
        try:
            region = encode_remote_region(
                agent.address, agent.size_bytes, agent.metadata, self._spans
            )
            await connection.send((region,))
            ended, _ = await asyncio.wait([reading, polling], return_when=asyncio.FIRST_COMPLETED)
            if (why := ended.pop().exception()) is not None:
                if isinstance(why, ServerUnavailable):
                    await raise_status(call)
                raise why
            if isinstance(await call.read(), bytes):
                raise ServerFault("a reply came after the last layer")
            is_clean = True
        finally:
            try:
                if is_clean:
                    self._connections.keep(connection)
                else:
                    call.cancel()
                    await _until_quiet(connection, records, reading, agent)
            finally:
                polling.cancel()


class Records:
    """Reads the records of one fetch. Never stops inside of one, so that the last word is found."""

    def __init__(self, connection: DataSocket, session: FetchSession, took: Took) -> None:
        self.is_quiet = False
        """The server writes no more: everything has landed, or it has said so."""
        self.is_over = False
        """Nothing more comes."""
        self._connection = connection
        self._session = session
        self._took = took
        self._is_given_up = False
        self._is_lost = False

    def give_up(self) -> None:
        """From here on records are dropped: the region is not to be looked at."""
        self._is_given_up = True

    async def read(self) -> None:
        """Until every layer is there. Called again after an error, it goes on with the next record.

        Raises:
            ServerUnavailable: the connection, or the fetch, has ended.
        """
        raw_head = memoryview(bytearray(HEAD_SIZE_BYTES))
        all_extra = memoryview(bytearray(EXTRA_SIZE_BYTES_MAX))
        try:
            while self._is_given_up or not self._session.is_finished:
                await self._connection.receive([raw_head])
                if self._is_lost:
                    continue
                head = decode_head(raw_head)
                extra = all_extra[: head.extra_size_bytes]
                await self._connection.receive([extra])
                if head.kind is RecordKind.QUIET:
                    self.is_quiet = True
                    raise ServerUnavailable("the server has ended the fetch")
                if not self._is_given_up:
                    self._take(head, extra)
        except ServerUnavailable:
            self.is_over = True
            raise
        except MalformedMessage:
            self._is_lost = True
            raise
        self.is_quiet = self.is_over = True

    def _take(self, head: RecordHead, extra: memoryview) -> None:
        session = self._session
        if head.kind is RecordKind.LANDED:
            session.place(
                head.layer_index, head.first_chunk, head.slice_offset, head.payload_size_bytes
            )
            events = session.landed(bytes(extra))
        elif head.kind is RecordKind.MISS:
            verdict = Verdict(chunk_status(head.slice_offset), decode_text(extra))
            events = session.miss(head.first_chunk, verdict)
        else:
            raise MalformedMessage(f"a record of kind {head.kind.name} in a fetch over nixl")
        if events:
            self._took(events)


async def agent_of(region: Region) -> RegionAgent:
    """Raises `Unreachable` if NIXL does not work here."""
    making = asyncio.get_running_loop().run_in_executor(None, region_agent_blocking, region)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])  # the region is in use until then
        raise
    except (InvalidRequest, ServerUnavailable) as error:
        raise Unreachable("nixl", str(error)) from error


async def poll(agent: RegionAgent) -> None:
    """Ends only by an error: the agent was closed, since a server has died."""
    while True:
        agent.poll()
        await asyncio.sleep(_POLL_S)


async def _until_quiet(
    connection: DataSocket, records: Records, reading: "asyncio.Task[None]", agent: RegionAgent
) -> None:
    """Waits for the server's word or end."""

    async def is_over() -> bool:
        nonlocal reading
        await asyncio.wait([reading])
        reading.exception()  # it is why the fetch ends, or nobody waits for it
        if not records.is_over:
            reading = asyncio.create_task(records.read())
        return records.is_over

    records.give_up()
    connection.finish_sending()
    try:
        await outlast(is_over)
    finally:
        if not records.is_quiet:
            agent.close()
        connection.close()
