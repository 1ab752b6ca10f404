"""Small valid objects and known bytes, for tests of the pure rooms."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.format.plan import plan_layer
from kvserve.model import Descriptor, Layout, ModelIdentity, attention, latent, opaque

SMALL = Layout("bfloat16", 4, (attention(2, 8), attention(2, 8)))
"""Two layers of 256-byte slices."""
HYBRID = Layout("bfloat16", 4, (attention(2, 8), latent(24), opaque(100)))
"""Slices of 256, 192 and 100 bytes."""


def hash_of(number: int, size: int = 32) -> bytes:
    return Random(number).randbytes(size)


def identity_of(layout: Layout = SMALL, **names: str) -> ModelIdentity:
    return ModelIdentity(layout=layout, **{"model": "org/small", "revision": "r1", **names})


def descriptor_of(chunks: int = 3, layout: Layout = SMALL, **others: Any) -> Descriptor:
    hashes = tuple(hash_of(number) for number in range(chunks))
    return Descriptor(identity_of(layout), hashes, **others)


def slice_of(layer_index: int, chunk_index: int, size: int) -> bytes:
    """Incompressible, and different for every slice."""
    return Random(f"layer {layer_index} chunk {chunk_index}").randbytes(size)


def frames_of(
    layout: Layout, layer_index: int, chunks: Sequence[int], *, frame_size_bytes: int = 1 << 20
) -> Iterator[tuple[FrameHeader, memoryview]]:
    """The frames that a correct sender makes of one layer's `slice_of`."""
    size = layout.slice_sizes[layer_index]
    for plan in plan_layer(layer_index, size, chunks, frame_size_bytes=frame_size_bytes):
        slices = [
            slice_of(layer_index, plan.first_chunk + position, size)
            for position in range(plan.chunk_count)
        ]
        checksums = b"".join(checksum(whole).to_bytes(8, "little") for whole in slices)
        payload = b"".join(whole[plan.span.start : plan.span.stop] for whole in slices)
        header = FrameHeader(
            layer_index,
            plan.first_chunk,
            plan.span.start,
            checksums if plan.ends_slice else b"",
        )
        yield header, memoryview(payload)
