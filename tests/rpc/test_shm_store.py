"""Stores over shm: what the server reads, when, and what a client can do to it meanwhile."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvclient import (
    AsyncClient,
    Client,
    InvalidRequest,
    ServerFault,
    ServerUnavailable,
    SharedRegion,
)
from kvserve.data_socket import DataSocket
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.format.records import RecordKind, encode_frame
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from kvserve.transfer.planes import shm
from tests.payload import memory, payload_for, store_all
from tests.rpc.test_planes import large, until, until_quiet
from tests.rpc.test_shm_plane import NEW, SIZE_BYTES, Peer

SLICE_BYTES = NEW.layout.slice_sizes[0]


@pytest.fixture
def plane() -> str:
    return "shm"


@pytest.fixture
def peer(rpcs: object) -> Peer:
    return Peer(rpcs, "store")  # type: ignore[arg-type]


def mappings(inode: int, pid: int | str = "self") -> int:
    """How many mappings of this memory (by its inode) a process has."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def offered(layer: int, chunk: int, offset: int, payload: bytes = b"\0" * 8192) -> bytes:
    header = FrameHeader(layer, chunk, offset, checksum(payload).to_bytes(8, "little"))
    return encode_frame(header, len(payload), RecordKind.OFFERED)


REFUSED = [
    (offered(9, 0, 0), "layer 9 is not in the payload"),
    (offered(3, 8, 0), f"a frame of 8192 bytes at byte {SIZE_BYTES} of the payload"),
    (offered(0, 2**32 - 1, 0), "of the payload, which has 262144"),
    (offered(0, 0, 2**64 - 1), "a frame of 8192 bytes at byte 18446744073709551615"),
    (offered(0, 1, 0), "a frame for chunk 1 at byte 0 came, chunk 0"),
    (offered(0, 0, 0, b"x" * 8192), "the payload does not match its checksum"),
    (encode_frame(FrameHeader(0, 0, 0, bytes(8)), 8192), "takes OFFERED records, got PAYLOAD"),
    (
        encode_frame(FrameHeader(0, 0, 0, bytes(8)), (1 << 20) + 1, RecordKind.OFFERED),
        "a frame with 1048577 bytes of payload; must be 1 to",
    ),
    (b"\xff" * 24, "a record of unknown kind 255"),
]
"""A record each, and how the server refuses it, whoever moves the payload."""


@pytest.mark.parametrize(("record", "words"), REFUSED)
async def test_frames_that_are_refused(
    peer: Peer, server: Server, root: Path, record: bytes, words: str
) -> None:
    region = SharedRegion(SIZE_BYTES)
    answer = await peer.told(region.fd, records=(record,))
    assert answer.startswith("INVALID_ARGUMENT: ")
    assert words in answer
    await until_quiet(server)
    await until(lambda: " 0 connections" in repr(server.data_port))
    inode = os.fstat(region.fd).st_ino
    await until(lambda: mappings(inode) == 1)
    assert [path for path in root.rglob(".*") if path.is_file()] == []


async def test_who_does_not_read_the_answers_is_held(
    peer: Peer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits with the next frame; the deadline ends the store."""
    sent = []
    real = DataSocket.send

    async def counted(self: DataSocket, buffers: object) -> None:
        await real(self, buffers)  # type: ignore[arg-type]
        sent.append(buffers)

    region = SharedRegion(SIZE_BYTES)
    # One slice in pieces of a byte, so that there are more of them than answers that fit.
    pieces = b"".join(
        encode_frame(FrameHeader(0, 0, at, b""), 1, RecordKind.OFFERED) for at in range(4096)
    )
    monkeypatch.setattr(DataSocket, "send", counted)
    answer = await peer.told(region.fd, records=(pieces,))
    assert answer.startswith("DEADLINE_EXCEEDED")
    assert 0 < len(sent) < 4096
    await until_quiet(server)
    await until(lambda: " 0 connections" in repr(server.data_port))


@pytest.mark.parametrize("layers", [0, 1, 5])
async def test_a_cancelled_store_lets_go_of_the_memory(
    client: AsyncClient, server: Server, layers: int
) -> None:
    descriptor = large()
    region = SharedRegion(descriptor.payload_size_bytes)
    inode = os.fstat(region.fd).st_ino
    handle = client.store(descriptor, region)
    await handle.needed()
    for layer_index in range(layers):
        await handle.store_layer(layer_index)
    sending = asyncio.ensure_future(handle.store_layer(layers))
    await asyncio.sleep(0)
    await handle.cancel()
    await asyncio.wait([sending])
    sending.exception()
    await until(lambda: " 0 connections" in repr(server.data_port))
    await until(lambda: mappings(inode) == 1)
    assert not any((await client.lookup(descriptor)).hits)


async def test_memory_that_the_server_refuses(
    client: AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told why, in the server's words."""
    fd = os.memfd_create("may-shrink", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    monkeypatch.setattr(SharedRegion, "fd", property(lambda self: fd))
    with pytest.raises(InvalidRequest, match="must be sealed against shrinking"):
        await store_all(client, NEW, payload_for(NEW))
    os.close(fd)
    await until_quiet(server)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(encode_frame(FrameHeader(0, 0, 0, b""), 0), ServerFault), (b"", ServerUnavailable)],
)
async def test_a_server_that_gives_a_wrong_answer(
    client: AsyncClient,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    error: type[Exception],
) -> None:
    def answered() -> bytes:
        if not answer:
            raise ServerUnavailable("as if it had died")
        return answer

    monkeypatch.setattr(shm, "encode_taken", answered)
    handle = client.store(NEW, memory("shm", payload_for(NEW)))
    with pytest.raises(error):
        await handle.store_layer(0)
    await handle.cancel()
    await until_quiet(server)
    assert not any((await client.lookup(NEW)).hits)


def test_a_server_that_hangs_does_not_hold_the_cancel(root: Path) -> None:
    """It can only read what it then throws away, so the region is the caller's at once."""
    source = payload_for(NEW)
    with ServerProcess(root) as process, Client(process.address, plane="shm") as client:
        region = SharedRegion(SIZE_BYTES)
        inode = os.fstat(region.fd).st_ino
        handle = client.store(NEW, region)
        handle.store_layer(0)
        assert mappings(inode, process.pid) == 1
        os.kill(process.pid, signal.SIGSTOP)
        try:
            cancelling = threading.Thread(target=handle.cancel)
            cancelling.start()
            cancelling.join(5)
            assert not cancelling.is_alive()
            region.view[:] = b"\xee" * SIZE_BYTES
        finally:
            os.kill(process.pid, signal.SIGCONT)
        _until(lambda: mappings(inode, process.pid) == 0, client)
        assert not any(client.lookup(NEW).hits)
        with client.store(NEW, memory("shm", source)) as again:
            for layer_index in NEW.layer_order:
                again.store_layer(layer_index)
            assert again.finish().is_whole


def _until(is_true: Callable[[], bool], client: Client) -> None:
    for _ in range(200):
        if is_true():
            return
        client.server_info()
    pytest.fail("the memory of a cancelled store is still mapped")
