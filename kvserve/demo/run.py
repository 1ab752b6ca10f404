"""Runs the demo: a server process, then a prefill and a decode process against it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvserve.demo.geometry import descriptor
from kvserve.errors import ServerFault
from kvserve.testing.server_process import ServerProcess

_WORKER_TIMEOUT_S = 120.0

Event = dict[str, Any]


@dataclass(slots=True)
class DemoResult:
    """Times are seconds from the start of each process's transfer; lists are by layer."""

    tokens: int
    chunks: int
    size_bytes: int
    stored_at_s: list[float] = field(default_factory=list)
    fetched_at_s: list[float] = field(default_factory=list)
    is_verified: list[bool] = field(default_factory=list)
    store_requests: int = 0
    fetch_requests: int = 0
    storing_s: float = 0.0
    fetching_s: float = 0.0
    first_layer_s: float = 0.0
    memory_bytes_max: int = 0

    @property
    def is_good(self) -> bool:
        return bool(self.is_verified) and all(self.is_verified)


def run_demo(root: Path, tokens: int, *, seen: Callable[[str, Event], None]) -> DemoResult:
    """Runs all of it under `root`; calls `seen(role, event)` for each event of the workers.

    Raises:
        ServerFault: a process ended without its result; the message has what it said.
    """
    wanted = descriptor(tokens)
    result = DemoResult(tokens, wanted.chunk_count, wanted.payload_size_bytes)
    with ServerProcess(root) as server:
        prefill = _worker("prefill", server.address, tokens, seen)
        decode = _worker("decode", server.address, tokens, seen)
    result.stored_at_s = _times(prefill, "stored")
    result.fetched_at_s = _times(decode, "fetched")
    result.is_verified = [event["matches"] for event in decode if event["event"] == "verified"]
    stored, fetched = prefill[-1], decode[-1]
    result.store_requests, result.fetch_requests = stored["requests"], fetched["requests"]
    result.storing_s, result.fetching_s = stored["storing_s"], fetched["fetching_s"]
    result.first_layer_s = fetched["first_layer_s"]
    result.memory_bytes_max = max(stored["memory_bytes"], fetched["memory_bytes"])
    return result


def _times(events: list[Event], name: str) -> list[float]:
    begun = next(event["at"] for event in events if event["event"] == "started")
    return [event["at"] - begun for event in events if event["event"] == name]


def _worker(
    role: str, address: str, tokens: int, seen: Callable[[str, Event], None]
) -> list[Event]:
    command = [sys.executable, "-m", "kvserve.demo.worker", role, address, str(tokens)]
    events: list[Event] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            seen(role, events[-1])
        process.wait(_WORKER_TIMEOUT_S)
    if not events or events[-1]["event"] != "result":
        said = events[-1].get("message", "") if events else ""
        raise ServerFault(f"the {role} process ended with status {process.returncode}: {said}")
    return events
