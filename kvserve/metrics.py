"""What a server counts, for Prometheus, at `http://HOST:PORT/metrics` (`server.metrics_listen`).

Names and meanings are in docs/operations.md; a test compares.
"""

import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvserve.errors import InvalidRequest, KvserveError
from kvserve.metrics_port import MetricsPort
from kvserve.model import ChunkStatus, Verdict
from kvserve.open_tree import OpenTree
from kvserve.policy.quota import Amount


class Metrics:
    """One server's registry. Safe from any thread; counting does no I/O."""

    def __init__(self, tree: OpenTree) -> None:
        self.registry = CollectorRegistry()
        self._chunks = Counter(
            "kvserve_chunks",
            "Chunks answered, by call and status; the MISS_ statuses are the reasons of misses.",
            ("call", "status"),
            registry=self.registry,
        )
        self._evicted_files = Counter(
            "kvserve_evicted_chunks", "Chunks evicted by this server.", registry=self.registry
        )
        self._evicted_bytes = Counter(
            "kvserve_evicted_bytes", "Their bytes.", registry=self.registry
        )
        self._eviction_failures = Counter(
            "kvserve_eviction_failures",
            "Files that could not be deleted when it was their turn.",
            registry=self.registry,
        )
        self.registry.register(_TreeGauges(tree))
        self._port: MetricsPort | None = None

    def answered(self, call: str, verdicts: Sequence[Verdict]) -> None:
        """A call has told its client how its chunks ended."""
        self.count(call, Tally(verdict.status for verdict in verdicts))

    def count(self, call: str, statuses: "Tally[ChunkStatus]") -> None:
        for status, chunks in statuses.items():
            self._chunks.labels(call, status.name).inc(chunks)

    def evicted(self, amount: Amount, failed: int) -> None:
        self._evicted_files.inc(amount.files)
        self._evicted_bytes.inc(amount.size_bytes)
        self._eviction_failures.inc(failed)

    def listen_blocking(self, listen: str) -> str:
        """Serves the registry on threads of its own; returns the bound HOST:PORT.

        Raises:
            InvalidRequest: the address cannot be bound.
        """
        host, _, port = listen.rpartition(":")
        # When each counter was made: as many series again, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        try:
            self._port = MetricsPort(host.strip("[]"), int(port), self.registry)
        except OSError as error:
            raise InvalidRequest(
                f"cannot serve metrics on {listen} (server.metrics_listen): {error}"
            ) from error
        return f"{host}:{self._port.server_port}"

    def close_blocking(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close_blocking()


_ANSWER_WAIT_S = 1.0


class _AskedOfTheTree:
    """An answer that takes file calls. They must not hold up the metrics, least of all where the
    mount hangs: one thread asks, and the answer is None while it has none."""

    def __init__(self, ask_blocking: Callable[[], bool]) -> None:
        self._ask_blocking = ask_blocking
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._answer: bool | None = None

    def answer_blocking(self) -> bool | None:
        with self._lock:
            if self._asking is None or not self._asking.is_alive():
                self._answer = None
                self._asking = threading.Thread(target=self._ask, name="metrics-tree", daemon=True)
                self._asking.start()
            asking = self._asking
        asking.join(_ANSWER_WAIT_S)
        return self._answer

    def _ask(self) -> None:
        try:
            self._answer = self._ask_blocking()
        except KvserveError:
            self._answer = None  # the upkeep's own try is in the log


class _TreeGauges(Collector):
    """Read when they are asked for."""

    def __init__(self, tree: OpenTree) -> None:
        self._tree = tree
        self._steward = _AskedOfTheTree(tree.owner.is_first_blocking)

    def collect(self) -> Iterator[Metric]:
        tree = self._tree
        size = GaugeMetricFamily(
            "kvserve_stored_bytes",
            "Chunk files on the tree, those being written included, by tenant.",
            labels=["tenant"],
        )
        files = GaugeMetricFamily("kvserve_stored_chunks", "The same in chunks.", labels=["tenant"])
        for tenant, amount in sorted(tree.ledger.usage().items()):
            size.add_metric([tenant], amount.size_bytes)
            files.add_metric([tenant], amount.files)
        yield size
        yield files
        yield from self._limits()
        steward = GaugeMetricFamily(
            "kvserve_is_steward", "1: this server counts and evicts for its tree, else 0."
        )
        if (is_first := self._steward.answer_blocking()) is not None:
            steward.add_metric([], int(is_first))
        yield steward
        for name, text, value in (
            ("kvserve_leased_chunks", "Chunks leased now.", tree.exchange.leases.chunks),
            ("kvserve_open_files", "Chunk files open now.", tree.store.open_chunks.taken),
            (
                "kvserve_quarantined_chunks",
                "Damaged files set aside since the start.",
                tree.quarantine.taken,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _limits(self) -> Iterator[Metric]:
        """Only those that are set: a limit of 0 would be read as one."""
        quotas = self._tree.ledger.quotas
        for name, text, value in (
            ("kvserve_cap_bytes", "capacity.size_bytes_max, if set.", quotas.total.size_bytes),
            ("kvserve_cap_chunks", "capacity.files_max, if set.", quotas.total.files),
        ):
            cap = GaugeMetricFamily(name, text)
            if value:
                cap.add_metric([], value)
            yield cap
        ceiling = GaugeMetricFamily(
            "kvserve_ceiling_bytes", "A tenant's own limit, if it has one.", labels=["tenant"]
        )
        for tenant in sorted({*quotas.tenants, *self._tree.ledger.usage()}):
            if size_bytes := quotas.of(tenant).ceiling.size_bytes:
                ceiling.add_metric([tenant], size_bytes)
        yield ceiling
