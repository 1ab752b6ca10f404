"""`AsyncClient`: one server, any number of transfers. It connects at the first call."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from kvclient.channel import Channel, Rpcs
from kvclient.fetch import FetchHandle
from kvclient.placement import as_placement
from kvclient.planes.choice import AUTO
from kvclient.region import Region
from kvclient.status import translated
from kvclient.store import StoreHandle
from kvclient.tls import Tls
from kvserve.format.messages import descriptor_to_pb, verdicts_from_pb
from kvserve.model import ChunkStatus, Descriptor, Verdict, leading_hits, miss_counts
from kvserve.v1 import kvserve_pb2 as pb

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is and accepts; field by field as in the proto."""

    version: str
    capabilities: tuple[str, ...]
    file_system: str
    chunk_file_version: int
    chunks_max: int
    message_size_bytes_max: int
    frame_size_bytes_max: int
    transfers_max: int
    lease_ttl_s_max: float
    data_address: str

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes that the server has."""
        prefix = "plane."
        return tuple(it.removeprefix(prefix) for it in self.capabilities if it.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Presence:
    """Answer of a lookup. `prefix_chunks`: length of the leading run of hits; `leased_chunks`: how
    many hits are leased to the owner that the lookup named."""

    prefix_chunks: int
    verdicts: list[Verdict]
    leased_chunks: int = 0

    @property
    def misses(self) -> dict[ChunkStatus, int]:
        """How many chunks are misses, by reason."""
        return miss_counts(self.verdicts)

    @property
    def hits(self) -> list[bool]:
        """By chunk, holes included."""
        return [verdict.status is ChunkStatus.HIT for verdict in self.verdicts]


class AsyncClient:
    """A client of the server at `address` (HOST:PORT or unix:PATH).

    Reconnects by itself after a server restart. `timeout_s` is the default deadline of every call,
    connecting and queueing included; one that finds no server gives up after `connect_timeout_s`.
    `plane` pins how payload moves: "grpc", "tcp", "shm" (from and into a `SharedRegion`) or "nixl"
    (needs the extra); "auto" takes the best that both sides have. `tls` for a server that
    speaks TLS.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 2.0,
        plane: str = AUTO,
        tls: Tls | None = None,
    ) -> None:
        self._channel = Channel(address, connect_timeout_s, plane, tls)
        self.plane = plane
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._channel.address}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels open handles, so that their regions are quiet, and closes the connection.

        The client may be used again: it then connects anew.
        """
        await self._channel.quiesce(0.0)

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests made so far, by rpc name: layers or one for a fetch, never chunks."""
        return self._channel.requests

    @staticmethod
    def register(buffer: Any) -> Region:
        """A region over any contiguous buffer; see `Region`."""
        return Region(buffer)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """What the server is and accepts: version, planes, limits."""
        request = pb.GetServerInfoRequest()
        reply: pb.GetServerInfoReply = await self._answer(
            "GetServerInfo", lambda rpcs: rpcs.get_server_info, request, timeout_s
        )
        return ServerInfo(
            version=reply.version,
            capabilities=tuple(reply.capabilities),
            file_system=reply.file_system,
            chunk_file_version=reply.chunk_file_version,
            chunks_max=reply.limits.chunks_max,
            message_size_bytes_max=reply.limits.message_size_bytes_max,
            frame_size_bytes_max=reply.limits.frame_size_bytes_max,
            transfers_max=reply.limits.transfers_max,
            lease_ttl_s_max=reply.limits.lease_ttl_s_max,
            data_address=reply.data_address,
        )

    async def lookup(
        self,
        descriptor: Descriptor,
        *,
        lease_owner: str = "",
        lease_ttl_s: float = 0.0,
        all_ranks: bool = False,
        timeout_s: float | None = None,
    ) -> Presence:
        """Which chunks are stored; with `all_ranks` for every rank of the descriptor's group, so
        that all of them use the same prefix.

        With `lease_owner` (a request's id, unique in the tenant) and `lease_ttl_s` the hits are
        leased: they are not evicted until `release`, or for so long. A later lookup for the same
        owner and shard replaces the lease.

        Raises:
            InvalidRequest: the ttl is above the server's `lease_ttl_s_max`.
            Overloaded: the server has leased as many chunks as it may.
        """
        request = pb.LookupRequest(
            descriptor=descriptor_to_pb(descriptor),
            lease_owner=lease_owner,
            lease_ttl_s=lease_ttl_s,
            all_ranks=all_ranks,
        )
        reply: pb.LookupReply = await self._answer(
            "Lookup", lambda rpcs: rpcs.lookup, request, timeout_s
        )
        with translated(self._channel.address, "Lookup", 0):
            verdicts = verdicts_from_pb(reply.chunk_statuses, reply.details, descriptor.chunk_count)
        return Presence(leading_hits(verdicts), verdicts, reply.leased_chunks)

    async def verify(self, descriptor: Descriptor, *, timeout_s: float | None = None) -> Presence:
        """Has the server read stored chunks as a whole and compare every slice with its checksum.

        HIT: stored and right. What does not match is set aside there: a miss from then on. A fetch
        asks for this by itself for chunks that did not match on arrival. Every byte is read: it
        costs the server as much as a fetch, and takes a transfer's place.

        Raises:
            Overloaded: four are under way at the server, or too many transfers.
        """
        request = pb.VerifyRequest(descriptor=descriptor_to_pb(descriptor))
        reply: pb.VerifyReply = await self._answer(
            "Verify", lambda rpcs: rpcs.verify, request, timeout_s
        )
        with translated(self._channel.address, "Verify", 0):
            verdicts = verdicts_from_pb(reply.chunk_statuses, reply.details, descriptor.chunk_count)
        return Presence(leading_hits(verdicts), verdicts)

    async def release(
        self, lease_owner: str, *, tenant: str = "default", timeout_s: float | None = None
    ) -> int:
        """Gives free what lookups leased to this owner; returns how many chunks those were.

        Releasing twice, or what has expired, is harmless.
        """
        request = pb.ReleaseRequest(tenant=tenant, lease_owner=lease_owner)
        reply: pb.ReleaseReply = await self._answer(
            "Release", lambda rpcs: rpcs.release, request, timeout_s
        )
        return reply.released_chunks

    async def pin(
        self, descriptor: Descriptor, *, timeout_s: float | None = None
    ) -> list[ChunkStatus]:
        """Bars stored chunks from eviction and expiry, for every server and until `unpin`.

        PINNED or a MISS_* for every chunk.
        """
        return await self._pin("Pin", lambda rpcs: rpcs.pin, descriptor, timeout_s)

    async def unpin(
        self, descriptor: Descriptor, *, timeout_s: float | None = None
    ) -> list[ChunkStatus]:
        """UNPINNED or a MISS_* for every chunk."""
        return await self._pin("Unpin", lambda rpcs: rpcs.unpin, descriptor, timeout_s)

    async def _pin(
        self,
        rpc: str,
        of: Callable[[Rpcs], Callable[..., Awaitable[pb.PinReply]]],
        descriptor: Descriptor,
        timeout_s: float | None,
    ) -> list[ChunkStatus]:
        request = pb.PinRequest(descriptor=descriptor_to_pb(descriptor))
        reply = await self._answer(rpc, of, request, timeout_s)
        with translated(self._channel.address, rpc, 0):
            verdicts = verdicts_from_pb(reply.chunk_statuses, (), descriptor.chunk_count)
        return [verdict.status for verdict in verdicts]

    async def delete(
        self, descriptor: Descriptor, *, timeout_s: float | None = None
    ) -> list[ChunkStatus]:
        """DELETED or MISS_ABSENT for every chunk."""
        request = pb.DeleteRequest(descriptor=descriptor_to_pb(descriptor))
        reply: pb.DeleteReply = await self._answer(
            "Delete", lambda rpcs: rpcs.delete, request, timeout_s
        )
        with translated(self._channel.address, "Delete", 0):
            verdicts = verdicts_from_pb(reply.chunk_statuses, (), descriptor.chunk_count)
        return [verdict.status for verdict in verdicts]

    def prepare_fetch(
        self,
        descriptor: Descriptor,
        into: Any,
        *,
        layers: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> FetchHandle:
        """A fetch that starts with `post`. `into`: a placement, or a buffer or region laid out
        [layer][chunk]. `layers`: which, in which order; empty for all in the descriptor's order."""
        handle = FetchHandle(
            self._channel,
            descriptor,
            as_placement(into, descriptor),
            layers=layers,
            timeout_s=self._timeout(timeout_s),
        )
        self._channel.handles.add(handle)
        return handle

    def fetch(
        self,
        descriptor: Descriptor,
        into: Any,
        *,
        layers: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> FetchHandle:
        """`prepare_fetch` and `post`."""
        handle = self.prepare_fetch(descriptor, into, layers=layers, timeout_s=timeout_s)
        handle.post()
        return handle

    def prepare_store(
        self, descriptor: Descriptor, source: Any, *, timeout_s: float | None = None
    ) -> StoreHandle:
        """A store that starts with `post`; `source` as `into` of `prepare_fetch`."""
        handle = StoreHandle(
            self._channel,
            descriptor,
            as_placement(source, descriptor),
            timeout_s=self._timeout(timeout_s),
        )
        self._channel.handles.add(handle)
        return handle

    def store(
        self, descriptor: Descriptor, source: Any, *, timeout_s: float | None = None
    ) -> StoreHandle:
        """`prepare_store` and `post`."""
        handle = self.prepare_store(descriptor, source, timeout_s=timeout_s)
        handle.post()
        return handle

    def _timeout(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    async def _answer(
        self,
        rpc: str,
        of: Callable[[Rpcs], Callable[..., Awaitable[_T]]],
        request: Message,
        timeout_s: float | None,
    ) -> _T:
        limit_s = self._timeout(timeout_s)
        with translated(self._channel.address, rpc, limit_s):
            async with asyncio.timeout(limit_s):
                # No variable: this frame is part of what a failed call raises (see `let_go`).
                return await of(await self._channel.connected(rpc))(request)
