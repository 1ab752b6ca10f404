"""The bare loop that the shm plane is held against: `python -m kvserve.bench.shm_ceiling_server`.

The client passes a memfd over a Unix socket; from then on the server reads each frame's slices from
the files straight to their place in that memory and says so with one number. No checksum (what lies
there may be written by the client too), no event loop, one client.
"""

import json
import mmap
import os
import secrets
import socket
import struct
import threading
from contextlib import ExitStack

from kvserve.bench.child import answer_parent, run_child
from kvserve.bench.tcp_ceiling_server import Opening

EVENT = struct.Struct("<I")
"""How many more slices lie in the client's memory: one for each frame."""
MEMORY_SIZE = struct.Struct("<Q")
"""Comes with the memfd."""


def _serve_blocking(client: socket.socket) -> None:
    with client, ExitStack() as files:
        size, passed, _, _ = socket.recv_fds(client, MEMORY_SIZE.size, 1)
        (memory_fd,) = passed
        memory = mmap.mmap(memory_fd, *MEMORY_SIZE.unpack(size))
        os.close(memory_fd)
        region = memoryview(memory)
        fds: dict[str, int] = {}
        for line in files.enter_context(client.makefile("rb")):
            opening = Opening(**json.loads(line))
            for path in opening.paths:
                if path not in fds:
                    fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    files.callback(os.close, fds[path])
            _read_blocking(client, opening, [fds[path] for path in opening.paths], region)


def _read_blocking(
    client: socket.socket, opening: Opening, fds: list[int], region: memoryview
) -> None:
    size, at = opening.slice_size_bytes, 0
    for offset in opening.offsets:
        for first in range(0, opening.chunk_count, opening.slices_a_frame):
            of_frame = fds[first : first + opening.slices_a_frame]
            for fd in of_frame:
                os.preadv(fd, (region[at : at + size],), offset)
                at += size
            client.sendall(EVENT.pack(len(of_frame)))


def _accept_blocking(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_serve_blocking, args=(client,), daemon=True).start()


async def _serve() -> None:
    name = f"kvserve-bench-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    threading.Thread(target=_accept_blocking, args=(listener,), daemon=True).start()
    await answer_parent({"name": name})


if __name__ == "__main__":
    run_child(_serve())
