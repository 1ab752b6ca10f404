"""A data socket over TLS. Both ends use it; the handshake comes first and waits on the loop, too.

Python copies no payload: OpenSSL encrypts from, and decrypts into, the memory that the caller
names, by way of buffers of its own, a record of at most 16 KiB a call. Only neighbours that are
small are put together, for each call makes a record.

Both ends are kvserve's, so TLS is 1.3: no renegotiation, a write never waits for a read. Servers
give no session tickets: they would come unasked (`is_idle`), and connections are kept anyway. An
end without TLS's own goodbye is an end like any other, since records say where a transfer ends.
"""

import socket
import ssl
from collections.abc import Sequence
from typing import Final

from kvserve.data_socket import Buffer, DataSocket, errno_name
from kvserve.errors import InvalidRequest, ServerUnavailable

_RECORD_BYTES: Final = 16 << 10
# Below this a record of its own costs more than the copy that puts it together with the next.
_SMALL_BYTES: Final = 4 << 10
# What OpenSSL may hold of a record that has come in part: it is not in the kernel any more.
_HELD_BYTES_MAX: Final = 17 << 10
# Encrypted or decrypted before the loop serves others again.
_TURN_BYTES: Final = 1 << 20
_CLOSED: Final = "closed by the other side"


def client_context() -> ssl.SSLContext:
    """Verifies the server's certificate and name; trusts nobody yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def server_context() -> ssl.SSLContext:
    """Without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    return context


class TlsDataSocket(DataSocket):
    """Owns `sock`, which must be connected. Nothing but `handshake` until that is done.

    A `send` that was cancelled leaves a record in the middle: the connection is of no use then.
    """

    def __init__(
        self, sock: socket.socket, peer: str, context: ssl.SSLContext, *, server_name: str | None
    ) -> None:
        """`server_name`: what the server's certificate must be for; None on the server's side.

        Raises:
            ServerUnavailable: the other side has gone already.
        """
        sock.setblocking(False)
        try:
            self._tls = context.wrap_socket(
                sock,
                server_side=server_name is None,
                server_hostname=server_name,
                do_handshake_on_connect=False,
            )
        except OSError as error:
            sock.close()
            raise ServerUnavailable(f"the data connection with {peer} has ended") from error
        super().__init__(self._tls, peer)
        self.needs_handshake = True

    async def handshake(self) -> None:
        while self.needs_handshake:
            try:
                self._tls.do_handshake()
                self.needs_handshake = False
            except ssl.SSLWantReadError:
                await self._until_readable()
            except ssl.SSLWantWriteError:
                await self._until_writable()
            except OSError as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                    raise InvalidRequest(f"TLS with {self.peer}: {_reason(error)}") from error
                raise self._broken(_reason(error)) from error

    def finish_sending(self) -> None:
        """Nothing: to shut one side down ends TLS for both."""

    def is_idle(self) -> bool:
        try:
            # Past TLS, which takes no flags: whatever has come, it is nothing that was asked for.
            socket.socket.recv(self._tls, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._tls.pending()
        except OSError:
            return False
        return False

    def _send_some(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        index = within = turn = 0
        while index < len(buffers) and turn < _TURN_BYTES:
            if within == len(buffers[index]):
                index, within = index + 1, 0
                continue
            try:
                # What OpenSSL could not write it must be given again, byte by byte the same: the
                # record depends on nothing but the bytes that are left.
                sent = self._tls.send(_next_record(buffers, index, within))
            except ssl.SSLWantWriteError:
                break
            except OSError as error:
                raise self._broken(_reason(error)) from error
            turn += sent
            while sent:
                step = min(sent, len(buffers[index]) - within)
                sent, within = sent - step, within + step
                if within == len(buffers[index]):
                    index, within = index + 1, 0
        if index == len(buffers):
            return ()
        return [memoryview(buffers[index])[within:], *buffers[index + 1 :]]

    def _fill(self, wanted: list[memoryview]) -> list[memoryview]:
        index = within = turn = 0
        # What OpenSSL has decrypted wakes nobody: only what the kernel holds may be left.
        while index < len(wanted) and (turn < _TURN_BYTES or self._tls.pending()):
            try:
                got = self._tls.recv_into(wanted[index][within:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                raise self._broken(_reason(error)) from error
            if not got:
                raise self._broken(_CLOSED)
            turn, within = turn + got, within + got
            if within == len(wanted[index]):
                index, within = index + 1, 0
        left = wanted[index:]
        if within:
            left[0] = left[0][within:]
        if left:
            self._wait_for(max(1, sum(map(len, left)) - _HELD_BYTES_MAX))
        return left


def _next_record(buffers: Sequence[Buffer], index: int, within: int) -> Buffer:
    """What goes out next, from byte `within` of `buffers[index]` on."""
    first = memoryview(buffers[index])[within:]
    if len(first) >= _SMALL_BYTES or index + 1 == len(buffers):
        return first
    parts, room = [first], _RECORD_BYTES - len(first)
    while room and (index := index + 1) < len(buffers):
        parts.append(memoryview(buffers[index])[:room])
        room -= len(parts[-1])
    return b"".join(parts)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return _CLOSED
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return errno_name(error)
