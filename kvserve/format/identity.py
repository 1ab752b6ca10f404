"""Reads encoded identities: compares them, so that a miss can say which field differs, and builds
the model's objects from what is found on a disk."""

from typing import Final

import msgpack

from kvserve.errors import InvalidRequest, MalformedMessage
from kvserve.model import LAYERS_MAX, LayerKind, LayerSpec, Layout, ModelIdentity

ENCODED_SIZE_BYTES_MAX: Final = 1 << 20
"""More than any identity that the model's rules allow."""

_FIELDS: Final = (
    "encoding",
    "model",
    "revision",
    "adapter",
    "salt",
    "dtype",
    "axes",
    "chunk_tokens",
    "layers",
)
# A caller's salt may be a secret between tenants' users: its value is never shown.
_SECRET: Final = {"salt"}


def model_of(encoded: bytes) -> str | None:
    """The model id in an encoded identity; None if it is not one."""
    values = _decode(encoded)
    return None if values is None else str(values[1])


def decode_identity(encoded: bytes) -> ModelIdentity:
    """The identity that has exactly this encoding; hostile bytes are only refused.

    Raises:
        MalformedMessage: there is no such identity; the message says why.
    """
    values = _decode(encoded) if len(encoded) <= ENCODED_SIZE_BYTES_MAX else None
    if values is None:
        raise MalformedMessage("it is no list of the fields of an identity")
    version, *names, dtype, axes, chunk_tokens, runs = values
    if type(version) is not int or version != 1:
        raise MalformedMessage(f"encoding {_short(version)} is unknown to this version")
    texts = [text for text in (*names, dtype, axes) if isinstance(text, str)]
    if len(texts) != 6 or type(chunk_tokens) is not int:
        raise MalformedMessage("a field has the wrong type")
    model, revision, adapter, salt, dtype, axes = texts
    try:
        layout = Layout(dtype, chunk_tokens, _layers(runs), axes)
        identity = ModelIdentity(model, revision, layout, adapter, salt)
    except InvalidRequest as error:
        raise MalformedMessage(str(error)) from error
    if identity.encoded != encoded:
        raise MalformedMessage("it is not the one encoding of its identity")
    return identity


def _layers(runs: object) -> tuple[LayerSpec, ...]:
    """Expanded only once the sum of the runs is known to be in bounds."""
    if not isinstance(runs, list) or len(runs) > LAYERS_MAX:
        raise MalformedMessage("layers is no list of runs")
    count = 0
    layers: list[LayerSpec] = []
    for run in runs:
        if not isinstance(run, list) or len(run) != 5 or any(type(it) is not int for it in run):
            raise MalformedMessage("a run of layers is no list of 5 numbers")
        repeat, kind, kv_heads, head_dim, opaque_bytes = run
        count += repeat
        if repeat < 1 or count > LAYERS_MAX or kind not in list(LayerKind):
            raise MalformedMessage(f"a run of {repeat} layers of kind {kind}")
        layers.extend([LayerSpec(LayerKind(kind), kv_heads, head_dim, opaque_bytes)] * repeat)
    return tuple(layers)


def differences(asked: bytes, stored: bytes) -> list[str]:
    """One text per differing field, such as "dtype (asked 'float16', stored 'bfloat16')"."""
    ours, theirs = _decode(asked), _decode(stored)
    if ours is None or theirs is None:
        return ["encoding (not readable by this version)"]
    return [
        name if name in _SECRET else f"{name} (asked {_short(mine)}, stored {_short(other)})"
        for name, mine, other in zip(_FIELDS, ours, theirs, strict=True)
        if mine != other
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _decode(encoded: bytes) -> list[object] | None:
    try:
        values = msgpack.unpackb(encoded)
    except ValueError:
        return None
    if not isinstance(values, list) or len(values) != len(_FIELDS):
        return None
    return values
