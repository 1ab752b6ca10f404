"""A store's data connection when its sender gives up in the middle of a record."""

import asyncio
import socket
from typing import Any

import pytest

from kvclient.planes.tcp import DataConnections, TcpStorePlane
from kvserve.data_socket import DataSocket
from kvserve.errors import ServerUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.v1 import kvserve_pb2 as pb


class OneConnection(DataConnections):
    """Whose connection is there already."""

    def __init__(self, connection: DataSocket) -> None:
        super().__init__("")
        self._connection = connection

    async def open(self, offer: pb.DataOffer) -> DataSocket:
        return self._connection


async def test_a_send_that_is_cancelled_ends_the_connection() -> None:
    """Half a record is on its way: another one behind it would be read as payload."""
    one, other = socket.socketpair()
    connection, server = DataSocket(one, "server"), DataSocket(other, "client")
    call: Any = None
    plane = TcpStorePlane(call, OneConnection(connection), pb.DataOffer())
    await plane.open()
    payload = memoryview(bytearray(64 << 20))
    sending = asyncio.create_task(plane.send(FrameHeader(0, 0, 0, b""), [payload]))
    await asyncio.sleep(0.01)
    assert not sending.done(), "nobody reads"
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(ServerUnavailable):
        await plane.send(FrameHeader(1, 0, 0, b""), [payload[:10]])
    with pytest.raises(ServerUnavailable, match="closed by the other side"):
        await server.receive([payload])
    await plane.close(is_clean=False)
    server.close()
