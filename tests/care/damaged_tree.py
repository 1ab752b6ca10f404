"""Trees with one file of every kind that a check can meet; what it must say of each."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from kvserve.fs import PosixFileSystem
from kvserve.model import ModelIdentity
from kvserve.store.owners import Owner
from kvserve.store.paths import TempNames
from tests.contract.store_tree import Tree
from tests.unit.samples import HYBRID

DEAD_TAG = "zZ9"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def good_tree(root: Path, chunks: int = 12) -> Tree:
    """Every chunk whole, the identity file too. The header of a chunk ends at 4096, its slices
    start at 4096, 8192 and 12288."""
    tree = Tree(root, chunks=chunks)
    tree.store.ensure_namespace_blocking(tree.descriptor.key(0))
    tree.put(*range(chunks))
    return tree


def place(tree: Tree, index: int) -> str:
    return str(tree.file(index).relative_to(tree.root))


def namespace_dir(tree: Tree) -> Path:
    return tree.file(0).parents[2]


def live_owner(root: Path, seed: int = 77) -> Owner:
    owner = Owner(PosixFileSystem(), str(root), Random(seed), lease_s=60.0)
    owner.claim_blocking()
    return owner


def temp_beside(path: Path, tag: str) -> Path:
    temp = Path(TempNames(tag, Random(3)).beside(str(path)))
    temp.write_bytes(b"half")
    return temp


def damage(tree: Tree) -> dict[str, tuple[str, str]]:
    """Path -> (kind, words of the reason) of everything that is not good."""
    expected: dict[str, tuple[str, str]] = {}

    def harm(index: int, reason: str, how: Callable[[Path], object]) -> None:
        how(tree.file(index))
        expected[place(tree, index)] = ("corrupt", reason)

    harm(0, "16000 bytes long instead of 16384", lambda path: os.truncate(path, 16000))
    harm(1, "the file is empty", lambda path: os.truncate(path, 0))
    harm(2, "header checksum does not match", lambda path: flip(path, 60))
    harm(3, "checksum of layer 0 does not match", lambda path: flip(path, 4096))
    harm(4, "checksum of layer 2 does not match", lambda path: flip(path, 12288 + 99))
    harm(5, "longer than its 16384 bytes", lambda path: os.truncate(path, 5 << 20))
    harm(6, "not a chunk file", lambda path: path.write_bytes(b"#!/bin/sh\n" * 2000))
    harm(7, "chunk file version", lambda path: flip(path, 8))
    _swap(tree.file(8), tree.file(9))
    for index, other in ((8, 9), (9, 8)):
        expected[place(tree, index)] = ("misplaced", f"it is the chunk of {place(tree, other)}")
    astray = tree.root / "other-tenant" / tree.file(10).relative_to(tree.root / "default")
    astray.parent.mkdir(parents=True)
    astray.write_bytes(tree.file(10).read_bytes())
    expected[str(astray.relative_to(tree.root))] = ("misplaced", f"of {place(tree, 10)}")
    expected |= _strangers(tree)
    expected |= _temporaries(tree)
    return expected


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _strangers(tree: Tree) -> dict[str, tuple[str, str]]:
    fan = tree.file(11).parent
    strangers = [
        tree.root / "README",
        tree.root / "default" / "notes.txt",
        fan / "core.1234",
        fan / "line\nbreak\x1b[31m",
        fan / os.fsdecode(b"no text \xff"),
    ]
    for path in strangers:
        path.write_bytes(b"mine")
    folder = tree.root / "lost+found" / "deep"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"mine")
    found = dict.fromkeys([*strangers, folder.parent], ("unknown", "not kvserve's"))
    return {str(it.relative_to(tree.root)): why for it, why in (found | _no_files(fan)).items()}


def _no_files(fan: Path) -> dict[Path, tuple[str, str]]:
    """With names of chunks."""
    fifo, loop, folder = (fan / (name * 32) for name in ("c1", "c2", "c3"))
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    folder.mkdir()
    (folder / "file").write_bytes(b"mine")
    why = "in the place of a file of kvserve's"
    return {
        fifo: ("misplaced", f"no plain file, {why}"),
        loop: ("misplaced", f"no plain file, {why}"),
        folder: ("misplaced", f"directory, not entered, {why}"),
    }


def _temporaries(tree: Tree) -> dict[str, tuple[str, str]]:
    expired = live_owner(tree.root, 5)
    old = time.time() - 3600
    os.utime(tree.root / ".servers" / expired.tag, (old, old))
    orphans = [
        temp_beside(tree.file(0), DEAD_TAG),
        temp_beside(tree.file(3), expired.tag),
        temp_beside(namespace_dir(tree) / "identity", DEAD_TAG),
        temp_beside(tree.root / "probe", DEAD_TAG),
    ]
    live = temp_beside(tree.file(4), live_owner(tree.root).tag)
    found = {str(it.relative_to(tree.root)): ("orphan", "which is dead") for it in orphans}
    found[str(live.relative_to(tree.root))] = ("live", "lives")
    return found


def other_identity() -> ModelIdentity:
    return ModelIdentity("org/other", "r9", HYBRID)
