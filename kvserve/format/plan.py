"""Which bytes travel together: the frames of one layer, in order. Pure.

A frame holds whole slices of consecutive chunks up to about 1 MiB, or, where one slice is larger
than that, a piece of it. Frames of that size stay in the CPU's cache between the read, the checksum
and the send; on gRPC they travel nearly twice as fast as 4 MiB ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvserve.model import Span

SLICES_A_FRAME_MAX: Final = 256
"""Each slice costs the loop some microseconds, whatever its size."""


@dataclass(frozen=True, slots=True)
class FramePlan:
    """`chunk_count` whole slices from `first_chunk` on, or `span` of one slice.

    `span` counts from the start of a slice; it is the whole slice unless `chunk_count` is 1 and the
    slice is larger than a frame.
    """

    layer_index: int
    first_chunk: int
    chunk_count: int
    span: Span
    ends_slice: bool

    @property
    def payload_size_bytes(self) -> int:
        return self.chunk_count * self.span.size_bytes


def runs(chunk_indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups ascending indexes into (first, count) of neighbours."""
    first = previous = None
    for index in chunk_indexes:
        if first is None or previous is None:
            first = index
        elif index != previous + 1:
            yield first, previous - first + 1
            first = index
        previous = index
    if first is not None and previous is not None:
        yield first, previous - first + 1


def plan_layer(
    layer_index: int, slice_size_bytes: int, chunk_indexes: Sequence[int], *, frame_size_bytes: int
) -> Iterator[FramePlan]:
    """The frames that carry one layer of the given chunks (ascending indexes)."""
    per_frame = min(frame_size_bytes // slice_size_bytes, SLICES_A_FRAME_MAX)
    for first, count in runs(chunk_indexes):
        if per_frame:
            whole = Span(0, slice_size_bytes)
            for at in range(first, first + count, per_frame):
                fits = min(per_frame, first + count - at)
                yield FramePlan(layer_index, at, fits, whole, ends_slice=True)
            continue
        for chunk_index in range(first, first + count):
            for start in range(0, slice_size_bytes, frame_size_bytes):
                stop = min(start + frame_size_bytes, slice_size_bytes)
                yield FramePlan(
                    layer_index, chunk_index, 1, Span(start, stop), stop == slice_size_bytes
                )
