"""The command line as a person or a script uses it: real processes, exit codes, words."""

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvserve.cli import app, transfers
from kvserve.errors import InvalidRequest
from kvserve.testing.server_process import ServerProcess
from tests.cli.run_here import run_here

DOCS = Path(__file__).parents[2] / "docs"


def kvserve(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", "kvserve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("cli") / "kv") as server:
        yield server


@pytest.fixture
def descriptor(tmp_path: Path) -> Path:
    """The example of docs/command_line.md."""
    text = (DOCS / "command_line.md").read_text("utf-8")
    found = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert found is not None
    path = tmp_path / "prefix.json"
    path.write_text(found.group(1), "utf-8")
    return path


def test_put_lookup_get_delete(server: ServerProcess, descriptor: Path, tmp_path: Path) -> None:
    at = ("--server", server.address)
    payload, copy = tmp_path / "kv.bin", tmp_path / "copy.bin"
    payload.write_bytes(os.urandom(131_072))
    assert "1 MISS_ABSENT" in run_here("lookup", str(descriptor), *at).stdout
    absent = kvserve("get", str(descriptor), str(copy), *at, code=1)
    assert "1 MISS_ABSENT" in absent.stdout
    assert absent.stderr == "", "bars are for terminals"
    assert not copy.exists(), "a file that is not whole is not left behind"
    stored = kvserve("put", str(descriptor), str(payload), *at)
    assert "1 STORED" in stored.stdout
    assert stored.stderr == ""
    again = json.loads(run_here("put", str(descriptor), str(payload), *at, "--json").stdout)
    assert again["statuses"] == ["KNOWN"]
    found = json.loads(run_here("lookup", str(descriptor), *at, "--json").stdout)
    assert (found["prefix_chunks"], found["statuses"]) == (1, ["HIT"])
    assert "1 HIT" in kvserve("get", str(descriptor), str(copy), *at).stdout
    assert copy.read_bytes() == payload.read_bytes()
    assert "1 DELETED" in run_here("delete", str(descriptor), *at).stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.bin", "kv.bin", "prefix.json"]


def test_the_bar_counts_the_bytes_that_came(
    server: ServerProcess, descriptor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a terminal: of chunks that are absent, none."""
    payload, copy = str(tmp_path / "kv.bin"), str(tmp_path / "copy.bin")
    Path(payload).write_bytes(os.urandom(131_072))
    at = ["--server", server.address]
    console = Console(force_terminal=True, width=200, file=io.StringIO())
    monkeypatch.setattr(transfers, "errors", console)

    def last_bar(*arguments: str) -> str:
        CliRunner().invoke(app, [*arguments, *at])
        lines = [
            it for it in re.split(r"[\r\n]", console.file.getvalue()) if "bytes" in it or "/" in it
        ]
        return lines[-1]

    assert "0.0/128.0" in last_bar("get", str(descriptor), copy)
    assert "128.0/128.0" in last_bar("put", str(descriptor), payload)
    assert "128.0/128.0" in last_bar("get", str(descriptor), copy)
    assert "0.0/128.0" in last_bar("put", str(descriptor), payload), "it is there: nothing to send"


def test_stat(server: ServerProcess) -> None:
    info = json.loads(kvserve("stat", "--server", server.address, "--json").stdout)
    assert info["chunk_file_version"] == 1
    assert info["planes"] == ["grpc", "tcp", "shm"]
    assert re.fullmatch(r":\d+", info["data_address"])
    shown = run_here("stat", "--server", server.address).stdout
    assert info["version"] in shown
    assert "grpc, tcp, shm" in shown
    assert kvserve("--version").stdout.strip() == info["version"]


BAD_DESCRIPTORS = {
    "not JSON": ("{", "is no descriptor"),
    "unknown key": ('{"modle": "x"}', "modle: Extra inputs are not permitted"),
    "no tokens": (
        '{"model":"m","revision":"r","dtype":"int8","chunk_tokens":4,'
        '"layers":[{"kind":"latent","head_dim":4}]}',
        "must have either `tokens` or `chunk_hashes`",
    ),
    "too few tokens": (
        '{"model":"m","revision":"r","dtype":"int8","chunk_tokens":4,"tokens":[1,2],'
        '"layers":[{"kind":"latent","head_dim":4}]}',
        "2 tokens make no whole chunk of 4",
    ),
    "short hash": (
        '{"model":"m","revision":"r","dtype":"int8","chunk_tokens":4,"chunk_hashes":["00ff"],'
        '"layers":[{"kind":"latent","head_dim":4}]}',
        "a chunk hash of 2 bytes: must be 16 to 64",
    ),
    "not hex": (
        '{"model":"m","revision":"r","dtype":"int8","chunk_tokens":4,"chunk_hashes":["xx"],'
        '"layers":[{"kind":"latent","head_dim":4}]}',
        "chunk_hashes must be hex",
    ),
}


@pytest.mark.parametrize("name", BAD_DESCRIPTORS)
def test_bad_descriptor_files(tmp_path: Path, name: str) -> None:
    text, words = BAD_DESCRIPTORS[name]
    path = tmp_path / "bad.json"
    path.write_text(text, "utf-8")
    error = run_here("lookup", str(path), code=1).stderr
    assert words in error
    assert str(path) in error or name == "short hash"
    assert "Traceback" not in error


def test_errors_are_one_line_and_name_the_thing(
    server: ServerProcess, descriptor: Path, tmp_path: Path
) -> None:
    payload = tmp_path / "kv.bin"
    payload.write_bytes(bytes(100))
    at = ("--server", server.address)
    wrong_size = kvserve("put", str(descriptor), str(payload), *at, code=1).stderr
    assert "has 100 bytes; 1 chunks of this layout are 131072" in wrong_size
    missing = run_here("put", str(descriptor), str(tmp_path / "none"), *at, code=1).stderr
    assert "none" in missing
    assert "Traceback" not in missing
    nobody = ("--server", "127.0.0.1:9", "--timeout-s", "0.5")
    unreachable = run_here("lookup", str(descriptor), *nobody, code=1).stderr
    assert "127.0.0.1:9" in unreachable
    assert "must be HOST:PORT" in run_here("stat", "--server", "nonsense", code=1).stderr


BAD_STARTS = {
    "no root": ([], "store.root is not set"),
    "port in use": (["--root", "{tmp}", "--listen", "{taken}"], "the port is in use, by another"),
    "address of another host": (
        ["--root", "{tmp}", "--listen", "192.0.2.1:7411", "--set", "server.data_listen=off"],
        "cannot listen on 192.0.2.1:7411 (server.listen): Cannot assign",
    ),
    "root in /proc": (["--root", "/proc/kv"], "mkdir /proc/kv: ENOENT"),
    "root is a file": (["--root", __file__], f"the root {__file__} (store.root) is no directory"),
    "unknown setting": (["--root", "{tmp}", "--set", "limits.foo=1"], "limits.foo: unknown"),
    "unknown section": (["--root", "{tmp}", "--set", "x.y=1"], "x: unknown"),
    "bad value": (
        ["--root", "{tmp}", "--set", "store.io_threads=0"],
        "store.io_threads: Input should be greater than or equal to 1 (got 0)",
    ),
    "bad durability": (["--root", "{tmp}", "--set", "store.durability=x"], "store.durability"),
    "no equals sign": (["--root", "{tmp}", "--set", "limits"], "must be SECTION.KEY=VALUE"),
    "bad address": (["--root", "{tmp}", "--listen", "nonsense"], "server.listen"),
    "address taken": (["--root", "{tmp}", "--listen", "{taken}"], "cannot listen on 127.0.0.1:"),
    "address taken, workers": (
        ["--root", "{tmp}", "--workers", "2", "--listen", "{taken}"],
        "cannot listen on 127.0.0.1:",
    ),
    "root is a file, workers": (
        ["--root", __file__, "--workers", "2", "--listen", "127.0.0.1:0"],
        "is no directory",
    ),
    "workers on a unix socket": (
        ["--root", "{tmp}", "--workers", "2", "--listen", "unix:{tmp}/socket"],
        "listen on HOST:PORT with workers above 1",
    ),
    "ports of workers": (
        ["--root", "{tmp}", "--workers", "3", "--set", "server.data_listen=127.0.0.1:65534"],
        "data_listen: each worker has its own port",
    ),
    "no workers": (["--root", "{tmp}", "--workers", "0"], "greater than or equal to 1"),
    "no config file": (["--root", "{tmp}", "--config", "{tmp}/none.toml"], "cannot read config"),
    "frames larger than messages": (
        ["--root", "{tmp}", "--set", "limits.frame_size_bytes=16MiB"],
        "limits.frame_size_bytes must be at least 64 KiB below",
    ),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_fails_clearly(server: ServerProcess, tmp_path: Path, name: str) -> None:
    arguments, words = BAD_STARTS[name]
    filled = [text.format(tmp=tmp_path, taken=server.address) for text in arguments]
    run = kvserve if "workers" in name else run_here  # those start processes before they fail
    error = run("serve", *filled, code=1).stderr
    assert error.count(words) == 1
    assert "Traceback" not in error


def test_a_root_that_may_not_be_written_names_path_uid_and_errno(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    root = tmp_path / "kv"
    root.mkdir(mode=0o755)
    for directory in (tmp_path, *tmp_path.parents):
        directory.chmod(directory.stat().st_mode | 0o055)
    # Everything is imported before: the interpreter may lie where uid 65534 cannot enter.
    script = """
import asyncio, os, sys
from kvserve.config import load_config
from kvserve.rpc.server import Server

async def start():
    await Server(load_config(None, {"store": {"root": sys.argv[1]}})).start()

os.setgid(65534)
os.setuid(65534)
asyncio.run(start())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(root)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert f"the root {root} cannot be used by uid 65534" in ended.stderr
    assert "EACCES" in ended.stderr


def test_settings_come_from_file_then_options(tmp_path: Path) -> None:
    config = tmp_path / "kvserve.toml"
    config.write_text(
        '[limits]\ntransfers_max = 7\nchunks_max = 9\n[server]\nlog_level = "error"\n'
    )
    server = ServerProcess(tmp_path / "kv", settings=("limits.transfers_max=8",), config=config)
    with server:
        info = json.loads(run_here("stat", "--server", server.address, "--json").stdout)
        assert (info["transfers_max"], info["chunks_max"]) == (8, 9)
        assert "transfers_max = 8" in server.log(), "effective settings are printed"


def test_keys_of_tenants_and_the_settings_explained(tmp_path: Path) -> None:
    def shown(*arguments: str, code: int = 0) -> str:
        ended = CliRunner().invoke(app, ["serve", "--print-config", *arguments])
        assert ended.exit_code == code, ended.output
        return ended.stdout

    assert shown() == (DOCS.parent / "deploy" / "kvserve.example.toml").read_text("utf-8")
    config = tmp_path / "kvserve.toml"
    config.write_text("[tenants.b]\nfiles_max = 7\n")
    tenants = ("--set", "tenants.b.size_bytes_max=500000", "--set", "tenants.a.b.files_max=3")
    found = tomllib.loads(shown("--config", str(config), *tenants))["tenants"]
    assert (found["b"]["size_bytes_max"], found["b"]["files_max"]) == (500_000, 7)
    assert found["a.b"]["files_max"] == 3, "names of tenants may have dots"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["tenants.b.size=5"], "tenants.b.size: unknown"),
        (["tenants.b=5"], "tenants.b: "),
        (["tenants.b=5", "tenants.b.files_max=5"], "tenants.b was set to no table before"),
        (["limits.a.b=5"], "limits.a.b: unknown"),
    ],
)
def test_bad_keys_are_named(settings: list[str], words: str) -> None:
    arguments = [text for setting in settings for text in ("--set", setting)]
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)


def test_demo() -> None:
    shown = json.loads(kvserve("demo", "--tokens", "256", "--json").stdout)
    assert shown["is_good"]
    assert shown["chunks"] == 4
    assert (shown["store_requests"], shown["fetch_requests"]) == (1, 1)
    assert len(shown["stored_at_s"]) == len(shown["fetched_at_s"]) == 32
    people = run_here("demo", "--tokens", "64").stdout
    assert "fetch: 1 request (not 32)" in people
