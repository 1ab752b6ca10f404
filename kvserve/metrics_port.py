"""The port that the metrics are read from: HTTP, a thread for each connection, few of them.

Whoever connects and says nothing holds a thread: at most `_CONNECTIONS_MAX` do, each for at most
`_CONNECTION_S` and no longer than there is room, so that a scrape gets through all the same.
"""

import logging
import sys
import threading
import time
from contextlib import suppress
from socket import AI_PASSIVE, SHUT_RDWR, SOCK_STREAM, getaddrinfo, socket
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

log = logging.getLogger(__name__)

_CONNECTIONS_MAX = 16
_CONNECTION_S = 10.0
_WAIT_S = 1.0
"""How long a connection that is ended to make room may take to let go of its thread."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class MetricsPort(ThreadingMixIn, WSGIServer):
    """Serves from its construction until `close_blocking`, on daemon threads.

    Raises `OSError` if the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    # Few let a burst of connections wait for a second: that is when TCP tries again.
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family, _, _, _, found = getaddrinfo(
            host, port, type=SOCK_STREAM, flags=AI_PASSIVE
        )[0]
        self._places = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._lock = threading.Lock()
        # When each connection came, the oldest first.
        self._open: dict[socket, float] = {}
        super().__init__((str(found[0]), port), _Handler)
        self.set_app(make_wsgi_app(registry))
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def __repr__(self) -> str:
        return f"<MetricsPort {self.server_port}, {len(self._open)} connections>"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) == _CONNECTIONS_MAX:
                _end(next(iter(self._open)))
        if not self._places.acquire(timeout=_WAIT_S):
            log.warning("%d connections to the metrics: one more is refused", _CONNECTIONS_MAX)
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread: whoever called this closes the connection
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def service_actions(self) -> None:
        """Called twice a second: ends the connections that have taken too long."""
        before = time.monotonic() - _CONNECTION_S
        with self._lock:
            for request in [it for it, came in self._open.items() if came < before]:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection to the metrics failed: %r", sys.exception())

    def _ended(self, request: socket) -> None:
        with self._lock:
            del self._open[request]
        self._places.release()

    def close_blocking(self) -> None:
        self.shutdown()
        self.server_close()
        with self._lock:
            for request in self._open:
                _end(request)


def _end(request: socket) -> None:
    """Its thread reads the end, or can write no more, and closes it."""
    with suppress(OSError):  # the other side was faster
        request.shutdown(SHUT_RDWR)
