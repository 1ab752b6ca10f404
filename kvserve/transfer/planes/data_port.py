"""Where data connections come in, and how each finds its transfer.

Theory of operation. A transfer that is to move payload over a connection of its own expects one: it
gets a secret, tells it to its client over gRPC, and waits. Whoever connects has to show such a
secret at once; it is good for one hello and for some seconds. After a transfer that ended well the
connection is kept: it waits here for the next secret, or for a request that names it by its last
one, so that a client that fetches layer by layer connects once. After any other end it is closed:
its stream may be cut in the middle of a frame.

With TLS the handshake comes first, on TCP; within a host (the shm plane) nothing is encrypted.

Bounds: connections (waiting and in use together), the time to show a secret (the handshake's is
part of it), and idle time. A secret is never logged. They are looked up by their digest, so that
the time which that takes tells nothing about them, and compared in constant time.
"""

import asyncio
import hmac
import logging
import mmap
import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

from kvserve.data_socket import DataSocket
from kvserve.errors import DeadlineExceeded, InvalidRequest, ServerUnavailable
from kvserve.format.records import HELLO_MAGIC, HELLO_SIZE_BYTES, SECRET_SIZE_BYTES
from kvserve.tls_socket import TlsDataSocket
from kvserve.transfer.staging import Staging

log = logging.getLogger(__name__)

SECRET_TTL_S = 5.0
_FIRST_HELLO_S = 5.0
# Longer than any client keeps a connection that it does not use (`kvclient/planes/tcp.py`).
_IDLE_S = 120.0
_ACCEPT_PAUSE_S = 0.5
_BACKLOG = 256
_WITHDRAWN_MAX = 1024
_WILDCARDS = ("", "0.0.0.0", "::", "*")


def forget_memory(connection: DataSocket) -> None:
    """Unmaps what was shared over it, on a thread: that takes as long as its pages are many."""
    memory, connection.memory = connection.memory, None
    if isinstance(memory, mmap.mmap):
        asyncio.get_running_loop().run_in_executor(None, memory.close)


class Expected:
    """One connection that a transfer waits for."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.arrived: asyncio.Future[DataSocket] = asyncio.get_running_loop().create_future()

    async def connection(self) -> DataSocket:
        """Raises `DeadlineExceeded` if none shows the secret in time."""
        try:
            async with asyncio.timeout(SECRET_TTL_S):
                return await self.arrived
        except TimeoutError:
            raise DeadlineExceeded(
                f"no data connection came within {SECRET_TTL_S:g} s; the grpc plane needs none"
            ) from None


class DataPort:
    """One per server. `address` and `unix_address` are what clients are told, empty if nothing
    listens there; `refused` counts wrong hellos. `tls`: how TCP is secured, None for plain."""

    def __init__(
        self, buffers: Staging, *, connections_max: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self.buffers = buffers
        self.address = ""
        self.unix_address = ""
        self.refused = 0
        self._connections_max = connections_max
        self._tls = tls
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._expected: dict[bytes, Expected] = {}
        # Digests of secrets whose transfer ended before they were shown, oldest first.
        self._withdrawn: dict[bytes, None] = {}
        self._connections: set[DataSocket] = set()
        # Those whose secret is awaited, longest first.
        self._greetings: dict[DataSocket, asyncio.Task[None]] = {}
        # Of those, the ones that have had a transfer, by the digest of the secret that began it.
        self._kept: dict[bytes, DataSocket] = {}

    def __repr__(self) -> str:
        return (
            f"<DataPort {self.address} {len(self._connections)} connections, "
            f"{len(self._expected)} expected, {self.refused} refused>"
        )

    async def start(self, host: str, port: int, *, tell_host: bool) -> None:
        """Listens. Clients are told the host only if `tell_host` and it is one: else they take the
        one that they reached this server by.

        Raises:
            InvalidRequest: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, address = found[0]
            listener = socket.create_server(
                address[:2], family=socket.AddressFamily(family), backlog=_BACKLOG
            )
        except OSError as error:
            raise InvalidRequest(f"cannot listen on {host}:{port} for data: {error}") from error
        bound = listener.getsockname()[1]
        told = f"[{host}]" if ":" in host else host
        self.address = f"{told if tell_host and host not in _WILDCARDS else ''}:{bound}"
        self._listen(listener)

    def start_unix(self) -> None:
        """Listens for clients on this host (to be exact: in this network namespace), on an abstract
        Unix socket: it has no file, and its name is free once the server has ended."""
        name = f"kvserve-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
        self.unix_address = f"unix:@{name}"
        self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        accepting = asyncio.get_running_loop().create_task(self._accept(listener))
        self._accepting.append(accepting)

    async def stop(self) -> None:
        """Closes every connection, those in use too."""
        tasks = [*self._greetings.values(), *self._accepting]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            self.close(connection)

    @contextmanager
    def expect(self) -> Iterator[Expected]:
        """Until the end of the block its secret is good, once."""
        secret = secrets.token_bytes(SECRET_SIZE_BYTES)
        expected, digest = Expected(secret), sha256(secret).digest()
        self._expected[digest] = expected
        try:
            yield expected
        except BaseException:
            if expected.arrived.done() and not expected.arrived.cancelled():
                self.close(expected.arrived.result())  # it came just as the transfer ended
            raise
        finally:
            if self._expected.pop(digest, None) is not None:
                self._withdrawn[digest] = None
                if len(self._withdrawn) > _WITHDRAWN_MAX:
                    del self._withdrawn[next(iter(self._withdrawn))]

    def take_back(self, connection: DataSocket) -> None:
        """Its transfer ended well, at the end of a record: it may bring another secret, or be named
        by a request."""
        self._kept[sha256(connection.secret).digest()] = connection
        self._greet(connection, _IDLE_S)

    async def kept(self, secret: bytes, *, is_local: bool) -> DataSocket | None:
        """The connection that began with `secret` and is idle since; the caller's from here on."""
        digest = sha256(secret).digest()
        connection = self._kept.get(digest)
        if connection is None or connection.is_local != is_local:
            return None
        del self._kept[digest]
        greeting = self._greetings.pop(connection)
        greeting.cancel()
        try:
            await asyncio.wait([greeting])
        except BaseException:
            self.close(connection)  # the request was cancelled: its client waits for that
            raise
        if connection not in self._connections:  # it ended just then
            return None
        return connection

    def close(self, connection: DataSocket) -> None:
        self._forget(connection)
        self._connections.discard(connection)
        self._greetings.pop(connection, None)
        connection.close()
        forget_memory(connection)

    def _forget(self, connection: DataSocket) -> None:
        """No request may name it any more."""
        digest = sha256(connection.secret).digest()
        if self._kept.get(digest) is connection:
            del self._kept[digest]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, most likely: those who end give some back.
                log.warning("cannot accept a data connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                connection = self._connection(sock, peer)
            except ServerUnavailable as error:
                log.debug("%s", error)
                continue
            if len(self._connections) >= self._connections_max:
                if not self._greetings:
                    self._refuse(connection, f"{len(self._connections)} connections are in use")
                    continue
                idle, greeting = next(iter(self._greetings.items()))
                greeting.cancel()
                self.close(idle)
            self._connections.add(connection)
            self._greet(connection, _FIRST_HELLO_S)

    def _connection(self, sock: socket.socket, peer: tuple[str, int]) -> DataSocket:
        if sock.family == socket.AF_UNIX:
            return DataSocket(sock, "this host")
        name = f"{peer[0]}:{peer[1]}"
        if self._tls is None:
            return DataSocket(sock, name)
        return TlsDataSocket(sock, name, self._tls, server_name=None)

    def _greet(self, connection: DataSocket, timeout_s: float) -> None:
        greeting = asyncio.get_running_loop().create_task(self._read_hello(connection, timeout_s))
        self._greetings[connection] = greeting

    async def _read_hello(self, connection: DataSocket, timeout_s: float) -> None:
        hello = bytearray(HELLO_SIZE_BYTES)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.handshake()
                await connection.receive([memoryview(hello)])
        except InvalidRequest as error:
            self._refuse(connection, str(error))
            return
        except (TimeoutError, ServerUnavailable) as error:
            if isinstance(error, TimeoutError) and connection.needs_handshake:
                self._refuse(connection, f"no TLS handshake within {timeout_s:g} s")
                return
            log.debug("%r brought no secret: %r", connection, error)
            self.close(connection)
            return
        if not hello.startswith(HELLO_MAGIC):
            self._refuse(connection, "it does not speak this protocol")
            return
        secret = bytes(hello[len(HELLO_MAGIC) :])
        digest = sha256(secret).digest()
        expected = self._expected.pop(digest, None)
        if digest in self._withdrawn:  # a cancel overtook it: the client has done nothing wrong
            del self._withdrawn[digest]
            log.debug("%r came for a transfer that has ended", connection)
            self.close(connection)
        elif expected is None or not hmac.compare_digest(expected.secret, secret):
            self._refuse(connection, "its secret is unknown, used or too old")
        elif expected.arrived.done():  # the transfer has just ended
            self.close(connection)
        else:
            del self._greetings[connection]
            self._forget(connection)
            connection.secret = secret
            expected.arrived.set_result(connection)

    def _refuse(self, connection: DataSocket, why: str) -> None:
        self.refused += 1
        log.warning("refused a data connection from %s: %s", connection.peer, why)
        self.close(connection)
