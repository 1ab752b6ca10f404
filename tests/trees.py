"""A tree as a server has it, on any file system, without the server."""

from itertools import count
from pathlib import Path
from random import Random

from kvserve.config import load_config
from kvserve.fs import FileSystem, PosixFileSystem
from kvserve.open_tree import OpenTree, build_tree
from kvserve.store.owners import Owner

# A server that starts again has other random names, as a real one has; tests stay repeatable.
_seeds = count()


def tree_on(
    root: Path,
    fs: FileSystem | None = None,
    *,
    tag: str = "aB3",
    open_files_max: int = 64,
    **sections: dict[str, object],
) -> OpenTree:
    """`sections` are settings, such as `store={"durability": "power"}`; `open_files_max` may be
    below what they allow."""
    fs = fs or PosixFileSystem()
    random = Random(next(_seeds))
    owner = Owner(fs, str(root), random, lease_s=60.0)
    owner.tag = tag
    store = {"root": str(root), "known_chunks_max": 1000, **sections.pop("store", {})}
    config = load_config(None, {"store": store, **sections})
    tree = build_tree(fs, str(root), config, owner, random)
    tree.store.open_chunks._files_max = open_files_max
    return tree
