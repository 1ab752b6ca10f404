"""A store that the server refuses while the client still writes: the status of the call wins."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvclient import AsyncClient, InvalidRequest
from kvclient.call_write import write
from kvserve.errors import KvserveError
from kvserve.rpc.server import Server
from kvserve.transfer.store_session import StoreSession
from tests.payload import payload_for, small_descriptor

ROUNDS = 40


async def test_the_reason_arrives(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    """Before, on the grpc plane, a third of the rounds ended with a status that gRPC had made."""

    def refuse(*args: object) -> None:
        raise InvalidRequest("refused in the middle")

    monkeypatch.setattr(StoreSession, "feed", refuse)
    descriptor = small_descriptor(chunks=64, kv_heads=8, head_dim=128, chunk_tokens=64)
    payload = payload_for(descriptor)
    seen = Counter[str]()
    for _ in range(ROUNDS):
        async with client.store(descriptor, payload) as handle:
            try:
                await asyncio.gather(*(handle.store_layer(layer) for layer in range(4)))
                await handle.finish()
            except KvserveError as error:
                seen[f"{type(error).__name__}: {error}"] += 1
    assert seen == {f"InvalidRequest: {server.address}: refused in the middle": ROUNDS}


class TestWrite:
    """On a call of its own; the other side takes one message and then does as it is told."""

    @pytest.fixture
    async def call(self) -> AsyncIterator["grpc.aio.StreamStreamCall[bytes, bytes]"]:
        async def answer(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            first = await context.read()
            if first == b"refuse":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
            if first == b"wait":
                await asyncio.sleep(30)

        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("s", {"Call": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.stream_stream("/s/Call")()
        await server.stop(None)

    async def test_on_a_call_that_has_ended(self, call: Any) -> None:
        await write(call, b"refuse")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                await write(call, b"more")

    async def test_on_a_call_that_has_ended_well(self, call: Any) -> None:
        await write(call, b"end")
        assert await call.code() is grpc.StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await write(call, b"more")

    async def test_a_cancelled_write_ends_the_call(self, call: Any) -> None:
        await write(call, b"wait")
        task = asyncio.create_task(self.write_on(call))
        await asyncio.sleep(0.2)
        assert not task.done(), "the other side takes no more"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.cancelled()

    @staticmethod
    async def write_on(call: Any) -> None:
        for _ in range(100):
            await write(call, bytes(1 << 20))
