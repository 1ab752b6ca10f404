"""The shm plane, client side: the server on this host writes into the region itself.

Only heads of records travel; the client checks each frame in the region as on any plane. The memory
goes to the server once for a connection, and the connection is kept: mapping it anew for each layer
would cost more than the copy.

T6 here: only the server can say that it writes no more. So whatever ends a fetch early, the plane
tells the server (it cancels the call) and waits until the server has closed the connection, which
it does once nothing of it touches the memory. A server that was killed closes it too. One that
hangs holds the cancel, since it may still write when it wakes up.
"""

import asyncio
from collections.abc import Sequence
from weakref import ref

from kvclient.fetch_session import FetchSession
from kvclient.placement import Placement
from kvclient.planes.base import FetchCall, Took
from kvclient.planes.tcp import DataConnections, finish_fetch
from kvclient.region import Region, address_of
from kvclient.shared_region import SharedRegion
from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest, ServerUnavailable
from kvserve.format.records import SPANS_MAX, RegionHead, encode_region
from kvserve.model import Descriptor, Span
from kvserve.v1 import kvserve_pb2 as pb

_DRAIN_BYTES = 64 << 10


class ShmFetchPlane:
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
        region = self._region
        assert isinstance(region, SharedRegion), "the handle asks for shm only then"
        connection = await self._connections.open(self._offer)
        is_clean = False
        try:
            is_new = not isinstance(connection.memory, ref) or connection.memory() is not region
            head = RegionHead(is_new, len(self._spans), region.size_bytes)
            await connection.send((encode_region(head, self._spans),))
            if is_new:
                await connection.send_fd(region.fd)
                connection.memory = ref(region)
            await finish_fetch(connection, call, session, took)
            is_clean = True
        finally:
            if is_clean:
                self._connections.keep(connection)
            else:
                call.cancel()
                await _until_quiet(connection)


async def _until_quiet(connection: DataSocket) -> None:
    """Waits for the server's close, however often the task is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    rest = memoryview(bytearray(_DRAIN_BYTES))
    connection.finish_sending()
    while True:
        try:
            await connection.receive([rest])
        except ServerUnavailable:
            break
        except asyncio.CancelledError as error:
            cancelled = error
    connection.close()
    if cancelled is not None:
        raise cancelled


def spans_of(
    placement: Placement, descriptor: Descriptor, layers: Sequence[int]
) -> list[tuple[int, int]]:
    """Offset and size of the memory of all the layers' payload, in order.

    Raises:
        InvalidRequest: the placement is not in its region, or in more pieces than a fetch may name.
    """
    base = address_of(placement.region.view)
    size_bytes = placement.region.size_bytes
    spans: list[tuple[int, int]] = []
    for layer_index in layers:
        whole = Span(0, descriptor.layout.slice_sizes[layer_index])
        for view in placement.views(layer_index, 0, descriptor.chunk_count, whole):
            offset = address_of(view) - base
            if not 0 <= offset <= size_bytes - len(view):
                raise InvalidRequest(f"layer {layer_index} has no place in its region")
            if spans and sum(spans[-1]) == offset:
                spans[-1] = (spans[-1][0], spans[-1][1] + len(view))
            else:
                spans.append((offset, len(view)))
    if len(spans) > SPANS_MAX:
        raise InvalidRequest(
            f"the layers are in {len(spans)} pieces; shm and nixl take {SPANS_MAX} in a fetch"
        )
    return spans
