"""The demo's model: Llama-3.1-8B's KV geometry, and KV bytes that both workers can compute."""

from random import Random

from kvserve.model import Descriptor, Layout, ModelIdentity, attention
from kvserve.prefix import chunk_hashes

LAYER_COUNT = 32
CHUNK_TOKENS = 64


def descriptor(tokens: int) -> Descriptor:
    """32 layers, 8 KV heads of 128 dims, BF16: 128 KiB a token, slices of 256 KiB."""
    layout = Layout.uniform(
        layer_count=LAYER_COUNT,
        spec=attention(kv_heads=8, head_dim=128),
        dtype="bfloat16",
        chunk_tokens=CHUNK_TOKENS,
    )
    identity = ModelIdentity("meta-llama/Llama-3.1-8B", "demo", layout)
    return Descriptor(identity, chunk_hashes(range(tokens), CHUNK_TOKENS))


def layer_bytes(layer_index: int, size_bytes: int) -> bytes:
    """What prefill "computes": incompressible, the same in every process."""
    return Random(f"kvserve demo layer {layer_index}").randbytes(size_bytes)
