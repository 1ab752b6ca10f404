"""Reads a server's metrics, as Prometheus does, over HTTP."""

import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0


class MetricsPage:
    """Of a server process that is started with `setting`; the port is free now."""

    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{found.getsockname()[1]}"

    @property
    def setting(self) -> str:
        return f'server.metrics_listen="{self._address}"'

    def value_blocking(self, name: str) -> float:
        """The sum over the labels; `name` without `_total`."""
        with urllib.request.urlopen(f"http://{self._address}/metrics", timeout=_TIMEOUT_S) as page:
            text: bytes = page.read()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text.decode())
            if family.name == name
            for sample in family.samples
            if not sample.name.endswith("_created")
        )
