"""`Client`: the same transfers for engine worker threads that have no event loop.

One background thread runs a loop for all clients of the process; a forked child starts its own.
Methods may be called from any thread. Every wait has the deadline of its handle.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from kvclient.client import AsyncClient, Presence, ServerInfo
from kvclient.fetch import FetchHandle, FetchResult
from kvclient.fetch_session import LayerEvent
from kvclient.handle import HandleState
from kvclient.planes.choice import AUTO
from kvclient.region import Region
from kvclient.store import StoreHandle, StoreResult
from kvclient.tls import Tls
from kvserve.errors import HandleClosed, KvserveError
from kvserve.model import ChunkStatus, Descriptor

_T = TypeVar("_T")


class _LoopThread:
    """The background loop of this process."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _current: ClassVar["tuple[int, asyncio.AbstractEventLoop] | None"] = None

    @classmethod
    def loop(cls) -> asyncio.AbstractEventLoop:
        with cls._lock:
            if cls._current is None or cls._current[0] != os.getpid():
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="kvclient", daemon=True).start()
                cls._current = (os.getpid(), loop)
            return cls._current[1]

    @classmethod
    def after_fork(cls) -> None:
        # The lock may have been held by a thread that the child does not have.
        cls._lock = threading.Lock()


os.register_at_fork(after_in_child=_LoopThread.after_fork)


def _start(work: Coroutine[Any, Any, _T]) -> "Future[_T]":
    loop = _LoopThread.loop()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        work.close()
        raise HandleClosed("a blocking call on the client's own loop would wait for itself")
    return asyncio.run_coroutine_threadsafe(work, loop)


def _wait(work: Coroutine[Any, Any, _T]) -> _T:
    return _start(work).result()


async def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class BlockingFetch:
    """A posted fetch; see `FetchHandle`. The end of a `with` block cancels it, if it still runs."""

    def __init__(self, handle: FetchHandle, layer_order: Sequence[int]) -> None:
        self._handle = handle
        self._layer_order = layer_order

    @property
    def state(self) -> HandleState:
        """Where it is now: PROC, then DONE or ERR."""
        return self._handle.state

    @property
    def error(self) -> KvserveError | None:
        """What ended it early; None also where chunks were misses."""
        return self._handle.error

    def wait_layer(self, layer_index: int) -> LayerEvent:
        """Blocks until one layer is in the region and verified; see `FetchHandle.layer`."""
        return _wait(self._handle.layer(layer_index))

    def layers(self) -> Iterator[LayerEvent]:
        """Each layer as it completes, in delivery order."""
        for layer_index in self._layer_order:
            yield self.wait_layer(layer_index)

    def wait(self) -> FetchResult:
        """Blocks until the end; see `FetchHandle.wait`."""
        return _wait(self._handle.wait())

    def cancel(self) -> None:
        """Returns once the region is quiescent."""
        _wait(self._handle.cancel())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class BlockingStore:
    """A posted store; see `StoreHandle`. The end of a `with` block cancels it, if it still runs."""

    def __init__(self, handle: StoreHandle) -> None:
        self._handle = handle

    @property
    def state(self) -> HandleState:
        """Where it is now: PROC, then DONE or ERR."""
        return self._handle.state

    @property
    def error(self) -> KvserveError | None:
        """What ended it early; None also where chunks were not stored."""
        return self._handle.error

    def needed(self) -> list[int]:
        """The chunks to be sent, as soon as the server says; see `StoreHandle.needed`."""
        return _wait(self._handle.needed())

    def store_layer(self, layer_index: int) -> None:
        """Blocks until the layer's bytes have left the region; see `StoreHandle.store_layer`."""
        _wait(self._handle.store_layer(layer_index))

    def post_layer(self, layer_index: int) -> "Future[None]":
        """Like `store_layer` without waiting: the region's bytes are in use until the future ends.

        `finish` waits for layers posted before it.
        """
        return _start(self._handle.store_layer(layer_index))

    def wait_layer(self, layer_index: int) -> None:
        """Blocks until the server has written a layer that was sent."""
        _wait(self._handle.layer(layer_index))

    def finish(self) -> StoreResult:
        """Publishes what is whole and blocks until the end; see `StoreHandle.finish`."""
        return _wait(self._handle.finish())

    def cancel(self) -> None:
        """Returns once the region is quiescent."""
        _wait(self._handle.cancel())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """A blocking client of the server at `address`; see `AsyncClient` for what each call does."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 2.0,
        plane: str = AUTO,
        tls: Tls | None = None,
    ) -> None:
        self._client = AsyncClient(
            address,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            plane=plane,
            tls=tls,
        )

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncClient", "Client")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Blocks until open handles are cancelled; see `AsyncClient.close`."""
        _wait(self._client.close())

    @property
    def requests(self) -> Mapping[str, int]:
        """See `AsyncClient.requests`."""
        return self._client.requests

    @staticmethod
    def register(buffer: Any) -> Region:
        """A region over any contiguous buffer; see `Region`."""
        return Region(buffer)

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """See `AsyncClient.server_info`."""
        return _wait(self._client.server_info(timeout_s=timeout_s))

    def lookup(
        self,
        descriptor: Descriptor,
        *,
        lease_owner: str = "",
        lease_ttl_s: float = 0.0,
        all_ranks: bool = False,
        timeout_s: float | None = None,
    ) -> Presence:
        """See `AsyncClient.lookup`, for leases too."""
        return _wait(
            self._client.lookup(
                descriptor,
                lease_owner=lease_owner,
                lease_ttl_s=lease_ttl_s,
                all_ranks=all_ranks,
                timeout_s=timeout_s,
            )
        )

    def verify(self, descriptor: Descriptor, *, timeout_s: float | None = None) -> Presence:
        """See `AsyncClient.verify`."""
        return _wait(self._client.verify(descriptor, timeout_s=timeout_s))

    def release(
        self, lease_owner: str, *, tenant: str = "default", timeout_s: float | None = None
    ) -> int:
        """Ends an owner's leases; see `AsyncClient.release`."""
        return _wait(self._client.release(lease_owner, tenant=tenant, timeout_s=timeout_s))

    def pin(self, descriptor: Descriptor, *, timeout_s: float | None = None) -> list[ChunkStatus]:
        """See `AsyncClient.pin`."""
        return _wait(self._client.pin(descriptor, timeout_s=timeout_s))

    def unpin(self, descriptor: Descriptor, *, timeout_s: float | None = None) -> list[ChunkStatus]:
        """See `AsyncClient.unpin`."""
        return _wait(self._client.unpin(descriptor, timeout_s=timeout_s))

    def delete(
        self, descriptor: Descriptor, *, timeout_s: float | None = None
    ) -> list[ChunkStatus]:
        """See `AsyncClient.delete`."""
        return _wait(self._client.delete(descriptor, timeout_s=timeout_s))

    def fetch(
        self,
        descriptor: Descriptor,
        into: Any,
        *,
        layers: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> BlockingFetch:
        """Posts a fetch and returns at once; see `AsyncClient.prepare_fetch` for `into`."""
        handle: FetchHandle = _wait(
            _call(self._client.fetch, descriptor, into, layers=layers, timeout_s=timeout_s)
        )
        return BlockingFetch(handle, tuple(layers) or descriptor.layer_order)

    def store(
        self, descriptor: Descriptor, source: Any, *, timeout_s: float | None = None
    ) -> BlockingStore:
        """Posts a store and returns at once; see `AsyncClient.prepare_store` for `source`."""
        handle: StoreHandle = _wait(
            _call(self._client.store, descriptor, source, timeout_s=timeout_s)
        )
        return BlockingStore(handle)
