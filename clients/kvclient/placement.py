"""Where slices are in the caller's memory: one after another, or scattered over paged blocks."""

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, Protocol

from kvclient.region import Region, as_region
from kvserve.errors import InvalidRequest
from kvserve.model import Descriptor, Span


class Placement(Protocol):
    """Maps slices to memory; the same object serves a store (source) and a fetch (target)."""

    region: Region

    def views(
        self, layer_index: int, first_chunk: int, chunk_count: int, span: Span
    ) -> list[memoryview]:
        """The memory of `span` of the slices of consecutive chunks, in byte order.

        `span` counts from the start of a slice; for several chunks it is the whole slice.
        """


class LayerMajor:
    """`[layer][chunk]`: layer l of chunk i is at `offset + payload offset of l + i * slice size`.

    With `layers`, only those layers have memory, one after another in that order.
    """

    def __init__(
        self,
        buffer: Any,
        descriptor: Descriptor,
        *,
        offset_bytes: int = 0,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.region = as_region(buffer)
        self._sizes = descriptor.layout.slice_sizes
        self._offsets: dict[int, int] = {}
        at = offset_bytes
        for layer_index in range(len(self._sizes)) if layers is None else layers:
            if not 0 <= layer_index < len(self._sizes):
                raise InvalidRequest(
                    f"layer {layer_index} is out of range; this layout has layers 0 to "
                    f"{len(self._sizes) - 1}"
                )
            self._offsets[layer_index] = at
            at += self._sizes[layer_index] * descriptor.chunk_count
        if offset_bytes < 0 or at > self.region.size_bytes:
            raise InvalidRequest(
                f"the region has {self.region.size_bytes} bytes, but {len(self._offsets)} layers "
                f"of {descriptor.chunk_count} chunks from offset {offset_bytes} need {at}"
            )

    def views(
        self, layer_index: int, first_chunk: int, chunk_count: int, span: Span
    ) -> list[memoryview]:
        if layer_index not in self._offsets:
            raise InvalidRequest(
                f"layer {layer_index} has no place in this region, which is for layers "
                f"{_listed(self._offsets)} (layers= of LayerMajor)"
            )
        start = self._offsets[layer_index] + first_chunk * self._sizes[layer_index] + span.start
        return [self.region.view[start : start + chunk_count * span.size_bytes]]


class Paged:
    """A paged engine's blocks: a slice is cut into equal blocks that lie at given addresses.

    `addresses[layer_index][n]` is the byte offset in the region of block n of that layer, in slice
    order: with b blocks a chunk, block n holds piece `n % b` of chunk `n // b`. An engine that
    keeps K and V apart lists, for each chunk, its K blocks, then its V blocks (axes "2,...").
    Layers that take part in no transfer may be empty.
    """

    def __init__(
        self, buffer: Any, descriptor: Descriptor, addresses: Sequence[Sequence[int]]
    ) -> None:
        self.region = as_region(buffer)
        sizes = descriptor.layout.slice_sizes
        if len(addresses) != len(sizes):
            raise InvalidRequest(f"addresses for {len(addresses)} layers, layout has {len(sizes)}")
        self._blocks: list[list[int]] = []
        self._block_sizes: list[int] = []
        for layer_index, of_layer in enumerate(addresses):
            blocks = [int(address) for address in of_layer]
            a_chunk, rest = divmod(len(blocks), descriptor.chunk_count)
            if rest or (blocks and sizes[layer_index] % a_chunk):
                raise InvalidRequest(
                    f"layer {layer_index}: {len(blocks)} block addresses do not divide "
                    f"{descriptor.chunk_count} slices of {sizes[layer_index]} bytes"
                )
            size = sizes[layer_index] // a_chunk if blocks else 0
            self._blocks.append(blocks)
            self._block_sizes.append(size)
        _check_blocks(self._blocks, self._block_sizes, self.region.size_bytes)
        self._chunk_count = descriptor.chunk_count

    def views(
        self, layer_index: int, first_chunk: int, chunk_count: int, span: Span
    ) -> list[memoryview]:
        blocks, size = self._blocks[layer_index], self._block_sizes[layer_index]
        if not blocks:
            raise InvalidRequest(f"layer {layer_index} has no blocks in this placement")
        a_chunk = len(blocks) // self._chunk_count
        view = self.region.view
        found: list[memoryview] = []
        for chunk_index in range(first_chunk, first_chunk + chunk_count):
            for piece in range(span.start // size, -(-span.stop // size)):
                at = blocks[chunk_index * a_chunk + piece]
                start = max(span.start - piece * size, 0)
                stop = min(span.stop - piece * size, size)
                found.append(view[at + start : at + stop])
        return found


def _listed(layers: Iterable[int]) -> str:
    first = [str(layer_index) for layer_index in islice(layers, 9)]
    return ", ".join(first[:8]) + (", ..." if len(first) > 8 else "")


def _check_blocks(blocks: list[list[int]], sizes: list[int], region_size: int) -> None:
    """Every block inside the region, no two on the same bytes."""
    ordered = sorted(
        (address, sizes[layer_index], layer_index)
        for layer_index, of_layer in enumerate(blocks)
        for address in of_layer
    )
    for address, size, layer_index in ordered:
        if address < 0 or address + size > region_size:
            raise InvalidRequest(
                f"layer {layer_index}: the block of {size} bytes at {address} leaves the region of "
                f"{region_size} bytes"
            )
    for (one, size, layer_index), (other, _, other_layer) in pairwise(ordered):
        if one + size > other:
            raise InvalidRequest(
                f"blocks overlap: {size} bytes at {one} (layer {layer_index}) and at {other} "
                f"(layer {other_layer})"
            )


def as_placement(target: Any, descriptor: Descriptor) -> Placement:
    """A placement as it is; any buffer or region as `LayerMajor` of the whole descriptor.

    A bare buffer must have exactly the payload's size: one of another dtype or shape would else be
    taken for KV.
    """
    if hasattr(target, "views"):
        placement: Placement = target
        return placement
    region = as_region(target)
    if region.size_bytes != descriptor.payload_size_bytes:
        raise InvalidRequest(
            f"the region has {region.size_bytes} bytes, the payload {descriptor.payload_size_bytes}"
            ": wrong dtype or number of chunks? For some layers' memory pass LayerMajor(buffer, "
            "descriptor, layers=[...]), for a part of a larger buffer offset_bytes=..."
        )
    return LayerMajor(region, descriptor)
