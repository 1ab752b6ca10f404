"""Staging memory: what lies between the file system and the planes, one bounded pool per server.

Theory of operation. Every transfer has a share. A fetch waits, with nothing in hand, for the memory
of one frame; once it has that it always goes on. More than one frame is never waited for:
`room_bytes` says how much a share may take at once, for reads that are wider or further ahead. At
most half of the pool is given away like that, in equal parts to the open fetches, and nothing of it
while anybody waits for a first frame. So a client that does not read holds its part, and nobody
else up.

Loads are ahead of stores: a store may always hold the one frame that it has just received (it is in
memory, whether it is counted or not), but further ones only out of a smaller part, and none while a
fetch waits.

A call that hangs keeps the memory it may still write to. That counts as given away until the call
comes back; it is never used for anything else.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Final, Self

from kvserve.format.read_plan import staged_size_bytes

_WIDE_PART: Final = 2
# Of what is given away beyond first frames: one part in so many may be held by stores.
_STORES_PART: Final = 4
_KEPT_SIZE_BYTES_MAX: Final = 64 << 20


class Staging:
    """Counts bytes, and keeps buffers for the planes that receive and send with them.

    Attributes:
        used_bytes: what all shares hold; `used_bytes_max` is the most it has been.
    """

    def __init__(self, size_bytes: int, frame_size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.frame_size_bytes = frame_size_bytes
        self.used_bytes = 0
        self.used_bytes_max = 0
        self._first_bytes = staged_size_bytes(frame_size_bytes)
        self._wide_bytes = 0
        self._wide_bytes_max = size_bytes // _WIDE_PART
        self._wide_by_stores_bytes = 0
        self._loads = 0
        self._stores = 0
        self._hung_bytes = 0
        # Filled by any thread: a deque's ends are safe for that.
        self._came_back: deque[int] = deque()
        self._waiting: deque[tuple[Share, int, asyncio.Future[None]]] = deque()
        # By size, the one used last on top: it is still in the CPU's cache.
        self._kept: dict[int, list[memoryview]] = {}
        self._kept_bytes = 0

    def __repr__(self) -> str:
        return (
            f"<Staging {self.used_bytes} of {self.size_bytes} bytes, {len(self._waiting)} waiting, "
            f"{self.hung_bytes} hang>"
        )

    @property
    def hung_bytes(self) -> int:
        while self._came_back:
            self._hung_bytes -= self._came_back.popleft()
        return self._hung_bytes

    def load(self) -> "Share":
        """A fetch's share; a context."""
        return Share(self, is_store=False)

    def store(self) -> "Share":
        """A store's share; a context."""
        return Share(self, is_store=True)

    def take(self, payload_size_bytes: int) -> memoryview:
        """A buffer for a frame that is counted already; it may be longer than asked for."""
        size = staged_size_bytes(payload_size_bytes)
        kept = self._kept.get(size)
        if not kept:
            return memoryview(bytearray(size))
        self._kept_bytes -= size
        return kept.pop()

    def give(self, buffer: memoryview) -> None:
        """It may be used again. What was taken and is not given back is simply gone."""
        size = len(buffer)
        if self._kept_bytes + size <= _KEPT_SIZE_BYTES_MAX:
            self._kept.setdefault(size, []).append(buffer)
            self._kept_bytes += size
            self._drop_kept()

    def _drop_kept(self) -> None:
        """Buffers nobody uses give way to those in use: together they are within the bound."""
        if self.used_bytes + self._kept_bytes <= self.size_bytes:
            return
        for kept in self._kept.values():
            while kept and self.used_bytes + self._kept_bytes > self.size_bytes:
                self._kept_bytes -= len(kept.pop())

    def _add(self, share: "Share", size_bytes: int) -> None:
        wide = -max(0, share.held_bytes - self._first_bytes)
        share.held_bytes += size_bytes
        wide += max(0, share.held_bytes - self._first_bytes)
        self._wide_bytes += wide
        if share.is_store:
            self._wide_by_stores_bytes += wide
        self.used_bytes += size_bytes
        if size_bytes > 0:
            self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
            self._drop_kept()
        else:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            share, size_bytes, turn = self._waiting[0]
            if not turn.done():
                if self.used_bytes + size_bytes > max(self.size_bytes, size_bytes):
                    return
                self._waiting.popleft()
                self._add(share, size_bytes)
                turn.set_result(None)
            else:
                self._waiting.popleft()

    def _most_of(self, share: "Share") -> int:
        if share.is_store:
            return self._wide_bytes_max // _STORES_PART // self._stores
        return self._wide_bytes_max // self._loads

    def _wide_left(self, share: "Share") -> int:
        left = self._wide_bytes_max - self._wide_bytes - self.hung_bytes
        if share.is_store:
            stores_left = self._wide_bytes_max // _STORES_PART - self._wide_by_stores_bytes
            return min(left, stores_left)
        return left


class Share:
    """What one transfer holds; as a context it gives everything back at its end."""

    def __init__(self, staging: Staging, *, is_store: bool) -> None:
        self._staging = staging
        self.is_store = is_store
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<Share {self.held_bytes} bytes of {self._staging!r}>"

    def __enter__(self) -> Self:
        if self.is_store:
            self._staging._stores += 1
        else:
            self._staging._loads += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_store:
            self._staging._stores -= 1
        else:
            self._staging._loads -= 1
        self._staging._add(self, -self.held_bytes)

    @property
    def most_bytes(self) -> int:
        """What it may hold at present, if nobody holds more than that."""
        return self._staging._first_bytes + self._staging._most_of(self)

    @property
    def room_bytes(self) -> int:
        """What it may take at once."""
        staging = self._staging
        if staging._waiting:
            return 0
        to_first = max(0, staging._first_bytes - self.held_bytes)
        left = min(
            self.most_bytes - self.held_bytes,
            staging._wide_left(self) + to_first,
            staging.size_bytes - staging.used_bytes,
        )
        return max(0, left)

    async def take_first(self, size_bytes: int) -> None:
        """Waits for the memory of one frame; for a share that holds nothing.

        Who holds something and waited for more could wait for others who do the same.
        """
        assert not self.held_bytes, "waits for memory with memory in hand"
        staging = self._staging
        if not staging._waiting and staging.used_bytes + size_bytes <= staging.size_bytes:
            staging._add(self, size_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        staging._waiting.append((self, size_bytes, turn))
        staging._serve()
        try:
            await turn
        except asyncio.CancelledError:
            staging._serve()  # those behind it need not wait for it
            raise

    def take(self, size_bytes: int) -> None:
        """Counts in what there is `room_bytes` for, or what is in memory anyway."""
        self._staging._add(self, size_bytes)

    def give(self, size_bytes: int) -> None:
        """Counts out."""
        self._staging._add(self, -size_bytes)

    def hangs(self, size_bytes: int) -> None:
        """So much of what is held belongs to a call that hangs, until `came_back`."""
        self._staging._hung_bytes += size_bytes
        self._staging._add(self, -size_bytes)

    def came_back(self, size_bytes: int) -> None:
        """For the thread of the call."""
        self._staging._came_back.append(size_bytes)
