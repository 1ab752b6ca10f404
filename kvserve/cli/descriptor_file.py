"""A descriptor as a JSON file, for the command line.

```json
{
  "tenant": "default", "model": "meta-llama/Llama-3.1-8B", "revision": "0e9e39f",
  "dtype": "bfloat16", "chunk_tokens": 16,
  "layers": [{"kind": "attention", "count": 32, "kv_heads": 8, "head_dim": 128}],
  "tokens": [128000, 791, 6864]
}
```
Instead of `tokens`, `chunk_hashes` gives the engine's own hashes in hex.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvserve.errors import InvalidRequest
from kvserve.model import LAYERS_MAX, Descriptor, LayerKind, LayerSpec, Layout, ModelIdentity, Shard
from kvserve.prefix import chunk_hashes

_SIZE_BYTES_MAX = 64 << 20


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Layers(_Entry):
    kind: Literal["attention", "latent", "opaque"]
    count: int = Field(1, ge=1, le=LAYERS_MAX)
    kv_heads: int = 0
    head_dim: int = 0
    opaque_bytes: int = 0


class _File(_Entry):
    tenant: str = "default"
    model: str
    revision: str
    adapter: str = ""
    salt: str = ""
    dtype: str
    axes: str = Layout.axes
    chunk_tokens: int
    layers: list[_Layers]
    shard_rank: int = 0
    shard_count: int = 1
    tokens: list[int] | None = None
    include_partial: bool = False
    chunk_hashes: list[str] | None = None
    layer_order: list[int] = []


def read_descriptor(path: Path) -> Descriptor:
    """Raises `InvalidRequest` naming the file and everything that is wrong in it."""
    try:
        if path.stat().st_size > _SIZE_BYTES_MAX:
            raise InvalidRequest(f"{path} is larger than {_SIZE_BYTES_MAX} bytes")
        content = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
        raise InvalidRequest(f"{path} is no descriptor:\n" + "\n".join(lines)) from error
    try:
        return _build(content)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def _build(content: _File) -> Descriptor:
    layers: list[LayerSpec] = []
    for run in content.layers:
        spec = LayerSpec(LayerKind[run.kind.upper()], run.kv_heads, run.head_dim, run.opaque_bytes)
        layers.extend([spec] * run.count)
    layout = Layout(content.dtype, content.chunk_tokens, tuple(layers), content.axes)
    return Descriptor(
        identity=ModelIdentity(
            content.model, content.revision, layout, content.adapter, content.salt
        ),
        chunk_hashes=_hashes(content),
        tenant=content.tenant,
        shard=Shard(content.shard_rank, content.shard_count),
        layer_order=tuple(content.layer_order),
    )


def _hashes(content: _File) -> tuple[bytes, ...]:
    if (content.tokens is None) == (content.chunk_hashes is None):
        raise InvalidRequest("must have either `tokens` or `chunk_hashes`")
    if content.chunk_hashes is not None:
        try:
            return tuple(bytes.fromhex(text) for text in content.chunk_hashes)
        except ValueError as error:
            raise InvalidRequest(f"chunk_hashes must be hex: {error}") from error
    assert content.tokens is not None
    hashes = chunk_hashes(
        content.tokens, content.chunk_tokens, include_partial=content.include_partial
    )
    if not hashes:
        raise InvalidRequest(
            f"{len(content.tokens)} tokens make no whole chunk of {content.chunk_tokens}; "
            "set `include_partial` to store the partial one"
        )
    return hashes
