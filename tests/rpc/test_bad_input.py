"""Every mistake a caller can make over the wire: the status code, the words, and nothing is lost.

The well-behaved client refuses most of these itself, so they are sent here as raw messages.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvclient import AsyncClient, Descriptor, InvalidRequest
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader, encode_prefix
from kvserve.format.messages import SERVICE, descriptor_to_pb
from kvserve.rpc.server import Server
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import payload_for, small_descriptor, store_all

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


def good() -> pb.Descriptor:
    return descriptor_to_pb(small_descriptor())


def _change(**changes: Any) -> pb.Descriptor:
    message = good()
    for path, value in changes.items():
        *parents, name = path.split("__")
        at = message
        for parent in parents:
            at = getattr(at, parent)
        if isinstance(value, list):
            at.ClearField(name)
            getattr(at, name).extend(value)
        else:
            setattr(at, name, value)
    return message


HASHES = good().chunk_hashes
LONG = "x" * 5000

BAD_DESCRIPTORS = {
    "no chunks": (_change(chunk_hashes=b""), "chunk_hashes is empty"),
    "hash given twice": (_change(chunk_hashes=HASHES[:32] * 2), "is in the descriptor twice"),
    "hash of 8 bytes": (_change(chunk_hashes=HASHES[:8], hash_size_bytes=8), "must be 16 to 64"),
    "hash of 65 bytes": (
        _change(chunk_hashes=HASHES[:65], hash_size_bytes=65),
        "a chunk hash of 65 bytes",
    ),
    "hash size 0": (_change(hash_size_bytes=0), "not a multiple of hash_size_bytes 0"),
    "ragged hashes": (_change(chunk_hashes=HASHES[:33]), "not a multiple of hash_size_bytes 32"),
    "layer order out of range": (_change(layer_order=[0, 4]), "layer_order holds layer 4"),
    "layer order repeats": (_change(layer_order=[1, 1]), "layer_order holds a layer twice"),
    "tenant with /": (_change(tenant="a/b"), "tenant 'a/b' must be"),
    "tenant ..": (_change(tenant=".."), "tenant '..' must be"),
    "tenant with NUL": (_change(tenant="a\0b"), "tenant 'a\\x00b' must be"),
    "tenant empty": (_change(tenant=""), "tenant '' must be"),
    "tenant of 5,000": (_change(tenant=LONG), "must be 1 to 64"),
    "tenant with @": (_change(tenant="a@b"), "tenant 'a@b' must be"),
    "model with ..": (_change(identity__model="../../x"), "must not hold '..'"),
    "model with NUL": (_change(identity__model="a\0b"), "has a NUL"),
    "model of 5,000": (_change(identity__model=LONG), "identity.model is 5000 bytes long"),
    "model empty": (_change(identity__model=""), "identity.model must not be empty"),
    "revision empty": (_change(identity__revision=""), "identity.revision must not be empty"),
    "adapter with NUL": (_change(identity__adapter="\0"), "identity.adapter"),
    "salt of 5,000": (_change(identity__salt=LONG), "identity.salt is 5000 bytes long"),
    "unknown dtype": (_change(identity__layout__dtype="bf16"), "layout.dtype 'bf16' is unknown"),
    "bad axes": (_change(identity__layout__axes="a/b"), "layout.axes must be"),
    "chunk of 0 tokens": (_change(identity__layout__chunk_tokens=0), "layout.chunk_tokens must"),
    "rank out of range": (_change(shard__rank=1), "rank must be 0 to count - 1"),
    "no layers": (_change(identity__layout__layers=[]), "layout.layers must be 1 to 4096"),
    "5,000 layers": (
        _change(identity__layout__layers=[pb.LayerRun(kind=1, count=5000, kv_heads=1, head_dim=1)]),
        "layout.layers must be 1 to 4096",
    ),
    "unknown layer kind": (
        _change(identity__layout__layers=[pb.LayerRun(kind=9, count=1)]),
        "unknown layer kind 9",
    ),
    "attention without heads": (
        _change(identity__layout__layers=[pb.LayerRun(kind=1, count=1, head_dim=4)]),
        "layout.layers.kv_heads must be 1 to",
    ),
    "slice of 100 GB": (
        _change(
            identity__layout__layers=[pb.LayerRun(kind=1, count=1, kv_heads=9999, head_dim=9999)]
        ),
        "a slice of",
    ),
    "1,000,000 runs of layers": (
        _change(
            identity__layout__layers=[pb.LayerRun(kind=3, count=1, opaque_bytes=1)] * 1_000_000
        ),
        "more than 131072 bytes beside its chunk_hashes: too many layout.layers",
    ),
    "more slices than a transfer may have": (
        _change(
            chunk_hashes=b"".join(n.to_bytes(16, "big") for n in range(5000)),
            hash_size_bytes=16,
            identity__layout__layers=[pb.LayerRun(kind=3, count=1000, opaque_bytes=1)],
        ),
        "5000 chunks of 1000 layers are more than 4194304 slices",
    ),
    "nothing at all": (pb.Descriptor(), "not a multiple of hash_size_bytes 0"),
}


def files_under(root: Path) -> list[str]:
    """Relative paths, but for what servers tell one another."""
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if path.parts[0] not in (".servers", ".usage"))


@pytest.mark.parametrize("name", BAD_DESCRIPTORS)
async def test_descriptor(channel: grpc.aio.Channel, root: Path, name: str) -> None:
    """The same words from every rpc that takes a descriptor; no file appears anywhere."""
    message, words = BAD_DESCRIPTORS[name]
    calls = {
        "Lookup": pb.LookupRequest(descriptor=message),
        "Delete": pb.DeleteRequest(descriptor=message),
        "Verify": pb.VerifyRequest(descriptor=message),
        "Fetch": pb.FetchRequest(descriptor=message),
    }
    for rpc, request in calls.items():
        path = f"/{SERVICE}/{rpc}"
        raw = request.SerializeToString()
        is_stream = rpc == "Fetch"
        call = channel.unary_stream(path)(raw) if is_stream else channel.unary_unary(path)(raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if is_stream else call)
        assert caught.value.code() is INVALID
        assert words in caught.value.details()
    code, details = await store_error(
        channel, [pb.StoreRequest(open=pb.StoreOpen(descriptor=message))]
    )
    assert code is INVALID
    assert words in details
    assert files_under(root) == []


async def store_error(
    channel: grpc.aio.Channel, messages: list[pb.StoreRequest | bytes]
) -> tuple[grpc.StatusCode, str]:
    """The status of a store that sends `messages` and half-closes."""
    call = channel.stream_stream(f"/{SERVICE}/Store")()
    # The server may end the call before it has read everything: the status tells, not the write.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            raw = message if isinstance(message, bytes) else message.SerializeToString()
            await call.write(raw)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


SIZE = small_descriptor().layout.slice_sizes[0]
LAYER = payload_for(small_descriptor())[: 8 * SIZE]


def frame(
    payload: bytes | bytearray = LAYER,
    *,
    layer: int = 0,
    chunk: int = 0,
    offset: int = 0,
    checksums: bytes | None = None,
) -> bytes:
    if checksums is None:
        slices = [payload[at : at + SIZE] for at in range(0, len(payload), SIZE)]
        checksums = b"".join(
            checksum(part).to_bytes(8, "little") for part in slices if len(part) == SIZE
        )
    return encode_prefix(FrameHeader(layer, chunk, offset, checksums), len(payload)) + payload


OPEN = pb.StoreRequest(open=pb.StoreOpen(descriptor=good()))

BAD_STORES: dict[str, tuple[list[pb.StoreRequest | bytes], str]] = {
    "no open": ([frame()], "the first message of a store must be `open`"),
    "nothing": ([], "the store stream ended before `open`"),
    "open twice": ([OPEN, OPEN], "a store takes payload frames after `open`, got open"),
    "garbage": ([b"\xff\xff\xff"], "not well-formed"),
    "garbage after open": ([OPEN, b"\xff\xff\xff"], "not well-formed"),
    "cut frame": ([OPEN, frame()[:-1]], "does not end with the message"),
    "layer out of range": ([OPEN, frame(layer=4)], "layer 4 is out of range"),
    "layer sent twice": ([OPEN, frame(), frame()], "layer 0 was sent twice"),
    "payload too long": (
        [OPEN, frame(LAYER + LAYER[:SIZE])],
        "payload size is wrong: 8192 bytes after the last needed chunk",
    ),
    "payload too short": (
        [OPEN, frame(LAYER[:SIZE]), frame(layer=1)],
        "layer 1 came before layer 0 was complete: payload size is wrong, 7 slices are missing",
    ),
    "half a slice": (
        [OPEN, frame(LAYER[: SIZE // 2]), frame(LAYER[:SIZE], chunk=1)],
        f"chunk 0 at byte {SIZE // 2} of {SIZE} was next",
    ),
    "slices out of order": ([OPEN, frame(chunk=1)], "a frame for chunk 1 at byte 0 came, chunk 0"),
    "wrong checksum": ([OPEN, frame(checksums=bytes(64))], "does not match its checksum"),
    "no checksums": ([OPEN, frame(checksums=b"")], "a slice came without its checksum"),
    "too many checksums": (
        [OPEN, frame(LAYER[:SIZE], checksums=checksum(LAYER[:SIZE]).to_bytes(8, "little") * 2)],
        "16 bytes of checksums for 1 slices",
    ),
}


@pytest.mark.parametrize("name", BAD_STORES)
async def test_store(channel: grpc.aio.Channel, client: AsyncClient, root: Path, name: str) -> None:
    """The store ends with clear words, leaves no file, and the chunks can be stored at once."""
    messages, words = BAD_STORES[name]
    code, details = await store_error(channel, messages)
    assert code is INVALID
    assert words in details
    descriptor = small_descriptor()
    assert (await client.lookup(descriptor)).hits == [False] * 8
    assert [name for name in files_under(root) if not name.endswith("/identity")] == []
    await store_all(client, descriptor, payload_for(descriptor))


async def test_a_payload_for_chunks_that_the_server_knows(
    channel: grpc.aio.Channel, client: AsyncClient
) -> None:
    descriptor = small_descriptor()
    await store_all(client, descriptor, payload_for(descriptor))
    code, details = await store_error(channel, [OPEN, frame()])
    assert code is INVALID
    assert "the server needs no chunk of this store" in details


async def test_fetch_of_unknown_layers(channel: grpc.aio.Channel) -> None:
    for layers, words in (([4], "layers holds layer 4"), ([0, 0], "layers holds a layer twice")):
        request = pb.FetchRequest(descriptor=good(), layers=layers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream(f"/{SERVICE}/Fetch")(request.SerializeToString()).read()
        assert caught.value.code() is INVALID
        assert words in caught.value.details()


async def test_a_message_over_the_limit(client: AsyncClient, server: Server) -> None:
    """gRPC itself refuses it, with the sizes; the connection and the server live on."""
    info = await client.server_info()
    async with grpc.aio.insecure_channel(
        server.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Lookup")(bytes(info.message_size_bytes_max + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in caught.value.details()
        await channel.unary_unary(f"/{SERVICE}/GetServerInfo")(b"")


async def test_more_chunks_than_the_server_takes(start_server: Any) -> None:
    server = await start_server(limits={"chunks_max": 4})
    async with AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequest, match="names 8 chunks; this server takes 4"):
            await client.lookup(small_descriptor())


async def test_undecodable_requests(channel: grpc.aio.Channel) -> None:
    for rpc in ("Lookup", "Delete"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/{rpc}")(b"\xff\xff")
        assert caught.value.code() is INVALID
        assert f"a {rpc}Request is not well-formed" in caught.value.details()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Nonsense")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def bad_calls(client: AsyncClient, descriptor: Descriptor) -> dict[str, Any]:
    size = descriptor.payload_size_bytes
    return {
        "the region has 10 bytes": lambda: client.fetch(descriptor, bytearray(10)),
        "the region is read-only": lambda: client.fetch(descriptor, bytes(size)),
        "layers holds layer 9": lambda: client.fetch(descriptor, bytearray(size), layers=[9]),
        "layers holds a layer twice": lambda: client.fetch(
            descriptor, bytearray(size), layers=[1, 1]
        ),
        "must be contiguous": lambda: client.fetch(descriptor, memoryview(bytearray(size))[::2]),
    }


@pytest.mark.parametrize("words", list(bad_calls(None, small_descriptor())))  # type: ignore[arg-type]
async def test_the_client_refuses_before_it_calls(client: AsyncClient, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        bad_calls(client, small_descriptor())[words]()
    assert client.requests["Fetch"] == 0


async def test_store_handle_refuses_wrong_layers(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    async with client.store(descriptor, payload_for(descriptor)) as handle:
        await handle.store_layer(1)
        with pytest.raises(InvalidRequest, match="layer 1 was sent twice"):
            await handle.store_layer(1)
        for layer_index in (-1, 4):
            with pytest.raises(
                InvalidRequest, match="is out of range; this layout has layers 0 to 3"
            ):
                await handle.store_layer(layer_index)
        with pytest.raises(InvalidRequest, match="layer 2 was not sent"):
            await handle.layer(2)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:99999", "unix:"])
def test_addresses(address: str) -> None:
    with pytest.raises(InvalidRequest, match="must be HOST:PORT"):
        AsyncClient(address)
