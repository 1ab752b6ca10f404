"""Where in a client's memory the payload of a transfer over nixl is."""

from dataclasses import dataclass

from kvserve.data_socket import DataSocket
from kvserve.format.records import SPAN_SIZE_BYTES, decode_spans
from kvserve.format.remote_region import REMOTE_REGION_SIZE_BYTES, decode_remote_region
from kvserve.nixl_agent import Piece
from kvserve.transfer.planes.nixl_port import NixlPort, Remote
from kvserve.transfer.planes.shared_memory import PayloadSpans, checked_spans


@dataclass(frozen=True, slots=True)
class Target:
    """Spans of a region of `remote`."""

    remote: Remote
    address: int
    spans: PayloadSpans

    def pieces(self, at: int, size_bytes: int) -> list[Piece]:
        """The memory of a part of the payload, from its byte `at` on."""
        found = self.spans.pieces(at, size_bytes)
        return [(self.address + offset, size) for offset, size in found]


async def receive_target(connection: DataSocket, size_bytes: int, nixl: NixlPort) -> Target:
    """What the client says right after its hello: region, metadata, and the spans of `size_bytes`.

    Raises:
        InvalidRequest: that is no region that can be reached, or the spans do not fit.
    """
    raw = memoryview(bytearray(REMOTE_REGION_SIZE_BYTES))
    await connection.receive([raw])
    region = decode_remote_region(raw)
    metadata = bytearray(region.metadata_size_bytes)
    raw_spans = memoryview(bytearray(SPAN_SIZE_BYTES * region.span_count))
    await connection.receive([memoryview(metadata), raw_spans])
    offsets, sizes = decode_spans(raw_spans)
    spans = checked_spans(offsets, sizes, region.size_bytes, size_bytes)
    return Target(await nixl.remote(bytes(metadata)), region.address, spans)
