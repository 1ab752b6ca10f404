"""The bare loop that the nixl plane is held against: `python -m kvserve.bench.nixl_ceiling_server`.

What a few lines of Python do with the same files and NIXL: `preadv` a frame's slices into a slot of
registered memory, write it into the client's memory, and go on with the next slot meanwhile. One
notification a layer, once its writes have ended. The descriptors of all slots and frames are
prepared when the client comes; after that each line of it is a run. No head, no checksum, no event
loop. Without files it writes the same bytes all the time.
"""

import ctypes
import json
import mmap
import os
import secrets
import socket
import threading
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from kvserve.bench.child import answer_parent, run_child
from kvserve.bench.tcp_ceiling_server import Opening
from kvserve.errors import ServerUnavailable
from kvserve.nixl_agent import load_nixl

SLOTS = 4
"""Frames in flight: as many as kvserve has of one fetch."""


READY = b"ready\n"
_END_S = 2.0


@dataclass(frozen=True)
class Target:
    """The client's first line, JSON: its memory, how that is reached, and what to write there."""

    metadata: str
    address: int
    opening: Opening

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Target":
        found = json.loads(line)
        return cls(found["metadata"], found["address"], Opening(**found["opening"]))


def bare_agent() -> Any:
    """NIXL's own, for one thread."""
    nixl = load_nixl()
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return nixl.nixl_agent(f"bench-{secrets.token_hex(8)}", config)


class _Writes:
    """Slots, and the frames of one client, prepared for writes from the former to the latter."""

    def __init__(self, target: Target) -> None:
        self._agent = agent = bare_agent()
        self._remote = agent.add_remote_agent(bytes.fromhex(target.metadata))
        opening = target.opening
        size = opening.slice_size_bytes
        frame_size = opening.slices_a_frame * size
        self._staging = mmap.mmap(-1, SLOTS * frame_size)
        self._staging[:] = os.urandom(frame_size) * SLOTS
        here = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
        agent.register_memory([(here, SLOTS * frame_size, 0, "")], "DRAM", ["UCX"])
        view = memoryview(self._staging)
        self.slots = [
            [view[at + start : at + start + size] for start in range(0, frame_size, size)]
            for at in range(0, SLOTS * frame_size, frame_size)
        ]
        # A layer's last frame may have fewer slices than the others: two lengths of each slot.
        frames = range(0, opening.chunk_count, opening.slices_a_frame)
        counts = [min(opening.slices_a_frame, opening.chunk_count - it) for it in frames]
        layer_size = opening.chunk_count * size
        self._here = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT",
            [
                (here + slot * frame_size, count * size, 0)
                for slot in range(SLOTS)
                for count in (counts[0], counts[-1])
            ],
            "DRAM",
        )
        self._there = agent.prep_xfer_dlist(
            self._remote,
            [
                (target.address + layer * layer_size + first * size, count * size, 0)
                for layer in range(len(opening.offsets))
                for first, count in zip(frames, counts, strict=True)
            ],
            "DRAM",
        )

    def start(self, slot: int, frame: int, *, is_last: bool) -> Any:
        handle = self._agent.make_prepped_xfer(
            "WRITE", self._here, [2 * slot + is_last], self._there, [frame]
        )
        self._agent.transfer(handle)
        return handle

    def end(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            os.sched_yield()
        handle.release()
        if state != "DONE":
            raise ServerUnavailable("a bare write over NIXL failed")

    def notify(self) -> None:
        self._agent.send_notif(self._remote, b"layer")


def _serve_blocking(client: socket.socket) -> None:
    # A client may leave in the middle of a payload.
    with suppress(ConnectionError), client, client.makefile("rb") as lines, ExitStack() as files:
        target = Target.decode(lines.readline())
        fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in target.opening.paths]
        for fd in fds:
            files.callback(os.close, fd)
        writes = _Writes(target)
        client.sendall(READY)
        for _ in lines:
            _write_blocking(writes, target.opening, fds)


def _write_blocking(writes: _Writes, opening: Opening, fds: list[int]) -> None:
    # In flight, oldest first, with whether it is the last of its layer.
    started: deque[tuple[Any, bool]] = deque()

    def end_oldest() -> None:
        handle, is_last = started.popleft()
        writes.end(handle)
        if is_last:
            writes.notify()

    frame = 0
    for offset in opening.offsets:
        for first in range(0, opening.chunk_count, opening.slices_a_frame):
            if len(started) == SLOTS:
                end_oldest()
            slot = frame % SLOTS
            of_frame = fds[first : first + opening.slices_a_frame]
            for fd, target in zip(of_frame, writes.slots[slot], strict=False):
                os.preadv(fd, (target,), offset)
            is_last = first + opening.slices_a_frame >= opening.chunk_count
            started.append((writes.start(slot, frame, is_last=is_last), is_last))
            frame += 1
    while started:
        end_oldest()


def _accept_blocking(listener: socket.socket, serving: list[threading.Thread]) -> None:
    while True:
        client, _ = listener.accept()
        serving.append(threading.Thread(target=_serve_blocking, args=(client,), daemon=True))
        serving[-1].start()


async def _serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    serving: list[threading.Thread] = []
    threading.Thread(target=_accept_blocking, args=(listener, serving), daemon=True).start()
    await answer_parent({"port": listener.getsockname()[1]})
    # The client has gone. An agent that outlives the interpreter would take the process down.
    for thread in serving:
        thread.join(_END_S)


if __name__ == "__main__":
    run_child(_serve())
