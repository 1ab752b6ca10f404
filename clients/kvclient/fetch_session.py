"""The rules of one fetch on the client, without network: frames in, bytes landed, layers done.

Theory of operation. The server sends the layers asked for, one after another; in each, the slices
of every chunk that is still a hit. A slice counts once its last byte has landed and its checksum is
right. A layer is done when no hit is outstanding, so a chunk that turns into a miss on the way
delays nobody. Frames that break this order are a defect of the server, not of the caller.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvclient.placement import Placement
from kvserve.errors import InvalidRequest, ServerFault
from kvserve.format.chunk_file import checksum, checksums_from
from kvserve.format.frames import FrameHeader
from kvserve.format.verify import SliceVerifier
from kvserve.model import ChunkStatus, Descriptor, Span, Verdict


@dataclass(frozen=True, slots=True)
class LayerEvent:
    """A layer is complete in the region, but for the chunks in `missing` (ascending indexes)."""

    layer_index: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A frame whose bytes are on their way: `span` of the slices of consecutive chunks, or these
    slices whole."""

    first_chunk: int
    chunk_count: int
    span: Span
    is_whole: bool
    views: list[memoryview]

    @property
    def is_simple(self) -> bool:
        """Whole slices, one after another in memory."""
        return self.is_whole and len(self.views) == 1

    def slices(self) -> Iterator[list[memoryview]]:
        """The views of each slice; a view may hold many slices, and a slice may need many views."""
        views = iter(self.views)
        view, at = next(views), 0
        for _ in range(self.chunk_count):
            parts: list[memoryview] = []
            left = self.span.size_bytes
            while left:
                if at == len(view):
                    view, at = next(views), 0
                parts.append(view[at : at + left])
                at += len(parts[-1])
                left -= len(parts[-1])
            yield parts


def _land(
    view: memoryview, size: int, expected: "array[int]", payload: memoryview | None
) -> list[bool]:
    """Whether each slice of `size` bytes in `view` is right, copied there first if it is in
    `payload`: slice by slice, so that it is in the CPU's cache for its checksum."""
    are_right: list[bool] = []
    at = 0
    for value in expected:
        place = view[at : at + size]
        if payload is not None:
            place[:] = payload[at : at + size]
        are_right.append(checksum(place) == value)
        at += size
    return are_right


class FetchSession:
    """State of one fetch. Methods that take input return the layers it completed, in order."""

    def __init__(self, descriptor: Descriptor, layers: Sequence[int], placement: Placement) -> None:
        self._descriptor = descriptor
        self._layers = list(layers)
        self._placement = placement
        self._verifier = SliceVerifier()
        self._done = 0
        # Good so far; what the server sends (it cannot know what failed here); of that, what is to
        # come in this layer.
        self._hits: set[int] = set()
        self._coming: set[int] = set()
        self._outstanding: set[int] = set()
        # In one layer slices come in chunk order, each from its first byte to its last.
        self._chunk_at = 0
        self._offset_at = 0
        self._placed: _Placed | None = None
        self.verdicts: list[Verdict] = []
        self.landed_bytes = 0
        self.doubted: list[int] = []
        """Chunks that did not match here: the server has not found fault with them."""

    @property
    def chunk_count(self) -> int:
        return self._descriptor.chunk_count

    @property
    def is_finished(self) -> bool:
        return bool(self.verdicts) and self._done == len(self._layers)

    def head(self, verdicts: list[Verdict]) -> list[LayerEvent]:
        if self.verdicts:
            raise ServerFault("the server sent two heads")
        self.verdicts = verdicts
        self._hits = {
            index for index, verdict in enumerate(verdicts) if verdict.status is ChunkStatus.HIT
        }
        self._coming = set(self._hits)
        self._outstanding = set(self._hits)
        return self._completed()

    def miss(self, chunk_index: int, verdict: Verdict) -> list[LayerEvent]:
        if chunk_index not in self._coming:
            raise ServerFault(f"the server reports chunk {chunk_index} as a miss, it was no hit")
        if chunk_index in self._hits:
            self.verdicts[chunk_index] = verdict
        for chunks in (self._hits, self._coming, self._outstanding):
            chunks.discard(chunk_index)
        if self._chunk_at == chunk_index:
            self._offset_at = 0
        return self._completed()

    def frame(self, header: FrameHeader, payload: memoryview) -> list[LayerEvent]:
        """Copies one frame to its place and verifies it there."""
        views = self.place(
            header.layer_index, header.first_chunk, header.slice_offset, len(payload)
        )
        if self._placed is not None and self._placed.is_simple:
            return self.landed(header.checksums, payload)
        at = 0
        for view in views:
            view[:] = payload[at : at + len(view)]
            at += len(view)
        return self.landed(header.checksums)

    def place(
        self, layer_index: int, first_chunk: int, slice_offset: int, size_bytes: int
    ) -> list[memoryview]:
        """Where the next frame belongs, in byte order; say `landed` once its bytes are there."""
        if not self.verdicts or self._done == len(self._layers):
            raise ServerFault("a payload frame came outside the layers that were asked for")
        if layer_index != self._layers[self._done]:
            raise ServerFault(
                f"layer {layer_index} came, layer {self._layers[self._done]} was next"
            )
        size = self._descriptor.layout.slice_sizes[layer_index]
        continues = slice_offset == self._offset_at and (
            not slice_offset or first_chunk == self._chunk_at
        )
        if not continues or first_chunk < self._chunk_at:
            raise ServerFault(
                f"layer {layer_index}: chunk {first_chunk} at byte {slice_offset} came, chunk "
                f"{self._chunk_at} at byte {self._offset_at} was next"
            )
        is_piece = slice_offset > 0 or size_bytes < size
        if (slice_offset + size_bytes > size) if is_piece else size_bytes % size:
            raise ServerFault(
                f"layer {layer_index}: {size_bytes} bytes at byte {slice_offset} are neither a "
                f"piece of a slice of {size} bytes nor whole slices"
            )
        count = 1 if is_piece else size_bytes // size
        chunks = range(first_chunk, first_chunk + count)
        if not self._outstanding.issuperset(chunks):
            which = next(index for index in chunks if index not in self._outstanding)
            raise ServerFault(f"chunk {which} came twice, as a miss, or is not asked for")
        span = Span(slice_offset, slice_offset + size_bytes) if is_piece else Span(0, size)
        views = self._placement.views(layer_index, first_chunk, count, span)
        if (given := sum(map(len, views))) != size_bytes:
            raise InvalidRequest(
                f"layer {layer_index}: the placement gives {given} bytes for {size_bytes} bytes of "
                f"{count} slices from chunk {first_chunk} on"
            )
        self._placed = _Placed(first_chunk, count, span, not is_piece, views)
        return views

    def landed(self, checksums: bytes, payload: memoryview | None = None) -> list[LayerEvent]:
        """Verifies the frame that was placed last, in the region; `checksums` as in its header.

        `payload`: what is still to be copied to its place, if that is simple.
        """
        placed, self._placed = self._placed, None
        assert placed is not None, "no frame was placed"
        layer_index, span = self._layers[self._done], placed.span
        self.landed_bytes += span.size_bytes * placed.chunk_count
        if span.stop < self._descriptor.layout.slice_sizes[layer_index]:
            (parts,) = placed.slices()
            self._verifier.check(*parts, slice_offset=span.start, ends_slice=False, expected=0)
            self._chunk_at, self._offset_at = placed.first_chunk, span.stop
            return []
        if len(checksums) != 8 * placed.chunk_count:
            raise ServerFault(
                f"layer {layer_index}: {len(checksums)} bytes of checksums for "
                f"{placed.chunk_count} slices"
            )
        end = placed.first_chunk + placed.chunk_count
        for chunk_index in self._mismatches(placed, checksums_from(checksums), payload):
            text = f"layer {layer_index} does not match its checksum on arrival"
            self.verdicts[chunk_index] = Verdict(ChunkStatus.MISS_CORRUPT, text)
            self._hits.discard(chunk_index)
            self.doubted.append(chunk_index)
        self._outstanding.difference_update(range(placed.first_chunk, end))
        self._chunk_at, self._offset_at = end, 0
        return self._completed()

    def _mismatches(
        self, placed: _Placed, expected: "array[int]", payload: memoryview | None
    ) -> list[int]:
        """The chunks whose slices, which end here, do not match and were good so far."""
        if placed.is_simple:
            are_right = _land(placed.views[0], placed.span.size_bytes, expected, payload)
        else:
            are_right = [
                self._verifier.check(
                    *parts, slice_offset=placed.span.start, ends_slice=True, expected=value
                )
                for parts, value in zip(placed.slices(), expected, strict=True)
            ]
        if all(are_right):
            return []
        wrong = (placed.first_chunk + n for n, is_right in enumerate(are_right) if not is_right)
        return [chunk_index for chunk_index in wrong if chunk_index in self._hits]

    def _completed(self) -> list[LayerEvent]:
        events: list[LayerEvent] = []
        while not self._outstanding and self._done < len(self._layers):
            missing = tuple(index for index in range(len(self.verdicts)) if index not in self._hits)
            events.append(LayerEvent(self._layers[self._done], missing))
            self._done += 1
            self._outstanding = set(self._coming)
            self._chunk_at = self._offset_at = 0
        return events
