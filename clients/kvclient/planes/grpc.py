"""The grpc plane, client side: frames are messages of the rpc's own stream."""

from collections.abc import Sequence

from kvclient.call_write import write
from kvclient.fetch_session import FetchSession, LayerEvent
from kvclient.planes.base import FetchCall, StoreCall, Took
from kvserve.errors import ServerFault
from kvserve.format.frames import FrameHeader, decode_frame, encode_prefix
from kvserve.format.messages import chunk_status, parse, verdicts_from_pb
from kvserve.model import Verdict
from kvserve.v1 import kvserve_pb2 as pb


class GrpcFetchPlane:
    """Implements `FetchPlane`. The bytes are copied from the message into the region, once."""

    async def receive(self, call: FetchCall, session: FetchSession, took: Took) -> None:
        # Not `async for`: `read` saves a generator step for every frame.
        while isinstance(message := await call.read(), bytes):  # else EOF
            frame = decode_frame(message)
            if frame is not None:
                events = session.frame(*frame)
            else:
                events = other_reply(parse(pb.FetchReply, message), session)
            if events:
                took(events)


def other_reply(reply: pb.FetchReply, session: FetchSession) -> list[LayerEvent]:
    """What is no frame; the layers that it completes."""
    kind = reply.WhichOneof("message")
    if kind == "head":
        head = reply.head
        return session.head(
            verdicts_from_pb(head.chunk_statuses, head.details, session.chunk_count)
        )
    if kind == "miss":
        miss = reply.miss
        return session.miss(miss.chunk_index, Verdict(chunk_status(miss.status), miss.message))
    raise ServerFault(f"a fetch reply of unknown kind {kind}")


class GrpcStorePlane:
    """Implements `StorePlane`."""

    def __init__(self, call: StoreCall) -> None:
        self._call = call

    async def open(self) -> None:
        """The call is open."""

    async def send(self, header: FrameHeader, views: Sequence[memoryview]) -> None:
        # The one copy that grpcio asks for: a message is one bytes object.
        size = sum(map(len, views))
        await write(self._call, b"".join([encode_prefix(header, size), *views]))

    async def settle(self) -> None:
        """gRPC has its copies."""

    async def finish(self) -> None:
        finish = pb.StoreRequest(finish=pb.StoreFinish())
        await write(self._call, finish.SerializeToString())
        await self._call.done_writing()

    async def close(self, *, is_clean: bool) -> None:
        """The handle ends the call."""
