"""Several server processes behind one address: `kvserve serve --workers N`.

Theory of operation. The parent serves nothing. It holds the port, starts N whole servers on the
same tree (`worker_process.py`), and each of them listens on that port: the kernel gives every
connection to one of them, which keeps it. They know of each other what servers of one tree always
do (`store/owners.py`, `store/exchange.py`), and nothing through the parent.

A worker that ends is started again, after a pause that doubles; one that ends again and again soon
after its start ends all. The first worker starts alone, so that what is wrong with the settings or
the root is said once. Workers end with the parent, also if it is killed.
"""

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvserve.config import Config
from kvserve.errors import InvalidRequest, KvserveError, ServerFault
from kvserve.rpc.listening import why_not_bound

log = logging.getLogger(__name__)

Started = Callable[[str, Sequence[str]], None]
"""Is told the address and where metrics are, once all workers answer."""

_START_TIMEOUT_S = 90.0
"""Longer than a server waits for its root."""
_STOP_EXTRA_S = 15.0
"""Beyond `server.drain_timeout_s`: transfers that were cut off clean up, files are closed."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """When a worker is started again. It ran well if it lived for `steady_s`; the pause before a
    start doubles from `pause_s` on with each end before that, and `ends_max` of them in a row are
    enough."""

    pause_s: float = 0.25
    ends_max: int = 5
    steady_s: float = 30.0


async def serve_workers(
    config: Config, *, started: Started, restarts: Restarts | None = None
) -> None:
    """Runs `config.server.workers` servers until SIGTERM or SIGINT; `started`: all answer.

    Raises:
        InvalidRequest: what the first server says about its settings, root or address.
        ServerFault: a worker ended too often soon after its start, or had to be killed at the end.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    with held_port_blocking(config.server.listen) as address:
        workers = [
            Worker(index, worker_config(config, index, address))
            for index in range(config.server.workers)
        ]
        serving = loop.create_task(_serve(workers, address, started, restarts or Restarts()))
        stop = loop.create_task(stopping.wait())
        try:
            await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            serving.cancel()
            await asyncio.wait((serving, stop))
            faults = await _stop(workers, config.server.drain_timeout_s)
    if not serving.cancelled():
        await serving  # raises what ended it
    if faults:
        raise ServerFault("; ".join(faults))


async def _serve(
    workers: Sequence["Worker"], address: str, started: Started, restarts: Restarts
) -> None:
    await workers[0].start()
    await _all(worker.start() for worker in workers[1:])
    for worker in workers:
        log.info("%r answers", worker)
    started(address, [it.metrics_address for it in workers if it.metrics_address])
    await _all(worker.keep_running(restarts) for worker in workers)


async def _all(works: Iterator[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; the first error ends the others and is raised, as it is."""
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _stop(workers: Sequence["Worker"], drain_timeout_s: float) -> list[str]:
    """Ends all; what went wrong with it."""
    ends = await asyncio.gather(*(it.stop(drain_timeout_s + _STOP_EXTRA_S) for it in workers))
    return [end for end in ends if end]


class Worker:
    """One server process. `metrics_address`: empty if there are none."""

    def __init__(self, index: int, config: Config) -> None:
        self._index = index
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self.metrics_address = ""

    def __repr__(self) -> str:
        return f"worker {self._index} (pid {self._process.pid if self._process else 0})"

    async def start(self) -> None:
        """Returns once it answers.

        Raises:
            InvalidRequest: what it says about its settings, root or addresses.
            ServerFault: it ended or did not answer in time.
        """
        self._started_at = monotonic()
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvserve.rpc.worker_process", str(self._index)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._config.model_dump_json().encode() + b"\n")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise ServerFault(f"{self!r} did not answer within {_START_TIMEOUT_S:g} s") from None
        if not line:
            status = await process.wait()
            raise ServerFault(f"{self!r} ended with status {status} before it answered")
        answer = json.loads(line)
        if "error" in answer:
            await process.wait()
            if answer["error"] == InvalidRequest.__name__:
                raise InvalidRequest(answer["message"])
            raise ServerFault(f"{self!r}: {answer['error']}: {answer['message']}")
        self.metrics_address = answer["metrics_address"]

    async def keep_running(self, restarts: Restarts) -> None:
        """Starts it again whenever it ends, until it ends too often.

        Raises:
            ServerFault: that; the message has the last end.
        """
        early = 0
        end = await self._ended()
        while True:
            is_early = monotonic() - self._started_at < restarts.steady_s
            early = early + 1 if is_early else 1
            if early >= restarts.ends_max:
                raise ServerFault(f"{end}: {early} ends soon after a start, in a row")
            pause_s = restarts.pause_s * 2 ** (early - 1)
            log.error("%s; it is started again in %g s", end, pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except KvserveError as error:
                end = str(error)
            else:
                log.info("%r answers", self)
                end = await self._ended()

    async def _ended(self) -> str:
        assert self._process is not None, "not started"
        return f"{self!r} ended with status {await self._process.wait()}"

    async def stop(self, timeout_s: float) -> str:
        """SIGTERM, SIGKILL if it takes too long; what went wrong, or nothing."""
        process = self._process
        if process is None or process.returncode is not None:
            return ""
        process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"{self!r} did not stop within {timeout_s:g} s and was killed"
        # One that was still starting dies of the signal.
        return "" if status in (0, -signal.SIGTERM) else f"{self!r} ended with status {status}"


def worker_config(config: Config, index: int, address: str) -> Config:
    """The settings of one worker: it listens on `address` and on ports of its own, `index` above
    those that are set."""
    server = config.server
    own = {
        "listen": address,
        "data_listen": _port_above(server.data_listen, index),
        "metrics_listen": _port_above(server.metrics_listen, index),
    }
    return config.model_copy(update={"server": server.model_copy(update=own)})


def _port_above(listen: str, index: int) -> str:
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdecimal() and int(port) else listen


@contextmanager
def held_port_blocking(listen: str) -> Iterator[str]:
    """The address with its port, which nobody outside can take meanwhile: processes of this user
    can, if they ask to share it as the workers do.

    Raises:
        InvalidRequest: somebody listens there, or it is no address of this host.
    """
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Sharing is agreed on by asking for it: other servers that share this port would be joined.
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        why = why_not_bound(listen) or str(error)
        raise InvalidRequest(f"cannot listen on {listen} (server.listen): {why}") from error
    with held:
        yield f"{host}:{held.getsockname()[1]}"
