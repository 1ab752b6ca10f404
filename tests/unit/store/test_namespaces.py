"""A miss that is only a difference of identity says so; another tenant's chunks stay unknown."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvserve.errors import StorageFull
from kvserve.fs import PosixFileSystem
from kvserve.model import ChunkKey, Descriptor, Shard
from kvserve.store.namespaces import Namespaces
from kvserve.store.paths import TempNames, chunk_path, namespace_dir, shard_dir
from tests.unit.samples import SMALL, descriptor_of, hash_of, identity_of

FP16 = replace(SMALL, dtype="float16")
KEY = descriptor_of().key(0)


@pytest.fixture
def namespaces(tmp_path: Path) -> Namespaces:
    return Namespaces(
        PosixFileSystem(), str(tmp_path), TempNames("aB3", Random(1)), survives_power_loss=False
    )


def put(namespaces: Namespaces, root: Path, key: ChunkKey) -> None:
    """What the store does, as far as a reason needs it: the identity, and a file of that name."""
    namespaces.ensure_blocking(key)
    path = root / chunk_path(shard_dir(key), key.chunk_hash)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_the_identity_file_is_the_encoded_identity(namespaces: Namespaces, tmp_path: Path) -> None:
    namespaces.ensure_blocking(KEY)
    namespaces.ensure_blocking(KEY)
    directory = tmp_path / namespace_dir(KEY)
    assert (directory / "identity").read_bytes() == KEY.identity.encoded
    assert [path.name for path in directory.iterdir()] == ["identity"], "no temporary file stays"


def test_an_identity_file_is_never_rewritten(namespaces: Namespaces, tmp_path: Path) -> None:
    namespaces.ensure_blocking(KEY)
    before = (tmp_path / namespace_dir(KEY) / "identity").stat().st_ino
    Namespaces(
        PosixFileSystem(), str(tmp_path), TempNames("aB3", Random(2)), survives_power_loss=False
    ).ensure_blocking(KEY)
    assert (tmp_path / namespace_dir(KEY) / "identity").stat().st_ino == before


def test_the_reason_names_the_field(namespaces: Namespaces, tmp_path: Path) -> None:
    put(namespaces, tmp_path, Descriptor(identity_of(FP16), (hash_of(0),)).key(0))
    assert namespaces.explain_miss_blocking(KEY) == (
        "stored under another identity, which differs in dtype (asked 'bfloat16', stored 'float16')"
    )


@pytest.mark.parametrize(
    "stored",
    [
        Descriptor(identity_of(FP16, model="org/other"), (hash_of(0),)).key(0),
        Descriptor(identity_of(FP16), (hash_of(1),)).key(0),
        Descriptor(identity_of(FP16), (hash_of(0),), shard=Shard(0, 2)).key(0),
    ],
    ids=["another model", "another chunk", "another shard"],
)
def test_no_reason_where_the_chunk_is_simply_absent(
    namespaces: Namespaces, tmp_path: Path, stored: ChunkKey
) -> None:
    put(namespaces, tmp_path, stored)
    assert namespaces.explain_miss_blocking(KEY) == ""


def test_another_tenants_chunks_are_never_mentioned(namespaces: Namespaces, tmp_path: Path) -> None:
    """A4: whether another tenant has a prefix is nobody's business."""
    put(namespaces, tmp_path, Descriptor(identity_of(FP16), (hash_of(0),), tenant="b").key(0))
    assert namespaces.explain_miss_blocking(KEY) == ""


def test_a_salt_is_not_told(namespaces: Namespaces, tmp_path: Path) -> None:
    stored = Descriptor(identity_of(salt="their secret"), (hash_of(0),)).key(0)
    put(namespaces, tmp_path, stored)
    asked = Descriptor(identity_of(salt="our secret"), (hash_of(0),)).key(0)
    assert namespaces.explain_miss_blocking(asked) == (
        "stored under another identity, which differs in salt"
    )


def test_no_reason_in_a_namespace_that_the_tenant_has(
    namespaces: Namespaces, tmp_path: Path
) -> None:
    """Then the chunk is absent or evicted; nothing is listed on the request path."""
    put(namespaces, tmp_path, Descriptor(identity_of(FP16), (hash_of(0),)).key(0))
    namespaces.ensure_blocking(KEY)
    again = Namespaces(
        PosixFileSystem(), str(tmp_path), TempNames("aB3", Random(3)), survives_power_loss=False
    )
    assert namespaces.explain_miss_blocking(KEY) == again.explain_miss_blocking(KEY) == ""


@pytest.mark.parametrize("content", [b"", b"\xc1garbage", b"\x92\x01\x02"])
def test_a_damaged_identity_file_is_passed_over(
    namespaces: Namespaces, tmp_path: Path, content: bytes
) -> None:
    directory = tmp_path / "default" / "0"
    directory.mkdir(parents=True)
    (directory / "identity").write_bytes(content)
    (tmp_path / "default" / "stray file").write_text("left by an administrator")
    put(namespaces, tmp_path, Descriptor(identity_of(FP16), (hash_of(0),)).key(0))
    assert "differs in dtype" in namespaces.explain_miss_blocking(KEY)


def test_an_empty_tree_has_no_reasons(namespaces: Namespaces) -> None:
    assert namespaces.explain_miss_blocking(KEY) == ""


class FullFileSystem(PosixFileSystem):
    """No space for bytes, as a full object storage target: names can still be made."""

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        raise StorageFull("write: ENOSPC")


def test_a_failed_identity_file_leaves_nothing(tmp_path: Path) -> None:
    namespaces = Namespaces(
        FullFileSystem(), str(tmp_path), TempNames("aB3", Random(1)), survives_power_loss=False
    )
    with pytest.raises(StorageFull):
        namespaces.ensure_blocking(KEY)
    assert list((tmp_path / namespace_dir(KEY)).iterdir()) == []
