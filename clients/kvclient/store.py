"""Store handles: layers leave the caller's region as prefill computes them."""

import asyncio
from dataclasses import dataclass

import grpc
import xxhash

from kvclient.channel import Channel
from kvclient.handle import Handle, HandleState
from kvclient.placement import Placement
from kvclient.status import is_cancelled
from kvserve.errors import HandleClosed, InvalidRequest, ServerFault
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader, encode_prefix
from kvserve.format.messages import descriptor_to_pb, parse, verdicts_from_pb
from kvserve.format.plan import FramePlan, plan_layer
from kvserve.model import ChunkStatus, Descriptor, Span, Verdict
from kvserve.v1 import kvserve_pb2 as pb

_FRAME_SIZE_BYTES = 1 << 20


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
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None

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
                await self._send(self._message(plan, size))

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
                await self._send(None)
        await self._raise_end()
        return StoreResult(list(self._verdicts))

    async def _transfer(self) -> None:
        rpcs = await self._channel.connected("Store")
        self._call = call = rpcs.store(timeout=self._time_left_s())
        try:
            opening = pb.StoreOpen(descriptor=descriptor_to_pb(self._descriptor))
            await call.write(pb.StoreRequest(open=opening).SerializeToString())
            while isinstance(message := await call.read(), bytes):  # else EOF
                self._take(parse(pb.StoreReply, message))
                self._pulse()
        finally:
            call.cancel()
            self._call = None
        if not self._verdicts:
            raise ServerFault("the server ended the store without a result")

    def _take(self, reply: pb.StoreReply) -> None:
        kind = reply.WhichOneof("message")
        count = self._descriptor.chunk_count
        if kind == "needs":
            verdicts = verdicts_from_pb(reply.needs.chunk_statuses, (), count)
            self._needs = [
                index for index, found in enumerate(verdicts) if found.status is ChunkStatus.NEEDED
            ]
            if not reply.needs.frame_size_bytes_max:
                raise ServerFault("the server takes no payload in a frame")
            self._frame_size_bytes = min(_FRAME_SIZE_BYTES, reply.needs.frame_size_bytes_max)
        elif kind == "layer_stored":
            self._stored.add(reply.layer_stored.layer_index)
        elif kind == "result":
            self._verdicts = verdicts_from_pb(
                reply.result.chunk_statuses, reply.result.details, count
            )
        else:
            raise ServerFault(f"a store reply of unknown kind {kind}")

    def _message(self, plan: FramePlan, size: int) -> bytes:
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
        # The one copy that grpcio asks for: a message is one bytes object.
        return b"".join([encode_prefix(header, plan.payload_size_bytes), *views])

    async def _send(self, message: bytes | None) -> None:
        """Sends one message, or that there are no more."""
        call = self._call  # the transfer drops it when it ends, also while this waits
        if call is not None:
            try:
                if message is None:
                    finish = pb.StoreRequest(finish=pb.StoreFinish())
                    await call.write(finish.SerializeToString())
                    await call.done_writing()
                else:
                    await call.write(message)
                return
            except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                pass  # the server has ended the call; its status, read by the transfer, says why
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
        await self._raise_end()
        if message is not None:
            raise HandleClosed("the store has ended")

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
