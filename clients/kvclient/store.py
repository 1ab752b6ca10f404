"""Store handles: layers leave the caller's region as prefill computes them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import xxhash

from kvclient.call_write import write
from kvclient.channel import Channel, Rpcs
from kvclient.handle import Handle, HandleState
from kvclient.placement import Placement
from kvclient.planes.base import StoreCall, StorePlane, Unreachable
from kvclient.planes.grpc import GrpcStorePlane
from kvclient.planes.nixl_store import NixlStorePlane
from kvclient.planes.shm import ShmStorePlane, planes_for
from kvclient.planes.tcp import TcpStorePlane
from kvclient.status import is_cancelled, let_go
from kvserve.errors import HandleClosed, InvalidRequest, ServerFault, ServerUnavailable
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.format.messages import descriptor_to_pb, parse, verdicts_from_pb
from kvserve.format.plan import FramePlan, plan_layer
from kvserve.model import ChunkStatus, Descriptor, Span, Verdict
from kvserve.v1 import kvserve_pb2 as pb

_FRAME_SIZE_BYTES = 1 << 20
# What a plane raises when the other side has ended the store.
_ENDED = (
    ServerUnavailable,
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """How every chunk ended: STORED or KNOWN are readable by any worker; the others are not."""

    verdicts: list[Verdict]

    @property
    def is_whole(self) -> bool:
        return all(verdict.status.is_stored for verdict in self.verdicts)


class StoreHandle(Handle):
    """One store, one request. Give it each layer once, in any order, then `finish`.

    DONE: every chunk is stored (by this or an earlier store) and readable by any worker.
    """

    def __init__(
        self, channel: Channel, descriptor: Descriptor, placement: Placement, *, timeout_s: float
    ) -> None:
        super().__init__(placement, channel.address, timeout_s)
        self._channel = channel
        self._descriptor = descriptor
        self._sent: set[int] = set()
        self._stored: set[int] = set()
        self._turn = asyncio.Lock()
        self._needs: list[int] | None = None
        self._frame_size_bytes = _FRAME_SIZE_BYTES
        self._verdicts: list[Verdict] = []
        self._plane: StorePlane | None = None
        self._spans: Sequence[tuple[int, int]] = ()

    async def needed(self) -> list[int]:
        """The chunk indexes that the server does not have; only their slices are ever read."""
        while self._needs is None:
            await self._next_change()
        return self._needs

    async def store_layer(self, layer_index: int) -> None:
        """Sends one layer from the region; on return its bytes are the caller's again.

        Raises:
            InvalidRequest: the layer is out of range or was sent before.
            KvserveError: the transfer has failed.
        """
        self._check_layer(layer_index)
        self._sent.add(layer_index)
        async with self._turn:
            needed = await self.needed()
            size = self._descriptor.layout.slice_sizes[layer_index]
            for plan in plan_layer(
                layer_index, size, needed, frame_size_bytes=self._frame_size_bytes
            ):
                await self._send_frame(plan, size)
            if not await self._done_by(lambda plane: plane.settle()):
                raise HandleClosed("the store has ended")

    async def layer(self, layer_index: int) -> None:
        """Waits until the server has written a layer that was sent (it is not published yet)."""
        if layer_index not in self._sent:
            raise InvalidRequest(f"layer {layer_index} was not sent")
        while layer_index not in self._stored and await self.needed():
            await self._next_change()

    async def finish(self) -> StoreResult:
        """Ends the store after the last layer; the result has a verdict for every chunk.

        Chunks are published only if every layer was sent; otherwise they end as INCOMPLETE.

        Raises:
            KvserveError: the transfer failed; chunks may or may not be stored, store them again.
        """
        async with self._turn:
            if self.state is HandleState.PROC:
                await self.needed()
                await self._done_by(lambda plane: plane.finish())
        await self._raise_end()
        return StoreResult(list(self._verdicts))

    async def _transfer(self) -> None:
        choice = self._channel.planes
        planes, self._spans = planes_for(
            choice.for_store(self._placement.region),
            self._placement,
            self._descriptor,
            self._descriptor.layer_order,
        )
        while True:  # each turn has one plane less
            try:
                await self._store(await self._channel.connected("Store"), planes)
                break
            except Unreachable as error:
                planes = choice.without(planes, error)
        if not self._verdicts:
            raise ServerFault("the server ended the store without a result")

    async def _store(self, rpcs: Rpcs, planes: Sequence[str]) -> None:
        call = rpcs.store(timeout=self._time_left_s())
        try:
            opening = pb.StoreOpen(descriptor=descriptor_to_pb(self._descriptor), planes=planes)
            await write(call, pb.StoreRequest(open=opening).SerializeToString())
            while isinstance(message := await call.read(), bytes):  # else EOF
                reply = parse(pb.StoreReply, message)
                if reply.WhichOneof("message") == "needs":
                    self._channel.planes.check(planes, reply.needs.plane)
                    await self._take_needs(reply.needs, call)
                else:
                    self._take(reply)
                self._pulse()
        finally:
            call.cancel()
            plane, self._plane = self._plane, None
            if plane is not None:
                await plane.close(is_clean=bool(self._verdicts))

    def _take(self, reply: pb.StoreReply) -> None:
        kind = reply.WhichOneof("message")
        count = self._descriptor.chunk_count
        if kind == "layer_stored":
            self._stored.add(reply.layer_stored.layer_index)
        elif kind == "result":
            self._verdicts = verdicts_from_pb(
                reply.result.chunk_statuses, reply.result.details, count
            )
        else:
            raise ServerFault(f"a store reply of unknown kind {kind}")

    async def _take_needs(self, needs: pb.StoreNeeds, call: StoreCall) -> None:
        verdicts = verdicts_from_pb(needs.chunk_statuses, (), self._descriptor.chunk_count)
        if not needs.frame_size_bytes_max:
            raise ServerFault("the server takes no payload in a frame")
        if self._plane is not None:
            raise ServerFault("the server said twice what it needs")
        self._plane = plane = self._made_plane(needs, call)
        await plane.open()
        self._frame_size_bytes = min(_FRAME_SIZE_BYTES, needs.frame_size_bytes_max)
        self._needs = [
            index for index, found in enumerate(verdicts) if found.status is ChunkStatus.NEEDED
        ]

    def _made_plane(self, needs: pb.StoreNeeds, call: StoreCall) -> StorePlane:
        if not needs.HasField("data"):
            return GrpcStorePlane(call)
        connections = self._channel.planes.connections
        if needs.plane == "tcp":
            return TcpStorePlane(call, connections, needs.data)
        region = self._placement.region
        if needs.plane == "nixl":
            return NixlStorePlane(call, connections, needs.data, region, self._spans)
        return ShmStorePlane(call, connections, needs.data, region, self._spans)

    async def _send_frame(self, plan: FramePlan, size: int) -> None:
        checksums = b""
        if plan.ends_slice:
            whole = Span(0, size)
            checksums = b"".join(
                _checksum(self._placement.views(plan.layer_index, index, 1, whole))
                for index in range(plan.first_chunk, plan.first_chunk + plan.chunk_count)
            )
        header = FrameHeader(plan.layer_index, plan.first_chunk, plan.span.start, checksums)
        views = self._placement.views(
            plan.layer_index, plan.first_chunk, plan.chunk_count, plan.span
        )
        if not await self._done_by(lambda plane: plane.send(header, views)):
            raise HandleClosed("the store has ended")

    async def _done_by(self, step: Callable[[StorePlane], Awaitable[None]]) -> bool:
        """Whether the plane did it; if the store has ended without an error, False."""
        # The transfer drops the plane when it ends, also while this waits. No variable: the plane
        # has the call, and this frame is part of what is raised here (see `let_go`).
        if self._plane is not None:
            try:
                await step(self._plane)
                return True
            except _ENDED:
                pass  # the server has ended the call; its status, read by the transfer, says why
            except asyncio.CancelledError as error:
                if is_cancelled():
                    let_go(error)
                    raise
        await self._raise_end()
        return False

    def _check_layer(self, layer_index: int) -> None:
        count = self._descriptor.layout.layer_count
        if not 0 <= layer_index < count:
            raise InvalidRequest(
                f"layer {layer_index} is out of range; this layout has layers 0 to {count - 1}"
            )
        if layer_index in self._sent:
            raise InvalidRequest(f"layer {layer_index} was sent twice")

    def _is_finished(self) -> bool:
        return bool(self._verdicts)

    def _is_whole(self) -> bool:
        return bool(self._verdicts) and StoreResult(self._verdicts).is_whole


def _checksum(views: list[memoryview]) -> bytes:
    if len(views) == 1:
        return checksum(views[0]).to_bytes(8, "little")
    running = xxhash.xxh3_64()
    for view in views:
        running.update(view)
    return running.intdigest().to_bytes(8, "little")
