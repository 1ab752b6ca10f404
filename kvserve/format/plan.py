"""Which bytes travel together: the frames of one layer, in order. Pure.

A frame holds whole slices of consecutive chunks up to about 1 MiB, or, where one slice is larger
than that, a piece of it. Frames of that size stay in the CPU's cache between the read, the checksum
and the send; on gRPC they travel nearly twice as fast as 4 MiB ones.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
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


def leave_out(of_runs: list[tuple[int, int]], chunk_index: int) -> None:
    """Takes one chunk out of the run that holds it."""
    at = bisect_right(of_runs, chunk_index, key=itemgetter(0)) - 1
    first, count = of_runs[at]
    after = chunk_index + 1
    parts = [(first, chunk_index - first), (after, first + count - after)]
    of_runs[at : at + 1] = [run for run in parts if run[1]]


def plan_layer(
    layer_index: int, slice_size_bytes: int, chunk_indexes: Sequence[int], *, frame_size_bytes: int
) -> Iterator[FramePlan]:
    """The frames that carry one layer of the given chunks (ascending indexes)."""
    return plan_runs(
        layer_index, slice_size_bytes, runs(chunk_indexes), frame_size_bytes=frame_size_bytes
    )


def plan_runs(
    layer_index: int,
    slice_size_bytes: int,
    of_runs: Iterable[tuple[int, int]],
    *,
    frame_size_bytes: int,
) -> Iterator[FramePlan]:
    """The same for chunks that are grouped into runs already."""
    per_frame = min(frame_size_bytes // slice_size_bytes, SLICES_A_FRAME_MAX)
    for first, count in of_runs:
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
