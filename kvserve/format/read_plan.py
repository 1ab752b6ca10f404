"""How a fetch reads what is not in memory: in which order, and how much at once. Pure.

On a parallel file system every read is an RPC, whatever its size. So what a fetch must wait for is
read in steps. The first is the first layer of all chunks: computing can begin. Then come wider and
wider runs of layers (1, 1, 2, 4, 8, ...), so that a model of 80 layers costs each chunk 8 reads
and not 80. Within a step each chunk is one read, as far as its slices lie next to each other in the
file. Memory bounds a step; where not even one layer fits, a step is a part of one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvserve.format.plan import SLICES_A_FRAME_MAX, FramePlan, plan_runs

GAP_SIZE_BYTES_MAX: Final = 4095
"""Slices start on 4096: what lies between neighbours is padding, never a layer nobody wants."""
WORTH_MANY: Final = 8
FRAMES_A_STEP_MAX: Final = 128
"""Each costs the loop some microseconds to make, and one step is made without a break."""
_STAGED_SIZE_BYTES_MIN: Final = 4096


def growing_widths(worth: Callable[[], int] = lambda: 1) -> Iterator[int]:
    """Layers of the steps after one another: 1, 1, 2, 4, 8, ...

    `worth` says how many layers can be read in the time that an RPC takes for itself. Fewer would
    cost round trips and save nothing, so steps are at least as wide from the third on; where it is
    many, from the second on.
    """
    yield 1
    width = worth()
    if width < WORTH_MANY:
        yield 1
        width = max(2, worth())
    while True:
        yield width
        width = max(2 * width, worth())


def staged_size_bytes(payload_size_bytes: int) -> int:
    """The memory that a frame is counted with: the next power of two, so that few sizes of buffers
    serve all frames."""
    return 1 << max(_STAGED_SIZE_BYTES_MIN - 1, payload_size_bytes - 1).bit_length()


class NextStep(NamedTuple):
    """`size_bytes` are at most the budget; `first_chunk` is None if it begins with a layer."""

    size_bytes: int
    first_layer: int
    last_layer: int
    first_chunk: int | None


class ReadPlan:
    """The frames of one fetch in the order they are sent, one by one or by the step.

    `of_runs` may change meanwhile: a layer's frames are made of the runs as they are when its first
    frame is asked for. Sizes are those of staging memory (`staged_size_bytes`).
    """

    def __init__(
        self,
        layers: Sequence[int],
        slice_sizes: Sequence[int],
        of_runs: Sequence[tuple[int, int]],
        *,
        frame_size_bytes: int,
        widths: Iterator[int],
    ) -> None:
        self._layers = deque(layers)
        self._slice_sizes = slice_sizes
        self._runs = of_runs
        self._frame_size_bytes = frame_size_bytes
        self._widths = widths
        self._width: int | None = None
        # What is left of the layer that has begun; its next frame is in `_next`.
        self._frames: Iterator[FramePlan] = iter(())
        self._next: FramePlan | None = None
        self._left_bytes = 0

    def next_frame(self) -> FramePlan | None:
        """The next frame of all, None at the end."""
        if self._next is None and not self._begin_layer():
            return None
        frame = self._next
        assert frame is not None
        self._left_bytes -= staged_size_bytes(frame.payload_size_bytes)
        self._next = next(self._frames, None)
        return frame

    def next_step(self, budget_bytes: int) -> NextStep | None:
        """What the next step would be, its first frame included; None at the end."""
        layers = iter(self._layers)
        if self._next is not None:
            first, chunk = self._next.layer_index, self._next.first_chunk
            size, frames = self._left_bytes, 0
        elif self._layers and self._runs:
            first, chunk = next(layers), None
            size, frames = self._layer_cost(first)
        else:
            return None
        last = first
        for layer_index in islice(layers, self._layers_wanted() - 1):
            more_bytes, more_frames = self._layer_cost(layer_index)
            if size + more_bytes > budget_bytes or frames + more_frames > FRAMES_A_STEP_MAX:
                break
            last, size, frames = layer_index, size + more_bytes, frames + more_frames
        return NextStep(min(size, budget_bytes), first, last, chunk)

    def rest_of_step(self, budget_bytes: int) -> list[FramePlan]:
        """What follows the frame that `next_frame` gave last and belongs to the same step."""
        step: list[FramePlan] = []
        while self._next is not None:
            cost = staged_size_bytes(self._next.payload_size_bytes)
            if cost > budget_bytes or len(step) >= FRAMES_A_STEP_MAX - 1:
                return step
            budget_bytes -= cost
            step.append(self._taken())
        for _ in range(self._layers_wanted() - 1):
            if not self._layers:
                break
            cost, frames = self._layer_cost(self._layers[0])
            if cost > budget_bytes or len(step) + frames >= FRAMES_A_STEP_MAX:
                break
            if not self._begin_layer():
                break
            while self._next is not None:
                budget_bytes -= staged_size_bytes(self._next.payload_size_bytes)
                step.append(self._taken())
        self._width = None
        return step

    def _layers_wanted(self) -> int:
        if self._width is None:
            self._width = next(self._widths)
        return self._width

    def _taken(self) -> FramePlan:
        frame = self.next_frame()
        assert frame is not None
        return frame

    def _begin_layer(self) -> bool:
        if not self._runs or not self._layers:
            return False
        layer_index = self._layers.popleft()
        self._left_bytes, _ = self._layer_cost(layer_index)
        self._frames = plan_runs(
            layer_index,
            self._slice_sizes[layer_index],
            tuple(self._runs),  # as of now: a chunk that turns bad splits its run
            frame_size_bytes=self._frame_size_bytes,
        )
        self._next = next(self._frames)
        return True

    def _layer_cost(self, layer_index: int) -> tuple[int, int]:
        """Bytes and frames of a whole layer; more than one step's, if the runs alone are more."""
        slice_size, frame_size = self._slice_sizes[layer_index], self._frame_size_bytes
        per_frame = min(frame_size // slice_size, SLICES_A_FRAME_MAX)
        if len(self._runs) > FRAMES_A_STEP_MAX:  # not counted one by one, for each step
            return len(self._runs) * staged_size_bytes(frame_size), len(self._runs)
        if not per_frame:
            whole, rest = divmod(slice_size, frame_size)
            chunks = sum(count for _, count in self._runs)
            cost = whole * staged_size_bytes(frame_size) + (staged_size_bytes(rest) if rest else 0)
            return chunks * cost, chunks * (whole + bool(rest))
        cost = frames = 0
        for _, count in self._runs:
            whole, rest = divmod(count, per_frame)
            cost += whole * staged_size_bytes(per_frame * slice_size)
            cost += staged_size_bytes(rest * slice_size) if rest else 0
            frames += whole + bool(rest)
        return cost, frames


def reads(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Puts pieces of one file together into as few reads as there can be.

    `places` are (offset, size). Yields for each read its offset and its pieces in the order they
    lie in the file: how many bytes to skip before it, and the piece's number in `places`.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    read: list[tuple[int, int]] = []
    start = end = 0
    for number in order:
        offset, size = places[number]
        if read and 0 <= offset - end <= GAP_SIZE_BYTES_MAX:
            read.append((offset - end, number))
        else:
            if read:
                yield start, read
            read, start = [(0, number)], offset
        end = offset + size
    if read:
        yield start, read
