"""Work for tests: small descriptors and their payloads."""

from random import Random

from kvclient import (
    AsyncClient,
    Descriptor,
    Layout,
    ModelIdentity,
    Region,
    SharedRegion,
    attention,
    chunk_hashes,
)


def small_descriptor(
    *,
    chunks: int = 8,
    layers: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    chunk_tokens: int = 16,
    dtype: str = "bfloat16",
    first_token: int = 0,
    tenant: str = "default",
    **names: str,
) -> Descriptor:
    """4 layers x 8 chunks of 8 KiB slices unless told otherwise."""
    layout = Layout.uniform(
        layer_count=layers,
        spec=attention(kv_heads, head_dim),
        dtype=dtype,
        chunk_tokens=chunk_tokens,
    )
    identity = ModelIdentity(layout=layout, **{"model": "org/small", "revision": "r1", **names})
    tokens = range(first_token, first_token + chunks * chunk_tokens)
    return Descriptor(identity, chunk_hashes(tokens, chunk_tokens), tenant=tenant)


def payload_for(descriptor: Descriptor, seed: int = 0) -> bytearray:
    """Incompressible bytes laid out [layer][chunk]."""
    return bytearray(Random(seed).randbytes(descriptor.payload_size_bytes))


def memory(plane: str, size: int | bytearray) -> Region:
    """A region that the plane can use: of that many bytes, or with these."""
    source = bytearray(size) if isinstance(size, int) else size
    if plane != "shm":
        return Region(source)
    shared = SharedRegion(len(source))
    shared.view[:] = source
    return shared


async def store_all(client: AsyncClient, descriptor: Descriptor, source: object) -> None:
    """Stores every layer; fails unless every chunk ends as stored.

    A bare payload is put into memory that the client's plane can use.
    """
    if isinstance(source, bytearray):
        source = memory(client.plane, source)
    handle = client.store(descriptor, source)
    for layer_index in descriptor.layer_order:
        await handle.store_layer(layer_index)
    result = await handle.finish()
    assert result.is_whole, result
