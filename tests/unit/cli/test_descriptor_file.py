"""Descriptor files: what they say is what comes out, and mistakes are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvserve.cli.descriptor_file import read_descriptor
from kvserve.errors import InvalidRequest
from kvserve.model import Descriptor, Layout, ModelIdentity, Shard, attention, latent, opaque
from kvserve.prefix import chunk_hashes

GOOD: dict[str, Any] = {
    "model": "org/m",
    "revision": "r1",
    "dtype": "bfloat16",
    "chunk_tokens": 4,
    "layers": [{"kind": "attention", "count": 2, "kv_heads": 2, "head_dim": 8}],
    "tokens": list(range(9)),
}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_json(content: Any) -> Descriptor:
        path = tmp_path / "descriptor.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_descriptor(path)

    return read_json


def test_the_small_file(read: Any) -> None:
    layout = Layout("bfloat16", 4, (attention(2, 8),) * 2)
    identity = ModelIdentity("org/m", "r1", layout)
    assert read(GOOD) == Descriptor(identity, chunk_hashes(range(9), 4))


def test_every_key(read: Any) -> None:
    layers = [
        {"kind": "attention", "kv_heads": 1, "head_dim": 8},
        {"kind": "latent", "head_dim": 24},
        {"kind": "opaque", "opaque_bytes": 100},
    ]
    hashes = [b"a" * 16, b"b" * 16]
    without = {key: value for key, value in GOOD.items() if key != "tokens"}
    content = {
        **without,
        "tenant": "t",
        "adapter": "lora",
        "salt": "s",
        "axes": "tokens,dim",
        "layers": layers,
        "shard_rank": 1,
        "shard_count": 2,
        "chunk_hashes": [found.hex() for found in hashes],
        "layer_order": [2, 0],
    }
    layout = Layout("bfloat16", 4, (attention(1, 8), latent(24), opaque(100)), "tokens,dim")
    assert read(content) == Descriptor(
        ModelIdentity("org/m", "r1", layout, "lora", "s"),
        tuple(hashes),
        tenant="t",
        shard=Shard(1, 2),
        layer_order=(2, 0),
    )


def test_the_partial_chunk_on_request(read: Any) -> None:
    assert read({**GOOD, "include_partial": True}).chunk_count == 3


BAD: dict[str, tuple[Any, str]] = {
    "no json": ("{", "descriptor.json is no descriptor:\n  file: "),
    "a list": ([], "is no descriptor"),
    "empty": ({}, "model: Field required"),
    "unknown key": ({**GOOD, "modle": "x"}, "modle: Extra inputs"),
    "number as text": ({**GOOD, "chunk_tokens": "4"}, "chunk_tokens: .*integer"),
    "truth as number": ({**GOOD, "chunk_tokens": True}, "chunk_tokens: .*integer"),
    "unknown kind": ({**GOOD, "layers": [{"kind": "mamba"}]}, "layers.0.kind: "),
    "no layers": ({**GOOD, "layers": []}, "layout.layers must be 1"),
    "dtype": ({**GOOD, "dtype": "bf16"}, "dtype 'bf16' is unknown"),
    "both": ({**GOOD, "chunk_hashes": ["00" * 16]}, "either `tokens` or `chunk_hashes`"),
    "neither": (
        {key: value for key, value in GOOD.items() if key != "tokens"},
        "descriptor.json: must have either `tokens` or `chunk_hashes`",
    ),
    "no hex": ({**GOOD, "tokens": None, "chunk_hashes": ["xy"]}, "chunk_hashes must be hex"),
    "short hash": ({**GOOD, "tokens": None, "chunk_hashes": ["00"]}, "a chunk hash of 1 bytes"),
    "too few tokens": (
        {**GOOD, "tokens": [1, 2]},
        "2 tokens make no whole chunk of 4; set `include_partial`",
    ),
    "bad token": ({**GOOD, "tokens": [1, 2, 3, -1]}, "token_ids must be integers from 0"),
    "tenant": ({**GOOD, "tenant": "../x"}, "tenant '../x' must be"),
    "shard": ({**GOOD, "shard_rank": 1}, "shard: rank must be"),
    "order": ({**GOOD, "layer_order": [7]}, "layer_order holds layer 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_named(read: Any, name: str) -> None:
    content, words = BAD[name]
    with pytest.raises(InvalidRequest, match=words):
        read(content)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*absent\.json: No such file"):
        read_descriptor(tmp_path / "absent.json")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*: Is a directory"):
        read_descriptor(tmp_path)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InvalidRequest, match=r"large\.json is larger than 67108864 bytes"):
        read_descriptor(path)


def test_a_broken_rule_of_the_model_names_the_file_too(read: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"descriptor\.json"):
        read({**GOOD, "dtype": "bf16"})


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_of_no_layers_is_refused(read: Any, count: int) -> None:
    more = {"kind": "latent", "count": count, "head_dim": 8}
    with pytest.raises(InvalidRequest, match="count"):
        read({**GOOD, "layers": [*GOOD["layers"], more]})
