"""Counts that add up, findings that do not fill the memory."""

import json

import pytest

from kvserve.care.tally import FINDINGS_MAX, Finding, Kind, Tally


def tally_of(findings: int, ok: int = 0) -> Tally:
    made = Tally(directories=1, size_bytes=10, direct_files=ok)
    for number in range(findings):
        made.count(Finding(f"{number}", Kind.CORRUPT, "r", is_repaired=number % 2 == 0))
    for _ in range(ok):
        made.count_ok()
    return made


def test_merging_adds_everything() -> None:
    one = tally_of(3, ok=2)
    one.merge(tally_of(1, ok=5))
    assert (one.files, one.problems, one.repaired, one.directories) == (11, 4, 3, 2)
    assert (one.size_bytes, one.direct_files, len(one.findings)) == (20, 7, 4)


def test_findings_are_bounded_and_counts_are_not() -> None:
    many = tally_of(FINDINGS_MAX + 5)
    assert (many.problems, len(many.findings), many.findings_left_out) == (
        FINDINGS_MAX + 5,
        FINDINGS_MAX,
        5,
    )
    many.merge(tally_of(7))
    assert (len(many.findings), many.findings_left_out) == (FINDINGS_MAX, 12)


def test_only_damage_is_a_problem() -> None:
    assert {kind.value for kind in Kind if kind.is_problem} == {
        "corrupt",
        "misplaced",
        "unreadable",
        "orphan",
    }


def test_it_survives_the_disk() -> None:
    whole = tally_of(3, ok=2)
    assert Tally.from_json(json.loads(json.dumps(whole.to_json()))) == whole


@pytest.mark.parametrize("key", list(Tally().to_json()))
def test_what_is_no_tally_is_refused(key: str) -> None:
    value = tally_of(1).to_json()
    value[key] = [{}]
    with pytest.raises((KeyError, TypeError, ValueError)):
        Tally.from_json(value)
