"""The data socket: every byte where it belongs, and nothing after the end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from random import Random

import pytest

from kvserve.data_socket import DataSocket
from kvserve.errors import ServerUnavailable
from kvserve.tls_socket import TlsDataSocket
from tests.certificates import Certificates

Pair = tuple[DataSocket, DataSocket]


@pytest.fixture(params=["tcp", "unix", "tls"])
async def pair(request: pytest.FixtureRequest, certificates: Certificates) -> AsyncIterator[Pair]:
    if request.param == "unix":
        one, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
    sockets: Pair
    if request.param == "tls":
        sockets = (
            TlsDataSocket(one, "other", certificates.client_context(), server_name="127.0.0.1"),
            TlsDataSocket(other, "one", certificates.server_context(), server_name=None),
        )
        await asyncio.gather(*(each.handshake() for each in sockets))
    else:
        sockets = DataSocket(one, "other"), DataSocket(other, "one")
    yield sockets
    for each in sockets:
        each.close()


def cut(data: bytearray, random: Random, parts: int) -> list[memoryview]:
    """Views of all of it, in order, some of them empty."""
    at = sorted(random.choices(range(len(data) + 1), k=parts - 1))
    view = memoryview(data)
    return [view[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


@pytest.mark.parametrize("size", [1, 24, 4096, 1 << 20, 9 << 20])
@pytest.mark.parametrize("parts", [1, 3, 3000])
async def test_bytes_arrive_in_order_whatever_the_buffers(
    pair: Pair, size: int, parts: int
) -> None:
    """3,000 buffers are more than one system call takes."""
    random = Random(f"{size} {parts}")
    source, target = bytearray(random.randbytes(size)), bytearray(size)
    await asyncio.gather(
        pair[0].send(cut(source, random, parts)), pair[1].receive(cut(target, random, parts))
    )
    assert target == source
    back = bytearray(4)
    await asyncio.gather(pair[1].send((b"back",)), pair[0].receive([memoryview(back)]))
    assert back == b"back"


async def test_records_of_changing_size(pair: Pair) -> None:
    """A small one after a large one is not held back by what the large one waited for."""
    random = Random(1)
    sizes = [24, 3 << 20, 24, 1, 2 << 20, 24]
    records = [random.randbytes(size) for size in sizes]

    async def send() -> None:
        for record in records:
            await pair[0].send((record,))
            await asyncio.sleep(0.01)

    sending = asyncio.create_task(send())
    for record in records:
        got = bytearray(len(record))
        await pair[1].receive([memoryview(got)])
        assert got == record
    await sending


async def test_nothing_lands_after_a_cancel(pair: Pair) -> None:
    target = bytearray(1 << 20)
    receiving = asyncio.create_task(pair[1].receive([memoryview(target)]))
    await pair[0].send((b"\x11" * 1000,))
    while not target[999]:
        await asyncio.sleep(0)
    receiving.cancel()
    target[:] = b"\xaa" * len(target)
    await pair[0].send((b"\x22" * 1000,))
    with pytest.raises(asyncio.CancelledError):
        await receiving
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert target == b"\xaa" * len(target)


async def test_small_buffers_among_large_ones(pair: Pair) -> None:
    """TLS puts small ones together and gives OpenSSL what it refused again: nothing may shift."""
    random = Random(4)
    sizes = [random.choice([0, 1, 100, 4095, 4096, 16383, 16385, 300_000]) for _ in range(400)]
    source = random.randbytes(sum(sizes))
    view, at, views = memoryview(source), 0, []
    for size in sizes:
        views.append(view[at : at + size])
        at += size
    target = bytearray(len(source))
    sending = asyncio.create_task(pair[0].send(views))
    await asyncio.sleep(0.01)
    assert not sending.done(), "more than the kernel takes: the rest waits"
    await pair[1].receive([memoryview(target)])
    await sending
    assert target == source


@pytest.mark.parametrize("side", ["receive", "send"])
async def test_closing_wakes_who_waits(pair: Pair, side: str) -> None:
    memory = memoryview(bytearray(64 << 20))
    waiting = asyncio.create_task(
        pair[0].receive([memory]) if side == "receive" else pair[0].send((memory,))
    )
    await asyncio.sleep(0.01)
    pair[0].close()
    pair[0].close()
    with pytest.raises(ServerUnavailable, match="closed on this side"):
        await waiting
    for call in (pair[0].receive([memory]), pair[0].send((memory,))):
        with pytest.raises(ServerUnavailable, match="EBADF"):
            await call


async def test_the_other_side_goes_away(pair: Pair) -> None:
    memory = memoryview(bytearray(64 << 20))
    receiving = asyncio.create_task(pair[0].receive([memory]))
    sending = asyncio.create_task(pair[0].send((memory,)))
    await asyncio.sleep(0.01)
    pair[1].close()
    with pytest.raises(ServerUnavailable, match=r"closed by the other side|ECONNRESET"):
        await receiving
    with pytest.raises(ServerUnavailable, match=r"closed by the other side|EPIPE|ECONNRESET"):
        await sending


async def test_idle_is_connected_and_silent(pair: Pair) -> None:
    assert pair[0].is_idle()
    await pair[1].send((b"x",))
    await asyncio.sleep(0.01)
    assert not pair[0].is_idle(), "something came that nobody asked for"
    await pair[0].receive([memoryview(bytearray(1))])
    assert pair[0].is_idle()
    pair[1].close()
    await asyncio.sleep(0.01)
    assert not pair[0].is_idle()


async def test_an_unwatched_socket_leaves_the_loop_alone(pair: Pair) -> None:
    """Bytes that nobody waits for must not keep the loop busy."""
    first = bytearray(1)
    receiving = asyncio.create_task(pair[1].receive([memoryview(first)]))
    await asyncio.sleep(0)
    await pair[0].send((b"1",))
    await pair[0].send((b"2" * 100,))
    await receiving
    await asyncio.sleep(0.01)
    assert not pair[1]._is_watched
    rest = bytearray(100)
    await pair[1].receive([memoryview(rest)])
    assert rest == b"2" * 100
