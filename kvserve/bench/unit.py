"""The work unit: how much is moved, under which names, and which bytes. Pure.

Everything follows from the numbers, so that several processes agree on names and bytes without
sending them to each other, and a check can make the expected bytes again instead of keeping them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from random import Random

from kvserve.model import Descriptor, Layout, ModelIdentity, opaque
from kvserve.prefix import chunk_hashes

CHUNK_TOKENS = 16


@dataclass(frozen=True)
class WorkUnit:
    """Chunks of one prefix. The default is 128 MiB: 1,024 tokens of Llama-3.1-8B in bfloat16."""

    chunk_count: int = 64
    layer_count: int = 32
    slice_size_bytes: int = 64 << 10

    @property
    def layer_size_bytes(self) -> int:
        """One layer's payload: its slices of all chunks."""
        return self.chunk_count * self.slice_size_bytes

    @property
    def size_bytes(self) -> int:
        return self.layer_count * self.layer_size_bytes

    def with_chunks(self, chunk_count: int) -> "WorkUnit":
        """The same layers for another number of chunks, at least one."""
        return replace(self, chunk_count=max(1, chunk_count))

    def descriptor(self, series: int) -> Descriptor:
        """Another `series` is another prompt: it shares no chunk hash with any other series."""
        later = range(1, self.chunk_count * CHUNK_TOKENS)
        return Descriptor(self._identity, chunk_hashes(chain([series], later), CHUNK_TOKENS))

    def layer_bytes(self, series: int, layer_index: int) -> bytes:
        """The payload of one layer: incompressible, and different for every layer and series."""
        return Random(f"{series}/{layer_index}").randbytes(self.layer_size_bytes)

    def fill(self, region: memoryview, series: int) -> None:
        """Writes the whole payload, laid out [layer][chunk]."""
        size = self.layer_size_bytes
        for layer_index in range(self.layer_count):
            at = layer_index * size
            region[at : at + size] = self.layer_bytes(series, layer_index)

    def first_wrong_layer(self, region: memoryview, series: int) -> int | None:
        """The first layer whose bytes in `region` are not those that `fill` writes."""
        size = self.layer_size_bytes
        for layer_index in range(self.layer_count):
            at = layer_index * size
            # As bytes: comparing memoryviews goes item by item.
            if bytes(region[at : at + size]) != self.layer_bytes(series, layer_index):
                return layer_index
        return None

    @cached_property
    def _identity(self) -> ModelIdentity:
        layout = Layout.uniform(
            layer_count=self.layer_count,
            spec=opaque(self.slice_size_bytes),
            dtype="uint8",
            chunk_tokens=CHUNK_TOKENS,
        )
        return ModelIdentity("kvserve-bench", "1", layout)
