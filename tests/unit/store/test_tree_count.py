"""The count of a tree by names, and a few looks at sizes."""

from pathlib import Path

from kvserve.fs import FileStat, PosixFileSystem
from kvserve.policy.quota import Amount, Quotas
from kvserve.store.ledger import Ledger
from kvserve.store.tree import walk_blocking
from kvserve.store.tree_count import TreeCount

SHARD = f"{'5e' * 16}/0of1"


class Looking(PosixFileSystem):
    looks = 0

    def stat(self, path: str) -> FileStat | None:
        self.looks += 1
        return super().stat(path)


def put(root: Path, name: str, size_bytes: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size_bytes))


def count(root: Path, fs: PosixFileSystem) -> dict[str, Amount]:
    ledger = Ledger(Quotas())
    counting = TreeCount(fs, ledger)
    for directory in walk_blocking(fs, str(root)):
        counting.enter(directory)
        for entry in directory.entries():
            counting.add_blocking(directory, entry.name)
    found, own = counting.finish()
    assert ledger.usage() == found
    assert own == {}
    return found


def test_chunks_are_counted_by_tenant_and_shard(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path, f"t/{SHARD}/abc/{number:032x}", 100)
        put(tmp_path, f"t/{'5f' * 16}/0of1/abc/{number:032x}", 7)
        put(tmp_path, f"u/{SHARD}/00{number}/{number:064x}", 30)
    fs = Looking()
    assert count(tmp_path, fs) == {"t": Amount(1070, 20), "u": Amount(300, 10)}
    assert fs.looks == 9, "three for each shard"


def test_other_files_do_not_count(tmp_path: Path) -> None:
    put(tmp_path, f"t/{SHARD}/abc/{1:032x}", 100)
    put(tmp_path, f"t/{SHARD}/abc/.{2:032x}.aB3xY7", 100)
    put(tmp_path, f"t/{SHARD}/abc/notes", 100)
    put(tmp_path, f"t/{SHARD}/{3:032x}", 100)
    put(tmp_path, f"t/{'5e' * 16}/identity", 100)
    put(tmp_path, ".quarantine/x", 100)
    assert count(tmp_path, Looking()) == {"t": Amount(100, 1)}


def test_files_that_were_cut_short_do_not_mislead(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path, f"t/{SHARD}/abc/{number:032x}", 100)
    for number in (0, 1):
        put(tmp_path, f"t/{SHARD}/abc/{number:032x}", 3)
    (found,) = count(tmp_path, Looking()).values()
    assert found.files == 10
    assert 800 < found.size_bytes <= 1000, "they count as themselves, or as whole; others as whole"
