"""Limits: how many chunks are let in, who has to give and how much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.policy.quota import (
    Amount,
    Pressure,
    Quotas,
    TenantQuota,
    above_floor,
    chunks_allowed,
    pressures,
    total_of,
)

HALVES = Quotas(Amount(1000, 100), high_watermark=0.8, low_watermark=0.5)


def allowed(quotas: Quotas, own: Amount, total: Amount, size_bytes: int = 100) -> int | None:
    found = chunks_allowed(quotas, "t", own=own, total=total, chunk_size_bytes=size_bytes)
    return None if found is None else found.chunks


class TestAllowed:
    def test_without_limits_any_number(self) -> None:
        assert allowed(Quotas(), Amount(10**15, 10**9), Amount(10**15, 10**9)) is None

    @pytest.mark.parametrize(
        ("own", "total", "count"),
        [
            (Amount(0, 0), Amount(0, 0), 4),  # the ceiling's bytes
            (Amount(350, 1), Amount(350, 1), 0),
            (Amount(0, 8), Amount(0, 8), 2),  # the ceiling's files
            (Amount(0, 0), Amount(700, 0), 3),  # the total's bytes
            (Amount(0, 0), Amount(0, 99), 1),  # the total's files
            (Amount(5000, 500), Amount(5000, 500), 0),  # over: none, not fewer
        ],
    )
    def test_the_tightest_limit_counts(self, own: Amount, total: Amount, count: int) -> None:
        quotas = Quotas(Amount(1000, 100), default=TenantQuota(Amount(400, 10)))
        assert allowed(quotas, own, total) == count

    def test_a_tenants_own_ceiling_replaces_the_default(self) -> None:
        quotas = Quotas(
            default=TenantQuota(Amount(100, 0)), tenants={"t": TenantQuota(Amount(900, 0))}
        )
        assert allowed(quotas, Amount(), Amount()) == 9
        others = chunks_allowed(quotas, "u", own=Amount(), total=Amount(), chunk_size_bytes=100)
        assert others is not None
        assert others.chunks == 1

    @pytest.mark.parametrize(
        ("own", "total", "words"),
        [
            (
                Amount(0, 0),
                Amount(950, 0),
                "the tree may hold 1000 bytes (capacity.size_bytes_max)",
            ),
            (Amount(0, 0), Amount(0, 100), "the tree may hold 100 files (capacity.files_max)"),
            (
                Amount(390, 1),
                Amount(390, 1),
                "tenant t may hold 400 bytes "
                "(tenants.t.size_bytes_max or capacity.tenant_size_bytes_max)",
            ),
            (
                Amount(0, 10),
                Amount(0, 10),
                "tenant t may hold 10 files (tenants.t.files_max or capacity.tenant_files_max)",
            ),
        ],
    )
    def test_the_limit_that_refuses_is_named(self, own: Amount, total: Amount, words: str) -> None:
        quotas = Quotas(Amount(1000, 100), default=TenantQuota(Amount(400, 10)))
        found = chunks_allowed(quotas, "t", own=own, total=total, chunk_size_bytes=100)
        assert str(found) == words

    @given(st.integers(1, 50), st.integers(0, 2000), st.integers(0, 2000))
    def test_what_is_let_in_never_exceeds_the_limit(self, size: int, own: int, other: int) -> None:
        quotas = Quotas(Amount(1000, 0), default=TenantQuota(Amount(600, 0)))
        count = allowed(quotas, Amount(own, 0), Amount(own + other, 0), size)
        assert count is not None
        if count:
            assert own + count * size <= 600
            assert own + other + count * size <= 1000
        one_more = (count + 1) * size
        assert own + one_more > 600 or own + other + one_more > 1000


class TestPressures:
    def test_between_the_watermarks_nothing_is_done(self) -> None:
        assert pressures(HALVES, {"t": Amount(800, 80)}) == []

    def test_above_high_down_to_low(self) -> None:
        assert pressures(HALVES, {"t": Amount(801, 80)}) == [Pressure(None, Amount(301, 0))]
        assert pressures(HALVES, {"t": Amount(0, 81)}) == [Pressure(None, Amount(0, 31))]

    def test_a_tenant_over_its_ceiling_gives_first(self) -> None:
        """What it should give is not counted on for the total: it may be pinned."""
        quotas = Quotas(
            Amount(1000, 0),
            high_watermark=0.8,
            low_watermark=0.5,
            tenants={"a": TenantQuota(Amount(600, 0))},
        )
        usage = {"b": Amount(300, 3), "a": Amount(600, 6)}
        assert pressures(quotas, usage) == [
            Pressure("a", Amount(300, 0)),
            Pressure(None, Amount(400, 0)),
        ]
        usage["a"] = Amount(300, 3)
        assert pressures(quotas, usage) == []

    def test_no_limit_no_pressure(self) -> None:
        assert pressures(Quotas(), {"t": Amount(10**15, 10**9)}) == []


def test_floors() -> None:
    quotas = Quotas(tenants={"a": TenantQuota(floor_size_bytes=100)})
    usage = {"a": Amount(150, 2), "b": Amount(70, 1)}
    assert above_floor(quotas, usage, "a") == 50
    assert above_floor(quotas, usage, "b") == 70
    assert above_floor(quotas, {"a": Amount(50, 1)}, "a") == 0
    assert above_floor(quotas, usage, "nobody") == 0


def test_amounts() -> None:
    assert Amount(1, 2) + Amount(3, 4) - Amount(4, 0) == Amount(0, 6)
    assert Amount(0, 1)
    assert Amount(1, 0)
    assert not Amount()
    assert total_of({"a": Amount(1, 2), "b": Amount(3, 4)}) == Amount(4, 6)
