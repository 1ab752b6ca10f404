"""Compares encoded identities, so that a miss can say which field differs."""

from typing import Final

import msgpack

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
