"""The code in docs/client.md runs as it stands, against a real server."""

import re
from pathlib import Path

import pytest

from kvclient import ChunkStatus
from kvserve.testing.server_process import ServerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text("utf-8")


def test_its_code_runs_from_top_to_bottom(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # Without the example for TLS: it needs a certificate (tests/rpc/test_tls.py).
    blocks = [block for block in blocks if "Tls(" not in block]
    assert len(blocks) == 2
    names: dict[str, object] = {}
    with ServerProcess(root) as server:
        for block in blocks:
            assert '"127.0.0.1:7411"' in block
            exec(block.replace("127.0.0.1:7411", server.address), names)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "1 is complete but for chunks ()",
        "4 chunks usable, 4096 bytes came, {}",
        "to be sent: []",
    ]


def test_every_status_of_a_transfer_has_its_line() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    for status in ChunkStatus:
        if status.is_miss or status.is_stored or 19 <= status.value <= 22:
            assert any(re.search(rf"^\| [^|]*\b{status.name}\b", it) for it in lines), status.name
