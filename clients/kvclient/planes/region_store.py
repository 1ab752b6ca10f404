"""Stores whose server takes the payload out of the region itself; only heads of records travel.

A frame is offered, and the server says of each when it has it (TAKEN): from then on its bytes are
the caller's again.
"""

from collections.abc import Sequence
from typing import Final

from kvclient.planes.base import StoreCall
from kvclient.planes.tcp import DataConnections, TcpStorePlane
from kvclient.region import Region
from kvserve.format.frames import FrameHeader
from kvserve.format.records import RecordKind, encode_frame
from kvserve.v1 import kvserve_pb2 as pb

UNTAKEN_MAX: Final = 32
"""More than a server takes before it waits for its storage; few enough that neither side's answers
fill a socket that the other does not read."""


class RegionStorePlane(TcpStorePlane):
    """What shm and nixl share; they differ in how they wait for the server's answers."""

    def __init__(
        self,
        call: StoreCall,
        connections: DataConnections,
        offer: pb.DataOffer,
        region: Region,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(call, connections, offer)
        self._region = region
        self._spans = spans
        # Offered, and not taken yet.
        self._untaken = 0

    async def _offer_frame(self, header: FrameHeader, views: Sequence[memoryview]) -> None:
        self._untaken += 1
        head = encode_frame(header, sum(map(len, views)), RecordKind.OFFERED)
        await self._send((head,))
