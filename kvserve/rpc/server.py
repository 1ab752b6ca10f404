"""One server process: start, serve, drain. Readable top to bottom.

```
check the root -> bind -> SERVING -> (SIGTERM) NOT_SERVING -> wait for transfers -> stop
```
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_reflection.v1alpha import reflection

from kvserve.config import Config, ServerConfig
from kvserve.errors import InvalidRequest, StorageError, StorageUnavailable
from kvserve.format.messages import SERVICE
from kvserve.frame_memory import keep_frame_memory
from kvserve.fs import FileSystem
from kvserve.fs.threads import FsThreads
from kvserve.metrics import Metrics
from kvserve.open_tree import OpenTree, open_tree_blocking
from kvserve.rpc.health import Health
from kvserve.rpc.listening import why_not_bound
from kvserve.rpc.servicer import Servicer
from kvserve.rpc.tls import ServerTls, load_tls_blocking
from kvserve.service import Service
from kvserve.storage_health import StorageHealth
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.planes.nixl_port import NixlPort, open_port_blocking
from kvserve.transfer.planes.offered import Planes
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from kvserve.upkeep import Upkeep

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0


def channel_options(
    message_size_bytes_max: int, *, shares_port: bool = False
) -> list[tuple[str, int]]:
    """Options that client and server must agree on; the client's own copy is `kvclient/channel.py`.

    Idle connections are kept alive by the client's pings every 30 s: without the second line the
    server would answer them with GOAWAY "too_many_pings". `shares_port`: other processes listen on
    the same port, and the kernel gives each connection to one of them.
    """
    return [
        ("grpc.max_receive_message_length", message_size_bytes_max),
        ("grpc.max_send_message_length", message_size_bytes_max),
        # A client that vanished without a word keeps its transfer open for at most 40 s.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_frame_size", 4 << 20),
        ("grpc.so_reuseport", int(shares_port)),
    ]


class Server:
    """A started server has its real address in `address` (port 0 binds any free one)."""

    def __init__(self, config: Config, file_system: FileSystem | None = None) -> None:
        self._config = config
        self._fs = file_system
        self.address = config.server.listen
        self.metrics_address = ""
        keep_frame_memory()
        self._threads = FsThreads(config.store.io_threads, timeout_s=config.store.io_timeout_s)
        self._server: grpc.aio.Server | None = None
        self._tls: ServerTls | None = None
        self.data_port: DataPort | None = None
        self.nixl: NixlPort | None = None

    async def start(self) -> None:
        """Checks the root, binds, answers.

        Raises:
            InvalidRequest: no certificate where the settings name one, no root, a root that cannot
                be written, an address that cannot be bound, or no answer in time; the message names
                path, uid and errno.
        """
        config, limits = self._config, self._config.limits
        if config.server.nixl:
            self.nixl = await asyncio.get_running_loop().run_in_executor(
                None, open_port_blocking, config
            )
        try:
            tree = await self._open_tree()
        except InvalidRequest:
            await self._close_data_port()
            raise
        self._metrics = Metrics(tree)
        self._upkeep = Upkeep(
            tree,
            self._metrics,
            sweep_interval_s=config.store.sweep_interval_s,
            exchange_interval_s=config.capacity.exchange_interval_s,
            ttl_s=config.capacity.ttl_s,
            timeout_s=config.store.io_timeout_s,
        )
        storage = StorageHealth(lambda: self._threads.hung)
        staging = Staging(limits.staging_size_bytes, limits.frame_size_bytes)
        self.service = Service(
            tree,
            self._threads,
            limits,
            self._metrics,
            staging=staging,
            pace=ReadPace(config.store.io_threads),
            health=storage,
            lease_ttl_s_max=config.capacity.lease_ttl_s_max,
            store_refused=self._upkeep.relieve_soon,
        )
        self.data_port = DataPort(
            staging,
            connections_max=2 * limits.transfers_max,
            tls=None if self._tls is None else self._tls.context,
        )
        planes = Planes(
            self.data_port, frame_size_bytes_max=limits.frame_size_bytes, nixl=self.nixl
        )
        self._health = Health(storage, self._threads, tree.store.check_root_blocking)
        server = self._new_server(tree, planes)
        try:
            port = await self._listen(server)
        except InvalidRequest:
            await self._close_data_port()
            await asyncio.get_running_loop().run_in_executor(
                self._threads, tree.owner.release_blocking
            )
            raise
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._server, self._tree = server, tree
        self._upkeep.start()
        await self._health.start()
        log.debug("serving %s (%s) on %s", tree.store.root, tree.file_system, self.address)

    def _new_server(self, tree: OpenTree, planes: Planes) -> grpc.aio.Server:
        """With every rpc; not bound yet."""
        config, limits = self._config, self._config.limits
        options = channel_options(
            limits.message_size_bytes_max, shares_port=config.server.workers > 1
        )
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers(
            (
                Servicer(
                    self.service,
                    limits,
                    tree.file_system,
                    planes,
                    lease_ttl_s_max=config.capacity.lease_ttl_s_max,
                ).handlers(),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        reflection.enable_server_reflection(
            (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server
        )
        return server

    async def _listen(self, server: grpc.aio.Server) -> int:
        """Binds all that this server listens on; returns the port of the gRPC service."""
        config = self._config
        assert self.data_port is not None
        await _open_data_port(self.data_port, config.server)
        try:
            if self._tls is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, self._tls.credentials)
        except RuntimeError as error:
            why = why_not_bound(self.address) or error
            raise InvalidRequest(
                f"cannot listen on {self.address} (server.listen): {why}"
            ) from error
        if config.server.metrics_listen:
            self.metrics_address = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._metrics.listen_blocking, config.server.metrics_listen
            )
        return port

    async def _open_tree(self) -> OpenTree:
        config = self._config

        def open_blocking() -> OpenTree:
            self._tls = load_tls_blocking(config.server)
            return open_tree_blocking(config, self._fs)

        threads = FsThreads(1, timeout_s=_START_TIMEOUT_S, name="start")
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, open_blocking)
        except StorageUnavailable as error:
            raise InvalidRequest(
                f"the root {config.store.root} gave no answer in {_START_TIMEOUT_S:g} s: "
                "does its mount hang?"
            ) from error
        finally:
            threads.shutdown(wait=False)

    async def stop(self) -> None:
        """Turns health to NOT_SERVING, refuses new rpcs, waits for open ones up to the limit.

        Harmless before the start and after a stop.
        """
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.drain()
        timeout_s = self._config.server.drain_timeout_s
        log.info("draining for at most %.0f s", timeout_s)
        await server.stop(timeout_s)
        await self.service.ended()
        await self._close_data_port()
        await self._upkeep.stop()
        await asyncio.get_running_loop().run_in_executor(None, self._metrics.close_blocking)
        loop = asyncio.get_running_loop()
        close_idle_blocking = self._tree.store.open_chunks.close_idle_blocking
        try:
            await loop.run_in_executor(self._threads, close_idle_blocking)
        except StorageError as error:
            log.warning("files are left to the end of the process: %s", error)
        await loop.run_in_executor(None, self._threads.shutdown)
        log.info("stopped")

    async def _close_data_port(self) -> None:
        port, self.data_port = self.data_port, None
        nixl, self.nixl = self.nixl, None
        if nixl is not None:
            await nixl.stop()
        if port is not None:
            await port.stop()


async def serve(
    config: Config,
    *,
    started: Callable[[Server], None],
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> None:
    """Runs a server until one of `signals`; calls `started` once it answers."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, stopping.set)
    server = Server(config)
    await server.start()
    started(server)
    await stopping.wait()
    await server.stop()


async def _open_data_port(port: DataPort, config: ServerConfig) -> None:
    """Where the tcp and the shm plane listen, as far as they are on."""
    listen, data_listen = config.listen, config.data_listen
    if config.has_data_port:
        host = (data_listen or listen).rpartition(":")[0].strip("[]")
        number = int(data_listen.rpartition(":")[2]) if data_listen else 0
        await port.start(host, number, tell_host=bool(data_listen))
    if config.shared_memory:
        port.start_unix()
