"""One of several server processes behind an address: `python -m kvserve.rpc.worker_process INDEX`.

Started by `workers.py` only. Standard input brings the settings, one line of JSON, and stays open
for as long as the parent lives: its end is the parent's, and then this process is gone at once,
like a server that is killed. What goes back on standard output is one line of JSON: where it
listens, or why it does not.
"""

import json
import logging
import os
import signal
import sys
import threading
from typing import TextIO

import uvloop

from kvserve.config import Config
from kvserve.errors import KvserveError
from kvserve.rpc.server import Server, serve


def main() -> None:
    # Ctrl-C reaches the whole group; the parent says when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed is no answer
    settings = sys.stdin.buffer.readline()
    if not settings:
        sys.exit(1)  # the parent has ended already
    threading.Thread(target=_end_with_parent_blocking, name="parent", daemon=True).start()
    config = Config.model_validate_json(settings)
    logging.basicConfig(
        level=config.server.log_level.upper(),
        format=f"%(asctime)s worker {sys.argv[1]} %(levelname)s %(name)s: %(message)s",
    )

    def started(server: Server) -> None:
        _say(answer, {"address": server.address, "metrics_address": server.metrics_address})

    try:
        uvloop.run(serve(config, started=started, signals=(signal.SIGTERM,)))
    except KvserveError as error:
        _say(answer, {"error": type(error).__name__, "message": str(error)})
        sys.exit(1)


def _say(answer: TextIO, message: dict[str, str]) -> None:
    answer.write(json.dumps(message) + "\n")
    answer.flush()


def _end_with_parent_blocking() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
