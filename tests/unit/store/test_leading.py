"""One of the living servers is the steward; a tool never is, and hinders nobody."""

import os
from pathlib import Path
from random import Random

import pytest

from kvserve.fs import PosixFileSystem
from kvserve.store.owners import Owner


@pytest.fixture
def owners(tmp_path: Path) -> list[Owner]:
    """By their tags."""
    made = [Owner(PosixFileSystem(), str(tmp_path), Random(seed), lease_s=60.0) for seed in (1, 2)]
    for owner in made:
        owner.claim_blocking()
    return sorted(made, key=lambda owner: owner.tag)


def silent(root: Path, tag: str) -> None:
    claim = root / ".servers" / tag
    then = claim.stat().st_mtime - 61
    os.utime(claim, (then, then))


def test_the_living_one_with_the_first_tag_leads(tmp_path: Path, owners: list[Owner]) -> None:
    assert [owner.is_first_blocking() for owner in owners] == [True, False]
    silent(tmp_path, owners[0].tag)
    assert owners[1].is_first_blocking()
    owners[0].beat_blocking()
    assert not owners[1].is_first_blocking()
    owners[0].release_blocking()
    assert owners[1].is_first_blocking()


def test_a_tool_lets_the_servers_lead(tmp_path: Path, owners: list[Owner]) -> None:
    tool = Owner(PosixFileSystem(), str(tmp_path), Random(3), lease_s=60.0, may_lead=False)
    tool.claim_blocking()
    first = tmp_path / ".servers" / "0aA"
    (tmp_path / ".servers" / tool.tag).rename(first)
    assert owners[0].is_first_blocking()
    tool.tag = "0aA"
    tool.beat_blocking()
    assert owners[0].is_first_blocking(), "still no server after a beat"
    first.unlink()
    tool.beat_blocking()
    assert owners[0].is_first_blocking(), "nor when its claim was made again"
