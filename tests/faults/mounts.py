"""What the tests of this folder share: a small tmpfs, a server with its client, chunk by chunk."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from kvclient import ChunkStatus, Client, Descriptor, Verdict
from kvserve.testing.fuse_mount import FaultyMount
from kvserve.testing.server_process import ServerProcess
from tests.payload import payload_for, small_descriptor


class Tmpfs:
    """A tmpfs at `path`, as small as a test wants it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, **options: object) -> Path:
        self.path.mkdir()
        self._run("mount", "-t", "tmpfs", "-o", _joined(options), "kvserve-test", str(self.path))
        return self.path

    def resize(self, **options: object) -> None:
        self._run("mount", "-o", f"remount,{_joined(options)}", str(self.path))

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, capture_output=True)

    @property
    def used_bytes(self) -> int:
        found = os.statvfs(self.path)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)


def _joined(options: dict[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items())


@cache
def why_no_tmpfs() -> str:
    """What keeps this machine from mounting one; empty if nothing does."""
    if os.geteuid() != 0:
        return "mounting needs root"
    with tempfile.TemporaryDirectory() as directory:
        tree = Tmpfs(Path(directory) / "try")
        try:
            tree.mount(size="64k")
        except (OSError, subprocess.CalledProcessError) as error:
            return f"cannot mount a tmpfs here: {getattr(error, 'stderr', '') or error}"
        finally:
            tree.unmount()
    return ""


class Serving:
    """A server process and a client of it."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.client = Client(process.address, timeout_s=20)

    def put(self, descriptor: Descriptor, payload: bytes | bytearray) -> list[Verdict]:
        """Stores every layer; the verdicts."""
        with self.client.store(descriptor, payload) as handle:
            for layer_index in descriptor.layer_order:
                handle.store_layer(layer_index)
            return handle.finish().verdicts

    def get(self, descriptor: Descriptor, payload: bytes | bytearray) -> list[Verdict]:
        """Fetches every layer; the verdicts. What is a hit must have the bytes of `payload`."""
        target = bytearray(len(payload))
        with self.client.fetch(descriptor, target) as handle:
            verdicts = handle.wait().verdicts
        for chunk, verdict in enumerate(verdicts):
            for layer, start in enumerate(descriptor.payload_offsets):
                size = descriptor.layout.slice_sizes[layer]
                at = start + chunk * size
                if verdict.status is ChunkStatus.HIT:
                    assert target[at : at + size] == payload[at : at + size], (chunk, layer)
        return verdicts

    def end(self) -> None:
        self.client.close()
        self.process.kill()


class Case:
    """One tenant's chunks on a mount that others use too: 8 chunks, and one of them to be hit."""

    bad = 3

    def __init__(self, mount: FaultyMount, serving: Serving, tenant: str) -> None:
        self.mount = mount
        self.serving = serving
        self.descriptor = small_descriptor(tenant=tenant)
        self.payload = payload_for(self.descriptor)
        self.tree = mount.backing / tenant

    @property
    def bad_file(self) -> str:
        """A pattern for the bad chunk's file, under its temporary name too."""
        return f"*{self.tree.name}*{self.descriptor.chunk_hashes[self.bad].hex()}*"

    def put(self) -> list[Verdict]:
        return self.serving.put(self.descriptor, self.payload)

    def get(self) -> list[Verdict]:
        return self.serving.get(self.descriptor, self.payload)

    def hits(self) -> list[bool]:
        return self.serving.client.lookup(self.descriptor).hits

    def all_but(self, one: ChunkStatus, others: ChunkStatus) -> list[ChunkStatus]:
        """`one` for the bad chunk."""
        return [one if it == self.bad else others for it in range(self.descriptor.chunk_count)]

    def stored_file(self) -> Path:
        """The bad chunk's published file, behind the mount's back."""
        (found,) = self.tree.rglob(self.descriptor.chunk_hashes[self.bad].hex())
        return found

    def quarantined(self) -> list[Path]:
        return list(self.mount.backing.glob(f".quarantine/{self.tree.name}@*"))


def statuses(verdicts: Sequence[Verdict]) -> list[ChunkStatus]:
    return [verdict.status for verdict in verdicts]


def chunk_files(tree: Path) -> list[Path]:
    """Every published chunk of a root or a tenant."""
    files = [path for path in tree.rglob("*") if path.is_file() and path.name != "identity"]
    return [path for path in files if not any(part.startswith(".") for part in path.parts)]


def temp_files(tree: Path) -> list[Path]:
    """Files on their way into the tree."""
    return [path for path in tree.rglob(".*") if path.is_file()]


def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
