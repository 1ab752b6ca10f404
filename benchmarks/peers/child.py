"""One side of a peer: `python -m benchmarks.peers.child MODULE SIDE WORK`, JSON lines both ways.

Runs in the peer's own environment. `WORK` is a JSON object: the unit, the directory, and for the
client what the server said. It says hello once it is ready and answers every line after that:
`begin` and `end` (server), `layers` and `chunks` (client, one fetch), `check layers` and
`check chunks` (client, one fetch into scrubbed memory, compared with the source). It ends when
standard input does. An answer with `error` says what went wrong.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import numpy as np

from benchmarks.peers.peer import Bytes, Peer, Unit


def main() -> None:
    module, side, work = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the benchmark says when it ends
    # Libraries print to standard output as they like; from here on that goes to the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    status = _run(answers, module, side, json.loads(work))
    answers.close()
    sys.stderr.flush()
    # No destructors: some native libraries crash or wait in theirs, long after the work is done.
    os._exit(status)


def _run(answers: TextIO, module: str, side: str, work: dict[str, Any]) -> int:
    peer: Peer | None = None
    try:
        unit = Unit(**work["unit"])
        peer = importlib.import_module(module).PEER(
            unit, Path(work["directory"]), **work["options"]
        )
        assert peer is not None
        if side == "server":
            served = peer.start()
            peer.put()
            _say(answers, served)
            _answer_server(answers, peer)
        else:
            region = np.full(unit.size_bytes, 0xFF, np.uint8)
            peer.connect(work["served"], region.reshape(unit.shape))
            _say(answers, {})
            _answer_client(answers, peer, region.reshape(unit.shape))
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
        return 1
    finally:
        if peer is not None:
            peer.stop()
    return 0


def _answer_server(answers: TextIO, peer: Peer) -> None:
    steps = {"begin": peer.begin, "end": peer.end}
    for line in sys.stdin:
        steps[line.strip()]()
        _say(answers, {})


def _answer_client(answers: TextIO, peer: Peer, region: Bytes) -> None:
    for line in sys.stdin:
        question, _, way = line.strip().rpartition(" ")
        if question == "check":
            region.fill(0)
        timing = _fetch(peer, way)
        if question == "check":
            _compare(region, peer.unit.payload())
        _say(answers, timing)


def _fetch(peer: Peer, way: str) -> dict[str, float]:
    fetch = peer.fetch_layers if way == "layers" else peer.fetch_chunks
    first_layer_s = 0.0

    def mark() -> None:
        nonlocal first_layer_s
        first_layer_s = first_layer_s or perf_counter() - started

    started = perf_counter()
    fetch(mark)
    took_s = perf_counter() - started
    return {"took_s": took_s, "first_layer_s": first_layer_s or took_s}


def _compare(region: Bytes, payload: Bytes) -> None:
    for layer_index, (got, wanted) in enumerate(zip(region, payload, strict=True)):
        if not np.array_equal(got, wanted):
            raise RuntimeError(f"layer {layer_index} is not what was stored")


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
