"""Between client and server: connections that break without a word, as networks and kills do it."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self


class DroppingProxy:
    """Passes connections on to the server, and tears them all down, unannounced, on `drop`."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.dropped = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def drop(self) -> None:
        self.dropped += len(self._open) // 2
        for writer in list(self._open):
            writer.transport.abort()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        self.drop()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, to_writer}
        self._open |= pair
        try:
            await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))
        finally:
            self._open -= pair
            for end in pair:
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    # One direction has ended: the connection has, both ways.
    writer.transport.abort()
