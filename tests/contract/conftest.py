"""A fresh store for each test; its files are closed at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.store_tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path / "kv")
    yield tree
    tree.store.open_chunks.close_idle_blocking()
