"""The rules of one store, without I/O: which frame may come next and where its bytes go.

Theory of operation. The client sends the needed chunks only. Layers come in any order, each once;
inside a layer the slices come in chunk order, each from its first byte to its last, and the next
layer starts when the last slice of this one has ended. Every slice is checked against the checksum
that came with it before its bytes count. Breaking a rule raises `InvalidRequest` and ends the
store; chunks that are not complete then are never visible.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.errors import InvalidRequest
from kvserve.format.chunk_file import checksums_from
from kvserve.format.frames import FrameHeader
from kvserve.format.plan import SLICES_A_FRAME_MAX
from kvserve.format.verify import SliceVerifier
from kvserve.model import Layout


@dataclass(frozen=True, slots=True)
class SliceWrite:
    """Write `data` at `slice_offset` of one slice. `data` is a view into the frame."""

    chunk_index: int
    layer_index: int
    slice_offset: int
    data: memoryview


class StoreSession:
    """State of one store; feed it frames in the order they came."""

    def __init__(self, layout: Layout, needed: Sequence[int], *, frame_size_bytes_max: int) -> None:
        self._frame_size_bytes_max = frame_size_bytes_max
        self._sizes = layout.slice_sizes
        self._needed = needed
        self._done_layers: set[int] = set()
        self._layer: int | None = None
        self._position = 0
        self._offset = 0
        self._verifier = SliceVerifier()
        # By layer, as they came: 8 bytes for each needed chunk, and none before its slice is there.
        self._checksums = [bytearray() for _ in self._sizes]

    def __repr__(self) -> str:
        return (
            f"<StoreSession {len(self._done_layers)}/{len(self._sizes)} layers, "
            f"layer {self._layer} at chunk {self._position}/{len(self._needed)} + {self._offset} B>"
        )

    @property
    def progress(self) -> str:
        """For a person."""
        return f"{len(self._done_layers)} of {len(self._sizes)} layers had come"

    @property
    def needed(self) -> Sequence[int]:
        """The chunks whose payload has to come, ascending."""
        return self._needed

    def checksums_of(self, position: int) -> "array[int]":
        """The slice checksums, by layer, of `needed[position]`; once every layer has come."""
        at = 8 * position
        return checksums_from(b"".join(of_layer[at : at + 8] for of_layer in self._checksums))

    @property
    def is_complete(self) -> bool:
        """Every layer of every needed chunk has come."""
        return not self._needed or len(self._done_layers) == len(self._sizes)

    def feed(self, header: FrameHeader, payload: memoryview) -> tuple[list[SliceWrite], bool]:
        """The writes that a frame asks for, and whether it completes its layer.

        Raises:
            InvalidRequest: naming the rule that the frame breaks.
        """
        self._enter_layer(header.layer_index)
        if not 0 < len(payload) <= self._frame_size_bytes_max:
            raise InvalidRequest(
                f"layer {header.layer_index}: a frame with {len(payload)} bytes of payload; "
                f"must be 1 to {self._frame_size_bytes_max}"
            )
        if len(header.checksums) > 8 * SLICES_A_FRAME_MAX:
            raise InvalidRequest(
                f"layer {header.layer_index}: more than {SLICES_A_FRAME_MAX} slices in a frame"
            )
        size = self._sizes[header.layer_index]
        self._check_place(header, size)
        writes: list[SliceWrite] = []
        at = ended = 0
        while at < len(payload):
            if self._position == len(self._needed):
                raise InvalidRequest(
                    f"layer {header.layer_index}: payload size is wrong: {len(payload) - at} bytes "
                    f"after the last needed chunk; a slice is {size} bytes"
                )
            chunk_index = self._needed[self._position]
            part = payload[at : at + size - self._offset]
            ends = self._offset + len(part) == size
            expected = self._expected(header, ended) if ends else 0
            if not self._verifier.check(
                part, slice_offset=self._offset, ends_slice=ends, expected=expected
            ):
                raise InvalidRequest(
                    f"layer {header.layer_index} of chunk {chunk_index}: the payload does not "
                    "match its checksum; it changed on the way or while it was sent"
                )
            writes.append(SliceWrite(chunk_index, header.layer_index, self._offset, part))
            at += len(part)
            self._offset += len(part)
            if ends:
                ended += 1
                self._offset = 0
                self._position += 1
        if len(header.checksums) != 8 * ended:
            raise InvalidRequest(
                f"layer {header.layer_index}: {len(header.checksums)} bytes of checksums for "
                f"{ended} slices that end in the frame; 8 bytes each"
            )
        self._checksums[header.layer_index] += header.checksums
        completes = self._position == len(self._needed)
        if completes:
            self._done_layers.add(header.layer_index)
            self._layer = None
        return writes, completes

    def _enter_layer(self, layer_index: int) -> None:
        # Three cases: the layer under way, a layer that may start now, anything else.
        if not self._needed:
            raise InvalidRequest("a payload came, but the server needs no chunk of this store")
        if layer_index == self._layer:
            return
        if layer_index >= len(self._sizes):
            raise InvalidRequest(
                f"layer {layer_index} is out of range; this layout has layers 0 to "
                f"{len(self._sizes) - 1}"
            )
        if layer_index in self._done_layers:
            raise InvalidRequest(f"layer {layer_index} was sent twice")
        if self._layer is not None:
            raise InvalidRequest(
                f"layer {layer_index} came before layer {self._layer} was complete: payload size "
                f"is wrong, {len(self._needed) - self._position} slices are missing"
            )
        self._layer, self._position, self._offset = layer_index, 0, 0

    def _check_place(self, header: FrameHeader, size: int) -> None:
        if self._position < len(self._needed):
            expected = self._needed[self._position]
            if (header.first_chunk, header.slice_offset) != (expected, self._offset):
                raise InvalidRequest(
                    f"layer {header.layer_index}: a frame for chunk {header.first_chunk} at byte "
                    f"{header.slice_offset} came, chunk {expected} at byte {self._offset} of "
                    f"{size} was next"
                )

    @staticmethod
    def _expected(header: FrameHeader, slice_number: int) -> int:
        packed = header.checksums[8 * slice_number : 8 * slice_number + 8]
        if len(packed) != 8:
            raise InvalidRequest(f"layer {header.layer_index}: a slice came without its checksum")
        return int.from_bytes(packed, "little")
