"""What the documents say is what the code does: the disk format and the example settings."""

import inspect
import re
from enum import Enum
from pathlib import Path

import pytest
import xxhash

import kvclient
from kvclient import AsyncClient, BlockingFetch, BlockingStore, Client
from kvserve.config import Config, ServerConfig, StoreConfig, load_config, render_toml
from kvserve.format.chunk_file import ALIGNMENT_BYTES, MAGIC, VERSION, ChunkGeometry
from kvserve.metrics import Metrics
from kvserve.model import ChunkStatus, Verdict
from kvserve.open_tree import quotas_of
from tests.golden.chunks import GQA
from tests.trees import tree_on

ROOT = Path(__file__).parent.parent
DISK_FORMAT = (ROOT / "docs" / "disk_format.md").read_text("utf-8")
_HEX_LINE = re.compile(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  +(\S.*))?$", re.M)


class TestDiskFormat:
    """docs/disk_format.md"""

    lines = tuple(
        (int(at, 16), bytes.fromhex(data), meaning)
        for at, data, meaning in _HEX_LINE.findall(DISK_FORMAT)
    )

    def test_the_example_is_the_golden_file(self) -> None:
        golden = GQA.file.read_bytes()
        assert len(self.lines) > 30
        for at, data, meaning in self.lines:
            assert golden[at : at + len(data)] == data, f"{at:06x} {meaning}"

    def test_the_example_shows_every_byte_of_the_header(self) -> None:
        end = 0
        for at, data, _ in self.lines:
            if at == end:
                end += len(data)
        assert end == ChunkGeometry(GQA.descriptor.key(0)).header_size_bytes

    def test_the_example_shows_the_start_of_every_slice(self) -> None:
        starts = {at for at, _, _ in self.lines}
        assert starts >= set(ChunkGeometry(GQA.descriptor.key(0)).slice_offsets)

    def test_what_is_not_shown_is_zero_or_payload(self) -> None:
        golden = bytearray(GQA.file.read_bytes())
        geometry = ChunkGeometry(GQA.descriptor.key(0))
        for at, data, _ in self.lines:
            golden[at : at + len(data)] = bytes(len(data))
        for at, size in zip(geometry.slice_offsets, geometry.layout.slice_sizes, strict=True):
            golden[at : at + size] = bytes(size)
        assert not any(golden)

    @pytest.mark.parametrize(
        "said",
        [
            f"The disk format, version {VERSION}",
            f"| 8 | u16 | version | {VERSION} |",
            f"`{MAGIC.hex(' ')}`",
            f"rounded up to {ALIGNMENT_BYTES}",
            "XXH3-64 with seed 0",
            "little-endian",
            GQA.path,
            f"Its {len(GQA.file.read_bytes()):,} bytes",
            f"{len(GQA.descriptor.identity.encoded)} bytes at 0x2b",
            f"starts with `{GQA.descriptor.identity.namespace[:8]}`",
            "the checksum of the chunk hash with "
            f"`{xxhash.xxh3_64_hexdigest(GQA.descriptor.chunk_hashes[0])[:3]}`",
        ],
    )
    def test_the_numbers_in_the_text(self, said: str) -> None:
        assert said in " ".join(DISK_FORMAT.split())

    def test_every_miss_is_in_the_text(self) -> None:
        for status in ChunkStatus:
            if status.name.startswith("MISS_"):
                assert f"`{status.name}`" in DISK_FORMAT


class TestExampleSettings:
    """deploy/kvserve.example.toml"""

    path = ROOT / "deploy" / "kvserve.example.toml"

    def test_it_is_rendered_from_the_defaults(self) -> None:
        """`python -c` with this expression makes it again."""
        assert self.path.read_text("utf-8") == render_toml(Config(), with_comments=True)

    def test_a_server_accepts_it(self) -> None:
        assert load_config(self.path, {}) == Config()


class TestTwoTenants:
    """deploy/example-two-tenants.toml"""

    config = load_config(ROOT / "deploy" / "example-two-tenants.toml", {})

    def test_what_it_says_is_what_holds(self) -> None:
        quotas = quotas_of(self.config)
        assert quotas.total.size_bytes == 2 << 40
        assert quotas.of("chat").ceiling.size_bytes == 1800 << 30
        assert quotas.of("chat").floor_size_bytes == 1 << 40
        assert quotas.of("batch").floor_size_bytes == 0
        assert quotas.of("anybody").ceiling.size_bytes == 200 << 30
        assert self.config.server.metrics_listen

    def test_the_room_above_the_high_watermark(self) -> None:
        capacity = self.config.capacity
        room = capacity.size_bytes_max * (1 - capacity.high_watermark)
        text = (ROOT / "deploy" / "example-two-tenants.toml").read_text("utf-8")
        assert f"{room / 2**30:.0f} GiB" in text
        assert f"{1 - capacity.high_watermark:.0%}".replace("%", " %") in text


class TestService:
    """deploy/kvserve.service"""

    text = (ROOT / "deploy" / "kvserve.service").read_text("utf-8")

    def test_it_lets_a_server_drain(self) -> None:
        found = re.search(r"^TimeoutStopSec=(\d+)$", self.text, re.M)
        assert found is not None
        assert int(found.group(1)) > ServerConfig().drain_timeout_s
        assert f"({ServerConfig().drain_timeout_s:.0f} s)" in self.text

    def test_it_may_open_as_many_files_as_the_settings_want(self) -> None:
        found = re.search(r"^LimitNOFILE=(\d+)$", self.text, re.M)
        assert found is not None
        assert int(found.group(1)) > 2 * StoreConfig().open_files_max


class TestOperations:
    """docs/operations.md"""

    text = (ROOT / "docs" / "operations.md").read_text("utf-8")

    def test_every_metric_is_there(self, tmp_path: Path) -> None:
        metrics = Metrics(tree_on(tmp_path))
        metrics.answered("lookup", [Verdict(ChunkStatus.HIT)])
        for family in metrics.registry.collect():
            total = "_total" if family.type == "counter" else ""
            assert f"`{family.name}{total}" in self.text, family.name


class TestDocstrings:
    """The client's docstrings are its reference, see docs/client.md."""

    @pytest.mark.parametrize("name", kvclient.__all__)
    def test_every_public_name_has_one(self, name: str) -> None:
        found = getattr(kvclient, name)
        assert inspect.getdoc(found), name
        if not inspect.isclass(found) or issubclass(found, Enum):
            return
        for method, value in vars(found).items():
            if method.startswith("_") or not (callable(value) or isinstance(value, property)):
                continue
            if found in (Client, AsyncClient, BlockingFetch, BlockingStore):
                assert inspect.getdoc(getattr(found, method)), f"{name}.{method}"
