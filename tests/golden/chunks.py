"""What the golden files hold: the chunk that each one is, and every byte of its payload."""

from dataclasses import dataclass
from pathlib import Path

from kvserve.model import Descriptor, Layout, ModelIdentity, Shard, attention, latent, opaque

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True)
class GoldenChunk:
    """A chunk of format version 1. `path` is its place under a store's root."""

    name: str
    descriptor: Descriptor
    path: str

    @property
    def file(self) -> Path:
        return DIRECTORY / f"{self.name}.v1.chunk"

    def payload(self, layer_index: int) -> bytes:
        """Not random, so that no library is needed to make it again."""
        size = self.descriptor.layout.slice_sizes[layer_index]
        return bytes((7 * at + 31 * layer_index + 13) % 256 for at in range(size))

    def payloads(self) -> list[bytes]:
        return [self.payload(index) for index in range(self.descriptor.layout.layer_count)]


_NUMBERS_32 = bytes(range(32))
_NUMBERS_16 = bytes(range(240, 256))

GQA = GoldenChunk(
    "gqa",
    Descriptor(
        ModelIdentity(
            "org/golden-gqa",
            "r1",
            Layout("bfloat16", 4, (attention(kv_heads=2, head_dim=8),) * 2),
        ),
        (_NUMBERS_32,),
    ),
    "default/bad263f1d6726c770efe76e62afaa5b9/0of1/352/"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
)
MLA = GoldenChunk(
    "mla",
    Descriptor(
        ModelIdentity(
            "org/golden-mla",
            "0e9e39f249a16976918f6564b8830bc894c89659",
            Layout("bfloat16", 4, (latent(24),) * 2, axes="tokens,dim"),
            adapter="lora-1",
            salt="pepper",
        ),
        (_NUMBERS_32[::-1],),
        tenant="team-1",
    ),
    "team-1/e62e3bcf258de7800ec62df9000c42e5/0of1/cad/"
    "1f1e1d1c1b1a191817161514131211100f0e0d0c0b0a09080706050403020100",
)
MIXED = GoldenChunk(
    "mixed",
    Descriptor(
        ModelIdentity(
            "org/golden-mixed",
            "r2",
            Layout("float8_e4m3", 4, (attention(1, 8), latent(24), opaque(100))),
        ),
        (_NUMBERS_16,),
        shard=Shard(rank=1, count=2),
    ),
    "default/aa8b3421840730ca5995f4ed513f1ea0/1of2/d43/f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
)
ALL = (GQA, MLA, MIXED)
