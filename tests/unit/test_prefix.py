"""Chunk hashes are the same in every process, chained, and continue across calls."""

import hashlib
import subprocess
import sys
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import InvalidRequest
from kvserve.prefix import chunk_hashes

# Of the tokens 0 to 7 in chunks of 4. On disks as file names: never to change.
KNOWN = [
    "b16ff8ce3a9bb9988d6c2066b6fe30b7a1687ff27df02f46d9fa2c8535f3973b",
    "e36139c839c27babcb426f229cd393bc273d1420ef338f8d5bc3c0244ac2c40e",
]
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_known_values() -> None:
    assert [found.hex() for found in chunk_hashes(range(8), 4)] == KNOWN


@pytest.mark.parametrize("seed", ["0", "1"])
def test_hashes_do_not_depend_on_the_process(seed: str) -> None:
    """T1, D1: Python's `hash()` differs by process; these must not."""
    script = (
        "from kvserve.prefix import chunk_hashes\n"
        "print(*[found.hex() for found in chunk_hashes(range(8), 4)])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == KNOWN


def test_the_rule_written_out() -> None:
    """H_i = SHA256(domain, length of H_{i-1}, H_{i-1}, tokens as little-endian u32)."""
    domain = b"kvserve chunk hash 1\0"
    first = hashlib.sha256(domain + b"\0\0" + bytes.fromhex("07000000 01000000")).digest()
    second = hashlib.sha256(domain + b"\x20\0" + first + bytes.fromhex("02000000 ffffffff"))
    assert chunk_hashes([7, 1, 2, 2**32 - 1], 2) == (first, second.digest())


def test_each_hash_names_the_whole_prefix() -> None:
    base = chunk_hashes([1, 2, 3, 4, 5, 6], 2)
    other_start = chunk_hashes([9, 2, 3, 4, 5, 6], 2)
    other_end = chunk_hashes([1, 2, 3, 4, 5, 7], 2)
    assert not set(base) & set(other_start), "a change at the start changes every hash"
    assert base[:2] == other_end[:2]
    assert base[2] != other_end[2]


def test_equal_tokens_at_another_place_have_another_hash() -> None:
    assert len(set(chunk_hashes([5] * 8, 2))) == 4


def test_partial_chunk_only_on_request() -> None:
    assert len(chunk_hashes(range(7), 4)) == 1
    assert chunk_hashes(range(3), 4) == ()
    with_end = chunk_hashes(range(7), 4, include_partial=True)
    assert len(with_end) == 2
    assert with_end[0].hex() == KNOWN[0]
    assert with_end[1].hex() != KNOWN[1], "three tokens are not four"
    assert chunk_hashes(range(8), 4, include_partial=True) == chunk_hashes(range(8), 4)


def test_no_tokens_have_no_chunks() -> None:
    assert chunk_hashes([], 4) == chunk_hashes([], 4, include_partial=True) == ()


@given(tokens_lists, st.integers(1, 8), st.integers(0, 5))
def test_parent_continues_the_chain(tokens: list[int], chunk_tokens: int, cut: int) -> None:
    whole = chunk_hashes(tokens, chunk_tokens)
    head = chunk_hashes(tokens[: cut * chunk_tokens], chunk_tokens)
    parent = head[-1] if head else b""
    tail = chunk_hashes(tokens[cut * chunk_tokens :], chunk_tokens, parent=parent)
    assert head + tail == whole


@given(tokens_lists, st.integers(1, 8))
def test_one_hash_of_32_bytes_for_each_whole_chunk(tokens: list[int], chunk_tokens: int) -> None:
    hashes = chunk_hashes(tokens, chunk_tokens)
    assert len(hashes) == len(tokens) // chunk_tokens
    assert all(len(found) == 32 for found in hashes)
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    "same",
    [tuple(range(8)), array("q", range(8)), np.arange(8), np.arange(8, dtype=np.uint16)],
    ids=["tuple", "array", "int64", "uint16"],
)
def test_any_sequence_of_integers_hashes_alike(same: Any) -> None:
    assert [found.hex() for found in chunk_hashes(same, 4)] == KNOWN


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], "ab", [None]])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids must be integers from 0 to 2\*\*32 - 1"):
        chunk_hashes(tokens, 1)


@pytest.mark.parametrize("chunk_tokens", [0, -4])
def test_chunk_tokens_below_one_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="chunk_tokens must be at least 1"):
        chunk_hashes([1], chunk_tokens)


@pytest.mark.parametrize("tokens", [b"abcd", bytearray(b"abcd")])
def test_bytes_are_a_sequence_of_integers_too(tokens: bytes) -> None:
    """Byte-level models: `bytes` is an Iterable[int], so it must hash like its list."""
    assert chunk_hashes(tokens, 1) == chunk_hashes(list(tokens), 1)
