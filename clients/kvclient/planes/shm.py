"""The shm plane, client side: the server on this host reads and writes the region itself.

Only heads of records travel; who receives payload checks each frame as on any plane. The memory
goes to the server once for a connection, and the connection is kept: mapping it anew for each layer
would cost more than the copy.

T6 here, a fetch: only the server can say that it writes no more. So whatever ends a fetch early,
the plane tells the server (it cancels the call) and waits until the server has closed the
connection, which it does once nothing of it touches the memory. A server that was killed closes it
too. One that hangs holds the cancel, since it may still write when it wakes up.

A store that ends early just closes the connection. The server may read one frame more; that changes
no byte of the region, and what it reads is published by nobody, since the end of the store never
came.
"""

from collections.abc import Sequence
from weakref import ref

from kvclient.placement import Placement
from kvclient.planes.base import FetchCall
from kvclient.planes.outlast import outlast
from kvclient.planes.region_store import UNTAKEN_MAX, RegionStorePlane
from kvclient.planes.tcp import (
    DataConnections,
    TcpFetchPlane,
    raise_status,
    receive_kind,
    shares,
)
from kvclient.region import Region, address_of
from kvclient.shared_region import SharedRegion
from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest, ServerFault, ServerUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.format.records import (
    HEAD_SIZE_BYTES,
    SPANS_MAX,
    RecordKind,
    RegionHead,
    encode_region,
)
from kvserve.model import Descriptor, Span
from kvserve.v1 import kvserve_pb2 as pb

_DRAIN_BYTES = 64 << 10
_NEED_SPANS = frozenset({"shm", "nixl"})


class ShmFetchPlane(TcpFetchPlane):
    """Implements `FetchPlane`. `kept`: as for tcp; the request has told where the payload is."""

    def __init__(
        self,
        connections: DataConnections,
        offer: pb.DataOffer,
        region: Region,
        spans: Sequence[tuple[int, int]],
        *,
        kept: DataSocket | None,
    ) -> None:
        super().__init__(connections, offer, kept)
        self._region = region
        self._spans = spans

    async def _begin(self, connection: DataSocket) -> None:
        await _share(connection, self._region, self._spans)

    async def _end_early(self, connection: DataSocket, call: FetchCall) -> None:
        call.cancel()
        await until_quiet(connection)


class ShmStorePlane(RegionStorePlane):
    """Implements `StorePlane`."""

    async def open(self) -> None:
        await super().open()
        self._answer = memoryview(bytearray(HEAD_SIZE_BYTES))
        try:
            with self._open_connection() as connection:
                await _share(connection, self._region, self._spans)
        except ServerUnavailable:
            await raise_status(self._call)  # it refused the memory
            raise

    async def send(self, header: FrameHeader, views: Sequence[memoryview]) -> None:
        await self._offer_frame(header, views)
        if self._untaken >= UNTAKEN_MAX:
            await self._take_answer()

    async def settle(self) -> None:
        while self._untaken:
            await self._take_answer()

    async def _take_answer(self) -> None:
        with self._open_connection() as connection:
            kind = await receive_kind(connection, self._answer)
            if kind is not RecordKind.TAKEN:
                raise ServerFault(f"a record of kind {kind.name} in a store")
        self._untaken -= 1


async def _share(connection: DataSocket, region: Region, spans: Sequence[tuple[int, int]]) -> None:
    """Says where the payload is; passes the memory unless this connection's server has it."""
    assert isinstance(region, SharedRegion), "the handle asks for shm only then"
    is_new = not shares(connection, region)
    head = RegionHead(is_new, len(spans), region.size_bytes)
    await connection.send((encode_region(head, spans),))
    if is_new:
        await connection.send_fd(region.fd)
        connection.memory = ref(region)


async def until_quiet(connection: DataSocket) -> None:
    """Waits for the server's close."""
    rest = memoryview(bytearray(_DRAIN_BYTES))

    async def is_closed() -> bool:
        try:
            await connection.receive([rest])
        except ServerUnavailable:
            return True
        return False

    connection.finish_sending()
    try:
        await outlast(is_closed)
    finally:
        connection.close()


def planes_for(
    planes: Sequence[str], placement: Placement, descriptor: Descriptor, layers: Sequence[int]
) -> tuple[Sequence[str], Sequence[tuple[int, int]]]:
    """Those of `planes` to ask for, and the spans of the payload if one of them needs them.

    Raises:
        InvalidRequest: one is pinned that the placement is not fit for.
    """
    if _NEED_SPANS.isdisjoint(planes):
        return planes, ()
    try:
        return planes, spans_of(placement, descriptor, layers)
    except InvalidRequest:
        others = [it for it in planes if it not in _NEED_SPANS]
        if not others:
            raise
        return others, ()


def spans_of(
    placement: Placement, descriptor: Descriptor, layers: Sequence[int]
) -> list[tuple[int, int]]:
    """Offset and size of the memory of all the layers' payload, in order.

    Raises:
        InvalidRequest: the placement is not in its region, or in more pieces than may be named.
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
            f"the layers are in {len(spans)} pieces; shm and nixl take {SPANS_MAX}"
        )
    return spans
