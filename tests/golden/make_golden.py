"""Writes the golden chunk files that are missing: `python -m tests.golden.make_golden`.

An existing file is never rewritten: it stands for the files on users' disks. Where today's code
would write other bytes, this says so and fails; the way out is a new format version.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from kvserve.format.chunk_file import checksum
from tests.golden.chunks import ALL, GoldenChunk
from tests.trees import tree_on


def written_today(golden: GoldenChunk, root: Path) -> Path:
    """The chunk as the store of today publishes it under `root`; the path of its file."""
    store = tree_on(root).store
    where = store.locate(golden.descriptor)
    writer = store.writer(where, 0)

    slices = golden.payloads()
    for layer_index, data in enumerate(slices):
        writer.write_blocking(layer_index, 0, memoryview(data))
    writer.commit_blocking([checksum(data) for data in slices])
    return Path(where.path(0))


def main() -> int:
    status = 0
    for golden in ALL:
        with TemporaryDirectory() as directory:
            data = written_today(golden, Path(directory)).read_bytes()
        if not golden.file.exists():
            golden.file.write_bytes(data)
            sys.stdout.write(f"{golden.file.name}: made, {len(data)} bytes\n")
        elif golden.file.read_bytes() != data:
            sys.stderr.write(f"{golden.file.name}: today's code writes other bytes\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
