"""The bare loop that the tcp plane is held against: `python -m kvserve.bench.tcp_ceiling_server`.

What a few lines of Python do with the same files and a blocking socket: `preadv` a frame's slices
into one buffer, send it, again. No head, no checksum, no event loop, one client. Without files it
sends the same buffer all the time.
"""

import json
import os
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from kvserve.bench.child import answer_parent, run_child


@dataclass(frozen=True)
class Opening:
    """What to send: one line of JSON. Empty `paths`: constant bytes.

    `offsets`: where each layer's slice is in its file.
    """

    chunk_count: int
    slice_size_bytes: int
    slices_a_frame: int
    offsets: list[int]
    paths: list[str]

    def encode(self) -> bytes:
        return json.dumps(self.__dict__).encode() + b"\n"


def _serve_blocking(client: socket.socket) -> None:
    # A client may leave in the middle of a payload.
    with suppress(ConnectionError), client, client.makefile("rb") as lines, ExitStack() as files:
        fds: dict[str, int] = {}
        frame = memoryview(b"")
        for line in lines:
            opening = Opening(**json.loads(line))
            if len(frame) != (size := opening.slices_a_frame * opening.slice_size_bytes):
                frame = memoryview(bytearray(os.urandom(size)))
            for path in opening.paths:
                if path not in fds:
                    fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    files.callback(os.close, fds[path])
            _send_blocking(client, opening, [fds[path] for path in opening.paths], frame)


def _send_blocking(
    client: socket.socket, opening: Opening, fds: list[int], frame: memoryview
) -> None:
    size = opening.slice_size_bytes
    slices = [frame[at : at + size] for at in range(0, len(frame), size)]
    for offset in opening.offsets:
        for first in range(0, opening.chunk_count, opening.slices_a_frame):
            count = min(opening.slices_a_frame, opening.chunk_count - first)
            for fd, target in zip(fds[first : first + count], slices, strict=False):
                os.preadv(fd, (target,), offset)
            client.sendall(frame[: count * size])


def _accept_blocking(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve_blocking, args=(client,), daemon=True).start()


async def _serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept_blocking, args=(listener,), daemon=True).start()
    await answer_parent({"port": listener.getsockname()[1]})


if __name__ == "__main__":
    run_child(_serve())
