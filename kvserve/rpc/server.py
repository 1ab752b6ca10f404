"""One server process: start, serve, drain. Readable top to bottom.

```
check the root -> bind -> SERVING -> (SIGTERM) NOT_SERVING -> wait for transfers -> stop
```
"""

import asyncio
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection

from kvserve.config import Config, StoreConfig
from kvserve.errors import InvalidRequest, KvserveError
from kvserve.format.messages import SERVICE
from kvserve.frame_memory import keep_frame_memory
from kvserve.fs import PosixFileSystem
from kvserve.rpc.servicer import Servicer
from kvserve.service import Service
from kvserve.store.chunk_store import ChunkStore
from kvserve.store.known import KnownChunks
from kvserve.store.owners import Owner
from kvserve.store.paths import TempNames
from kvserve.transfer.planes.data_port import DataPort, FrameBuffers
from kvserve.transfer.planes.offered import Planes
from kvserve.upkeep import Upkeep

log = logging.getLogger(__name__)

# What the process needs beside chunk files: sockets, data connections and the memory that clients
# share over them, the loop's own, libraries.
_OTHER_FILES = 1536
# Frame memory of the tcp plane that is kept for the next transfer, at most.
_FRAMES_KEPT_BYTES = 64 << 20


def channel_options(message_size_bytes_max: int) -> list[tuple[str, int]]:
    """Options that client and server must agree on; the client's own copy is `kvclient/channel.py`.

    Idle connections are kept alive by the client's pings every 30 s: without the second line the
    server would answer them with GOAWAY "too_many_pings".
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
        ("grpc.so_reuseport", 0),
    ]


class Server:
    """A started server has its real address in `address` (port 0 binds any free one)."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.address = config.server.listen
        self._health = aio_health.HealthServicer()
        keep_frame_memory()
        self._threads = ThreadPoolExecutor(config.store.io_threads, thread_name_prefix="fs")
        self._server: grpc.aio.Server | None = None
        self.data_port: DataPort | None = None

    async def start(self) -> None:
        """Checks the root, binds, answers.

        Raises:
            InvalidRequest: no root, a root that cannot be written, or an address that cannot be
                bound; the message names path, uid and errno.
        """
        config = self._config
        loop = asyncio.get_running_loop()
        tree = await loop.run_in_executor(self._threads, _open_tree_blocking, config.store)
        self.service = Service(tree.store, self._threads, config.limits)
        try:
            self.data_port = await _open_data_port(config)
        except InvalidRequest:
            await loop.run_in_executor(self._threads, tree.owner.release_blocking)
            raise
        planes = Planes(self.data_port, frame_size_bytes_max=config.limits.frame_size_bytes)
        server = grpc.aio.server(options=channel_options(config.limits.message_size_bytes_max))
        server.add_generic_rpc_handlers(
            (Servicer(self.service, config.limits, tree.file_system, planes).handlers(),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server
        )
        try:
            port = server.add_insecure_port(self.address)
        except RuntimeError as error:
            await self._close_data_port()
            await loop.run_in_executor(self._threads, tree.owner.release_blocking)
            raise InvalidRequest(f"cannot listen on {self.address}: {error}") from error
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await server.start()
        self._server, self._tree = server, tree
        self._upkeep = Upkeep(
            tree.store.fs,
            tree.store.root,
            tree.owner,
            tree.store.open_chunks,
            sweep_interval_s=config.store.sweep_interval_s,
        )
        self._upkeep.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.debug("serving %s (%s) on %s", tree.store.root, tree.file_system, self.address)

    async def stop(self) -> None:
        """Turns health to NOT_SERVING, refuses new rpcs, waits for open ones up to the limit.

        Harmless before the start and after a stop.
        """
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        timeout_s = self._config.server.drain_timeout_s
        log.info("draining for at most %.0f s", timeout_s)
        await server.stop(timeout_s)
        await self.service.ended()
        await self._close_data_port()
        await self._upkeep.stop()
        loop = asyncio.get_running_loop()
        close_idle_blocking = self._tree.store.open_chunks.close_idle_blocking
        await loop.run_in_executor(self._threads, close_idle_blocking)
        await loop.run_in_executor(None, self._threads.shutdown)
        log.info("stopped")

    async def _close_data_port(self) -> None:
        port, self.data_port = self.data_port, None
        if port is not None:
            await port.stop()


async def serve(config: Config, *, started: Callable[[Server], None]) -> None:
    """Runs a server until SIGTERM or SIGINT; calls `started` once it answers."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = Server(config)
    await server.start()
    started(server)
    await stopping.wait()
    await server.stop()


@dataclass(frozen=True, slots=True)
class _Tree:
    """The open root."""

    store: ChunkStore
    owner: Owner
    file_system: str


async def _open_data_port(config: Config) -> DataPort:
    """Where the tcp and the shm plane listen, as far as they are on."""
    listen, data_listen = config.server.listen, config.server.data_listen
    limits = config.limits
    # Frames of two transfers that hold all they may; beyond that memory is made for the moment.
    kept = min(2 * limits.frames_in_flight, max(1, _FRAMES_KEPT_BYTES // limits.frame_size_bytes))
    buffers = FrameBuffers(limits.frame_size_bytes, kept)
    port = DataPort(buffers, connections_max=2 * limits.transfers_max)
    if data_listen != "off" and (data_listen or not listen.startswith("unix:")):
        host = (data_listen or listen).rpartition(":")[0].strip("[]")
        number = int(data_listen.rpartition(":")[2]) if data_listen else 0
        await port.start(host, number, tell_host=bool(data_listen))
    if config.server.shared_memory:
        port.start_unix()
    return port


def _open_tree_blocking(config: StoreConfig) -> _Tree:
    """The store on a root that was just written to, and this server's claim on it."""
    if not config.root:
        raise InvalidRequest("store.root is not set: pass --root DIR or set it in the config")
    fs = PosixFileSystem()
    root = os.path.abspath(config.root)
    # Names need not be secret, only different: seeded from the system once.
    random = Random(os.urandom(16))
    owner = Owner(fs, root, random, lease_s=config.owner_lease_s)
    try:
        owner.claim_blocking()
        store = ChunkStore(
            fs,
            root,
            open_files_max=_raise_file_limit(config.open_files_max),
            survives_power_loss=config.durability == "power",
            names=TempNames(owner.tag, random),
            known=KnownChunks(
                chunks_max=config.known_chunks_max, ttl_s=config.known_ttl_s, clock=time.monotonic
            ),
        )
        store.check_root_blocking()
        return _Tree(store, owner, fs.kind(root))
    except KvserveError as error:
        raise InvalidRequest(
            f"the root {root} cannot be used by uid {os.getuid()}: {error}"
        ) from error


def _raise_file_limit(open_files_max: int) -> int:
    """Lifts the soft limit on descriptors as far as needed and allowed; returns what is usable."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = open_files_max + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    usable = open_files_max if soft == resource.RLIM_INFINITY else min(open_files_max, soft)
    if usable + _OTHER_FILES > soft != resource.RLIM_INFINITY:
        usable = max(16, soft - _OTHER_FILES)
        log.warning("store.open_files_max is %d here: RLIMIT_NOFILE allows %d", usable, soft)
    return usable
