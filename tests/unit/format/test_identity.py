"""A miss says which field differs, and never shows a salt."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.format.identity import differences, model_of
from kvserve.model import ModelIdentity, attention
from tests.unit.samples import SMALL, identity_of

BASE = identity_of(salt="secret-1")
CHANGES: dict[str, tuple[ModelIdentity, str]] = {
    "model": (replace(BASE, model="m2"), "model (asked 'm2', stored 'org/small')"),
    "revision": (replace(BASE, revision="r2"), "revision (asked 'r2', stored 'r1')"),
    "adapter": (replace(BASE, adapter="a"), "adapter (asked 'a', stored '')"),
    "dtype": (
        replace(BASE, layout=replace(SMALL, dtype="float16")),
        "dtype (asked 'float16', stored 'bfloat16')",
    ),
    "axes": (
        replace(BASE, layout=replace(SMALL, axes="2,heads,tokens,dim")),
        "axes (asked '2,heads,tokens,dim', stored '2,tokens,heads,dim')",
    ),
    "chunk_tokens": (
        replace(BASE, layout=replace(SMALL, chunk_tokens=8)),
        "chunk_tokens (asked 8, stored 4)",
    ),
    "layers": (
        replace(BASE, layout=replace(SMALL, layers=(attention(2, 8),))),
        "layers (asked [[1, 1, 2, 8, 0]], stored [[2, 1, 2, 8, 0]])",
    ),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_names_the_field_and_both_values(field: str) -> None:
    changed, text = CHANGES[field]
    assert differences(changed.encoded, BASE.encoded) == [text]


def test_equal_identities_have_no_difference() -> None:
    assert differences(BASE.encoded, identity_of(salt="secret-1").encoded) == []


def test_every_difference_is_named() -> None:
    other = replace(BASE, revision="r2", layout=replace(SMALL, dtype="int8"))
    found = differences(BASE.encoded, other.encoded)
    assert [text.split()[0] for text in found] == ["revision", "dtype"]


def test_a_salt_is_named_and_never_shown() -> None:
    """A4: a salt may be a secret between the users of one tenant."""
    other = replace(BASE, salt="secret-2")
    assert differences(other.encoded, BASE.encoded) == ["salt"]
    both = differences(replace(other, model="m2").encoded, BASE.encoded)
    assert "secret" not in " ".join(both)


def test_the_model_is_readable_from_its_encoding() -> None:
    assert model_of(BASE.encoded) == "org/small"


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb({"a": 1}), BASE.encoded[:-1]]
)
def test_what_is_no_identity_is_said_to_be_none(bad: bytes) -> None:
    assert model_of(bad) is None
    assert differences(BASE.encoded, bad) == ["encoding (not readable by this version)"]
    assert differences(bad, BASE.encoded) == ["encoding (not readable by this version)"]


@given(st.binary(max_size=60))
def test_no_bytes_on_a_disk_break_the_explanation(noise: bytes) -> None:
    model_of(noise)
    assert differences(BASE.encoded, noise)


@given(st.integers(0, len(BASE.encoded) - 1), st.integers(0, 255))
def test_a_damaged_identity_breaks_nothing_either(at: int, value: int) -> None:
    damaged = bytearray(BASE.encoded)
    damaged[at] = value
    model_of(bytes(damaged))
    differences(BASE.encoded, bytes(damaged))
