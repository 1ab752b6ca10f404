"""Fetch handles: layers arrive in the caller's region, one completion event each."""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import grpc

from kvclient.channel import Channel, Rpcs
from kvclient.fetch_session import FetchSession, LayerEvent
from kvclient.handle import Handle
from kvclient.placement import Placement
from kvclient.planes.base import FetchPlane, Unreachable
from kvclient.planes.grpc import GrpcFetchPlane, other_reply
from kvclient.planes.named_connection import FirstRead, NamedConnection
from kvclient.planes.nixl import NixlFetchPlane
from kvclient.planes.shm import ShmFetchPlane, planes_for
from kvclient.planes.tcp import TcpFetchPlane
from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest, KvserveError, ServerFault
from kvserve.format.messages import descriptor_to_pb, parse, verdicts_from_pb
from kvserve.model import (
    ChunkStatus,
    Descriptor,
    Verdict,
    check_layers,
    leading_hits,
    miss_counts,
)
from kvserve.v1 import kvserve_pb2 as pb

log = logging.getLogger(__name__)

# Of the time that is left: a fetch whose layers have all come does not fail over its report.
_REPORT_PART: Final = 0.5


@dataclass(frozen=True, slots=True)
class FetchResult:
    """How every chunk ended. A chunk that is no HIT has nothing valid in the region.

    `prefix_chunks`: the length of the leading run of hits, what an engine may use.
    """

    prefix_chunks: int
    verdicts: list[Verdict]
    landed_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.prefix_chunks == len(self.verdicts)

    @property
    def misses(self) -> dict[ChunkStatus, int]:
        """How many chunks are misses, by reason."""
        return miss_counts(self.verdicts)


class FetchHandle(Handle):
    """One fetch, one request. DONE: every byte of every chunk is in the region and verified.

    A miss is a value: the handle then ends as ERR without `error`, and `wait` returns a result
    whose `verdicts` tell which chunks are good.
    """

    def __init__(
        self,
        channel: Channel,
        descriptor: Descriptor,
        placement: Placement,
        *,
        layers: Sequence[int],
        timeout_s: float,
    ) -> None:
        super().__init__(placement, channel.address, timeout_s)
        if not placement.region.is_writable:
            raise InvalidRequest("the region is read-only: a fetch writes into it")
        check_layers("layers", layers, descriptor.layout)
        self._channel = channel
        self._descriptor = descriptor
        self._layers = tuple(layers) or descriptor.layer_order
        self._session = FetchSession(descriptor, self._layers, placement)
        self._events: dict[int, LayerEvent] = {}
        self._spans: Sequence[tuple[int, int]] = ()

    async def wait(self) -> FetchResult:
        """The result at the end. Cancelling the wait does not cancel the transfer.

        Raises:
            KvserveError: the transfer itself failed; nothing in the region counts but the layers
                whose events came before.
        """
        await self._raise_end()
        return self._result()

    async def layer(self, layer_index: int) -> LayerEvent:
        """Waits until one layer is complete and verified.

        Raises:
            InvalidRequest: the layer was not asked for.
            KvserveError: the transfer failed before.
        """
        if layer_index not in self._layers:
            raise InvalidRequest(f"layer {layer_index} is not among the layers of this fetch")
        while layer_index not in self._events:
            await self._next_change()
        return self._events[layer_index]

    async def layers(self) -> AsyncIterator[LayerEvent]:
        """Each layer as it completes, in delivery order; raises what ended the transfer early."""
        for layer_index in self._layers:
            yield await self.layer(layer_index)

    async def _transfer(self) -> None:
        choice = self._channel.planes
        planes, self._spans = planes_for(
            choice.for_region(self._placement.region),
            self._placement,
            self._descriptor,
            self._layers,
        )
        while True:  # each turn has one plane less
            try:
                await self._fetch(await self._channel.connected("Fetch"), planes)
                break
            except Unreachable as error:
                planes = choice.without(planes, error)
                self._session = FetchSession(self._descriptor, self._layers, self._placement)
        if not self._session.is_finished:
            raise ServerFault("the server ended the stream before the last layer")
        if self._session.doubted:
            await self._report(self._session.doubted)

    async def _report(self, doubted: Sequence[int]) -> None:
        """Tells the server which chunks did not match here; what it finds becomes their message.

        They are misses whatever it answers, and if it does not, the next fetch tells it again.
        """
        hashes = tuple(self._descriptor.chunk_hashes[index] for index in doubted)
        request = pb.VerifyRequest(
            descriptor=descriptor_to_pb(replace(self._descriptor, chunk_hashes=hashes))
        )
        found: Sequence[Verdict] = ()
        try:
            rpcs = await self._channel.connected("Verify")
            reply = await rpcs.verify(request, timeout=self._time_left_s() * _REPORT_PART)
            found = verdicts_from_pb(reply.chunk_statuses, reply.details, len(doubted))
        except (grpc.RpcError, KvserveError) as error:
            log.warning("%d chunks did not match on arrival, not reported: %s", len(doubted), error)
        verdicts = self._session.verdicts
        for index, verdict in zip(doubted, found, strict=False):
            here = verdicts[index].message
            there = "the stored chunk is right" if verdict.status is ChunkStatus.HIT else ""
            text = f"{here}; on the server: {there or verdict.message or verdict.status.name}"
            verdicts[index] = Verdict(ChunkStatus.MISS_CORRUPT, text)

    async def _fetch(self, rpcs: Rpcs, planes: Sequence[str]) -> None:
        choice, region = self._channel.planes, self._placement.region
        expected = choice.expected(planes)
        named = NamedConnection(choice.connections, expected, region, self._spans)
        request = pb.FetchRequest(
            descriptor=descriptor_to_pb(self._descriptor),
            layers=self._layers,
            planes=planes,
            kept=named.name(),
        )
        call = FirstRead(rpcs.fetch(request, timeout=self._time_left_s()))
        try:
            message = await named.first_reply(call)
            if not isinstance(message, bytes):  # EOF
                return
            reply = parse(pb.FetchReply, message)
            if (kind := reply.WhichOneof("message")) != "head":
                raise ServerFault(f"a fetch began with a reply of kind {kind}")
            name = choice.check(planes, reply.head.plane)
            self._took(other_reply(reply, self._session))
            kept = named.taken_by(reply.head)
            plane = self._plane(name, reply.head, kept)
            await plane.receive(call, self._session, self._took)
        finally:
            try:
                await call.end()
            finally:
                await named.end()

    def _plane(self, name: str, head: pb.FetchHead, kept: DataSocket | None) -> FetchPlane:
        if kept is None and not head.HasField("data"):
            return GrpcFetchPlane()
        connections = self._channel.planes.connections
        if name == "tcp":
            return TcpFetchPlane(connections, head.data, kept)
        region = self._placement.region
        if name == "nixl":
            return NixlFetchPlane(connections, head.data, region, self._spans)
        return ShmFetchPlane(connections, head.data, region, self._spans, kept=kept)

    def _took(self, events: list[LayerEvent]) -> None:
        if events:
            self._events.update({event.layer_index: event for event in events})
            self._pulse()

    def _result(self) -> FetchResult:
        verdicts = self._session.verdicts
        return FetchResult(leading_hits(verdicts), list(verdicts), self._session.landed_bytes)

    def _is_finished(self) -> bool:
        return self._session.is_finished

    def _is_whole(self) -> bool:
        return self._session.is_finished and self._result().is_whole
