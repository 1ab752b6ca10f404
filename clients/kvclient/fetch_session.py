"""The rules of one fetch on the client, without network: frames in, bytes landed, layers done.

Theory of operation. The server sends the layers asked for, one after another; in each, the slices
of every chunk that is still a hit. A slice counts once its last byte has landed and its checksum is
right. A layer is done when no hit is outstanding, so a chunk that turns into a miss on the way
delays nobody. Frames that break this order are a defect of the server, not of the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvclient.placement import Placement
from kvserve.errors import ServerFault
from kvserve.format.frames import FrameHeader
from kvserve.format.verify import SliceVerifier
from kvserve.model import ChunkStatus, Descriptor, Span, Verdict


@dataclass(frozen=True, slots=True)
class LayerEvent:
    """A layer is complete in the region, but for the chunks in `missing` (ascending indexes)."""

    layer_index: int
    missing: tuple[int, ...]


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
        self.verdicts: list[Verdict] = []
        self.landed_bytes = 0

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
        """Checks and lands one frame."""
        if not self.verdicts or self._done == len(self._layers):
            raise ServerFault("a payload frame came outside the layers that were asked for")
        layer_index = self._layers[self._done]
        if header.layer_index != layer_index:
            raise ServerFault(f"layer {header.layer_index} came, layer {layer_index} was next")
        size = self._descriptor.layout.slice_sizes[layer_index]
        chunk_index, offset = header.first_chunk, header.slice_offset
        continues = offset == self._offset_at and (not offset or chunk_index == self._chunk_at)
        if not continues or chunk_index < self._chunk_at:
            raise ServerFault(
                f"layer {layer_index}: chunk {chunk_index} at byte {offset} came, chunk "
                f"{self._chunk_at} at byte {self._offset_at} was next"
            )
        if offset + len(payload) > size and (offset or len(payload) % size):
            raise ServerFault(
                f"layer {layer_index}: {len(payload)} bytes at byte {offset} are neither a piece "
                f"of a slice of {size} bytes nor whole slices"
            )
        bad = self._verify(header, payload, size)
        self._land(layer_index, chunk_index, offset, size, payload)
        for index, verdict in bad.items():
            self.verdicts[index] = verdict
            self._hits.discard(index)
        return self._completed()

    def _verify(self, header: FrameHeader, payload: memoryview, size: int) -> dict[int, Verdict]:
        """Advances the position over the frame; the chunks whose slice ended with a wrong sum."""
        chunk_index, offset = header.first_chunk, header.slice_offset
        bad: dict[int, Verdict] = {}
        at = ended = 0
        while at < len(payload):
            part = payload[at : at + size - offset]
            ends = offset + len(part) == size
            if chunk_index not in self._outstanding:
                raise ServerFault(f"chunk {chunk_index} came twice, as a miss, or is not asked for")
            expected = int.from_bytes(header.checksums[8 * ended : 8 * ended + 8], "little")
            is_good = self._verifier.check(
                part, slice_offset=offset, ends_slice=ends, expected=expected
            )
            at += len(part)
            offset += len(part)
            if ends:
                self._outstanding.discard(chunk_index)
                if not is_good:
                    text = f"layer {header.layer_index} does not match its checksum on arrival"
                    bad[chunk_index] = Verdict(ChunkStatus.MISS_CORRUPT, text)
                ended += 1
                chunk_index += 1
                offset = 0
        self._chunk_at, self._offset_at = chunk_index, offset
        return bad

    def _land(
        self, layer_index: int, chunk_index: int, offset: int, size: int, payload: memoryview
    ) -> None:
        if offset or len(payload) < size:
            span, count = Span(offset, offset + len(payload)), 1
        else:
            span, count = Span(0, size), len(payload) // size
        at = 0
        for view in self._placement.views(layer_index, chunk_index, count, span):
            view[:] = payload[at : at + len(view)]
            at += len(view)
        self.landed_bytes += len(payload)

    def _completed(self) -> list[LayerEvent]:
        events: list[LayerEvent] = []
        while not self._outstanding and self._done < len(self._layers):
            missing = tuple(index for index in range(len(self.verdicts)) if index not in self._hits)
            events.append(LayerEvent(self._layers[self._done], missing))
            self._done += 1
            self._outstanding = set(self._coming)
            self._chunk_at = self._offset_at = 0
        return events
