"""What the pumps need of a way to move bytes; one file per plane implements it."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from kvserve.format.frames import FrameHeader
from kvserve.model import ChunkStatus, Verdict

IncomingFrame = tuple[FrameHeader, memoryview, Callable[[], None]]
"""Header, payload, and what to call on the loop when nobody reads the payload any more: a plane
that receives into memory of its own uses it again. A store that ends early just drops its frames.
"""


class OutgoingFrame(Protocol):
    """A frame under construction. `payload` is writable until the frame is sent.

    `is_in_place`: `payload` is the receiver's own memory: to be written by the event loop only, and
    only while the transfer goes on.
    """

    payload: memoryview

    @property
    def is_in_place(self) -> bool: ...


class FetchPlane(Protocol):
    """One open fetch on the server's side of a plane."""

    async def head(self, verdicts: list[Verdict]) -> None:
        """Tells the client which chunks come, before any payload."""

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> OutgoingFrame:
        """Memory for a frame; file reads land in `payload` directly."""

    async def send(self, frame: OutgoingFrame) -> None:
        """Ships a filled frame; returns when the plane takes the next one (back pressure).

        The frame is the plane's from here on. One that is never sent is just dropped.
        """

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        """Tells the client that a chunk turned out bad and has no more frames."""


class StorePlane(Protocol):
    """One open store on the server's side of a plane."""

    async def needs(self, statuses: list[ChunkStatus]) -> None:
        """Tells the client which chunks to send."""

    def frames(self) -> AsyncIterator[IncomingFrame]:
        """The client's frames in order; ends when the client says so or is gone."""

    @property
    def is_finished(self) -> bool:
        """After `frames` has ended: the client said that it has sent everything."""

    async def layer_stored(self, layer_index: int) -> None:
        """Tells the client that every byte of a layer has been written."""

    async def result(self, verdicts: list[Verdict]) -> None:
        """Tells the client how every chunk ended."""
