"""A stream socket on the event loop that moves payload without copying it. Both ends use it.

asyncio's own streams copy every byte and hand out whatever has come. Here the kernel reads from and
writes into the memory that the caller names, in as few calls as it takes: `send` gives a whole
frame at once, and `receive` is woken only when a good part of what it waits for has come
(SO_RCVLOWAT), not for every segment.

Nothing touches a buffer once its `send` or `receive` has ended, also by cancellation, or once
`close` has returned: no thread is involved.
"""

import asyncio
import errno
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvserve.errors import ServerUnavailable

_IOV_MAX: Final = 1024
"""Buffers that one system call takes (linux/uio.h)."""
_LOW_WATER_BYTES_MAX: Final = 512 << 10

Buffer = bytes | memoryview


class DataSocket:
    """Owns `sock`. One `send` and one `receive` at a time; each has a side of its own."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.needs_handshake = False
        self.memory: object = None
        """shm: what both ends registered over this connection last."""
        self.secret = b""
        """That of its last hello: what a kept connection is named by."""
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._low_water = 1
        self._is_watched = False
        self._wanted: list[memoryview] = []
        self._received: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<DataSocket {self.peer}{' closed' if self._fd < 0 else ''}>"

    async def handshake(self) -> None:
        """What must come before anything else; only TLS has it (`tls_socket.py`).

        Raises:
            InvalidRequest: the other side does not speak TLS, or one does not trust the other.
            ServerUnavailable: the connection has ended.
        """

    async def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends all of `buffers`; on return they are the caller's again.

        Raises:
            ServerUnavailable: the connection has ended.
        """
        left = buffers
        while left := self._send_some(left):
            await self._until_writable()

    async def send_fd(self, fd: int) -> None:
        """Passes a file descriptor along with one byte; only on a Unix socket.

        Raises:
            ServerUnavailable: the connection has ended.
        """
        while True:
            try:
                socket.send_fds(self._sock, [b"m"], [fd])
                return
            except BlockingIOError:
                await self._until_writable()
            except OSError as error:
                raise self._broken(errno_name(error)) from error

    async def receive(self, buffers: Sequence[memoryview]) -> None:
        """Fills all of `buffers`.

        Raises:
            ServerUnavailable: the connection ended before.
        """
        left = self._fill([buffer for buffer in buffers if len(buffer)])
        if not left:
            return
        self._wanted = left
        self._received = received = self._loop.create_future()
        if not self._is_watched:
            self._loop.add_reader(self._fd, self._on_readable)
            self._is_watched = True
        try:
            await received
        finally:
            self._wanted = []
            self._received = None

    async def receive_fd(self) -> int | None:
        """What `send_fd` passed, now owned by the caller; None if the byte came without.

        Raises:
            ServerUnavailable: the connection ended before.
        """
        await self._until_readable()
        try:
            got, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise self._broken(errno_name(error)) from error
        if not got:
            raise self._broken("closed by the other side")
        return fds[0] if fds else None

    def finish_sending(self) -> None:
        """Tells the other side that nothing more comes; it still can be received from. Does nothing
        over TLS, where receiving would end too."""
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_WR)

    @property
    def is_local(self) -> bool:
        """It cannot leave the host."""
        return self._sock.family == socket.AF_UNIX

    def is_idle(self) -> bool:
        """Whether it is still connected and nothing has come: fit for another transfer."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def unwatch(self) -> None:
        """Lets go of the loop until the next call, so that the socket may be kept or closed by
        anybody."""
        if self._is_watched:
            self._loop.remove_reader(self._fd)
            self._is_watched = False

    def close(self) -> None:
        """Ends the connection. Who waits in `send` or `receive` gets `ServerUnavailable`."""
        if self._fd < 0:
            return
        self.unwatch()
        if self._writable is not None:
            self._loop.remove_writer(self._fd)
        self._fd = -1
        self._sock.close()
        for waiting in (self._writable, self._received):
            if waiting is not None and not waiting.done():
                waiting.set_exception(self._broken("closed on this side"))

    async def _until_readable(self) -> None:
        self.unwatch()
        self._wait_for(1)
        self._received = readable = self._loop.create_future()
        self._loop.add_reader(self._fd, _set, readable)
        self._is_watched = True
        try:
            await readable
        finally:
            self._received = None
            self.unwatch()

    async def _until_writable(self) -> None:
        self._writable = self._loop.create_future()
        self._loop.add_writer(self._fd, self._on_writable)
        try:
            await self._writable
        finally:
            self._writable = None
            if self._fd >= 0:
                self._loop.remove_writer(self._fd)

    def _send_some(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """What is left after one call."""
        try:
            sent = self._sock.sendmsg(buffers[:_IOV_MAX])
        except BlockingIOError:
            return buffers
        except OSError as error:
            raise self._broken(errno_name(error)) from error
        return _rest(buffers, sent)

    def _fill(self, wanted: list[memoryview]) -> list[memoryview]:
        """What is left to fill after one call; the next wake-up waits for most of that."""
        if not wanted:
            return wanted
        try:
            got = self._sock.recvmsg_into(wanted[:_IOV_MAX])[0]
        except BlockingIOError:
            left = wanted
        except OSError as error:
            raise self._broken(errno_name(error)) from error
        else:
            if not got:
                raise self._broken("closed by the other side")
            left = _rest(wanted, got)
        if left:
            self._wait_for(sum(map(len, left)))
        return left

    def _wait_for(self, size_bytes: int) -> None:
        low_water = min(size_bytes, _LOW_WATER_BYTES_MAX)
        if low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _on_readable(self) -> None:
        received = self._received
        if received is None or received.done():
            # Nobody waits: most often the next `receive` comes before this does.
            self.unwatch()
            return
        try:
            self._wanted = self._fill(self._wanted)
        except ServerUnavailable as error:
            received.set_exception(error)
            return
        if not self._wanted:
            received.set_result(None)

    def _on_writable(self) -> None:
        if self._writable is not None:
            _set(self._writable)

    def _broken(self, why: str) -> ServerUnavailable:
        return ServerUnavailable(f"the data connection with {self.peer} has ended: {why}")


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _rest(buffers: Sequence[Buffer], done: int) -> list[memoryview]:
    """`buffers` without their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [memoryview(buffer)[done:], *(memoryview(it) for it in buffers[index + 1 :])]
        done -= len(buffer)
    return []


def errno_name(error: OSError) -> str:
    """As in EPIPE (Broken pipe)."""
    return f"{errno.errorcode.get(error.errno or 0, str(error.errno))} ({error.strerror})"
