"""Server frames of the grpc plane: filled in place, and messages that protobuf reads."""

import gc

import pytest

from kvserve.format.frames import FrameHeader
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.planes.grpc import GrpcFetchPlane
from kvserve.v1 import kvserve_pb2 as pb


class Written:
    """The messages that gRPC got."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.plane = GrpcFetchPlane(self.write)

    async def write(self, message: bytes) -> None:
        assert type(message) is bytes, "grpcio takes nothing else"
        self.messages.append(message)

    def reply(self) -> pb.FetchReply:
        (message,) = self.messages
        return pb.FetchReply.FromString(message)


@pytest.mark.parametrize("size", [1, 127, 128, 1 << 20])
async def test_a_frame_filled_in_place_is_the_message(size: int) -> None:
    written = Written()
    frame = written.plane.new_frame(FrameHeader(3, 7, 0, b"CHECKSUM"), size, may_be_in_place=True)
    assert len(frame.payload) == size
    frame.payload[:] = bytes(at % 251 for at in range(size))
    await written.plane.send(frame)
    payload = written.reply().payload
    assert (payload.layer_index, payload.first_chunk, payload.slice_offset) == (3, 7, 0)
    assert payload.checksums == b"CHECKSUM"
    assert payload.payload == bytes(at % 251 for at in range(size))


async def test_many_frames_do_not_share_memory() -> None:
    """Bytes objects may be interned or cached by the interpreter; these never."""
    written = Written()
    for size in (1, 1, 2, 2):
        frame = written.plane.new_frame(FrameHeader(1, 0, 0, b""), size, may_be_in_place=True)
        frame.payload[:] = bytes([len(written.messages)]) * size
        await written.plane.send(frame)
        del frame
        gc.collect()
    found = [pb.FetchReply.FromString(message).payload.payload for message in written.messages]
    assert found == [b"\0", b"\1", b"\2\2", b"\3\3"]


async def test_head_has_a_status_for_each_chunk() -> None:
    written = Written()
    verdicts = [Verdict(ChunkStatus.HIT), Verdict(ChunkStatus.MISS_CORRUPT, "rot")]
    await written.plane.head(verdicts)
    head = written.reply().head
    assert head.chunk_statuses == bytes([ChunkStatus.HIT, ChunkStatus.MISS_CORRUPT])
    assert [(detail.chunk_index, detail.message) for detail in head.details] == [(1, "rot")]


@pytest.mark.parametrize(
    "status", [status for status in ChunkStatus if status.name.startswith("MISS_")]
)
async def test_miss_names_chunk_status_and_reason(status: ChunkStatus) -> None:
    written = Written()
    await written.plane.miss(9, Verdict(status, "why"))
    miss = written.reply().miss
    assert (miss.chunk_index, miss.status, miss.message) == (9, int(status), "why")
