"""How much may be stored, by all and by each tenant; pure.

Two watermarks on every limit: above `high` eviction starts, at `low` it stops. The space between
`high` and the limit takes the stores that come while eviction runs. A tenant's floor is what
eviction for the others never takes from it; its ceiling is a limit of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes and files together; of a limit, 0 means none."""

    size_bytes: int = 0
    files: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.size_bytes + other.size_bytes, self.files + other.files)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.size_bytes - other.size_bytes, self.files - other.files)

    def __bool__(self) -> bool:
        return bool(self.size_bytes or self.files)


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """`ceiling`: the most that the tenant may store. `floor_size_bytes`: not evicted for others."""

    ceiling: Amount = Amount()
    floor_size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits of one tree."""

    total: Amount = Amount()
    high_watermark: float = 0.95
    low_watermark: float = 0.9
    default: TenantQuota = TenantQuota()
    tenants: Mapping[str, TenantQuota] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantQuota:
        return self.tenants.get(tenant, self.default)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Eviction wanted: of one tenant's chunks, or (`tenant` None) of all above their floors.

    `excess`: what has to go; in each of bytes and files, 0 if that limit is not the reason.
    """

    tenant: str | None
    excess: Amount


@dataclass(frozen=True, slots=True)
class Allowed:
    """How many more chunks one limit lets in; as text, the limit and the settings that made it.

    `tenant`: whose limit it is, None for the tree's; `counts`: "size_bytes" or "files".
    """

    chunks: int
    tenant: str | None
    counts: str
    limit: int

    def __str__(self) -> str:
        amount = f"{self.limit} {'files' if self.counts == 'files' else 'bytes'}"
        if self.tenant is None:
            return f"the tree may hold {amount} (capacity.{self.counts}_max)"
        keys = f"tenants.{self.tenant}.{self.counts}_max or capacity.tenant_{self.counts}_max"
        return f"tenant {self.tenant} may hold {amount} ({keys})"


def chunks_allowed(
    quotas: Quotas, tenant: str, *, own: Amount, total: Amount, chunk_size_bytes: int
) -> Allowed | None:
    """How many more chunks of this size the tenant may store now, by the tightest limit; None for
    any number.

    `own`: what the tenant has stored, `total`: what all have.
    """
    found = [
        *_allowed(None, quotas.total, total, chunk_size_bytes),
        *_allowed(tenant, quotas.of(tenant).ceiling, own, chunk_size_bytes),
    ]
    return min(found, key=lambda it: it.chunks, default=None)


def pressures(quotas: Quotas, usage: Mapping[str, Amount]) -> list[Pressure]:
    """What has to be evicted now: of tenants over their ceilings, and for the total.

    Ask again after each was relieved, in this order: what goes of one tenant may relieve the total.
    It may also not go (pinned, leased), so it is not counted on here.
    """
    found = []
    for tenant, own in sorted(usage.items()):
        excess = _excess(quotas.of(tenant).ceiling, own, quotas)
        if excess:
            found.append(Pressure(tenant, excess))
    excess = _excess(quotas.total, total_of(usage), quotas)
    if excess:
        found.append(Pressure(None, excess))
    return found


def above_floor(quotas: Quotas, usage: Mapping[str, Amount], tenant: str) -> int:
    """Bytes that eviction for the others may take from a tenant."""
    floor = quotas.of(tenant).floor_size_bytes
    return max(0, usage.get(tenant, Amount()).size_bytes - floor)


def total_of(usage: Mapping[str, Amount]) -> Amount:
    return sum(usage.values(), Amount())


def _allowed(
    tenant: str | None, limit: Amount, used: Amount, chunk_size_bytes: int
) -> Iterator[Allowed]:
    if limit.size_bytes:
        chunks = max(0, limit.size_bytes - used.size_bytes) // chunk_size_bytes
        yield Allowed(chunks, tenant, "size_bytes", limit.size_bytes)
    if limit.files:
        yield Allowed(max(0, limit.files - used.files), tenant, "files", limit.files)


def _excess(limit: Amount, used: Amount, quotas: Quotas) -> Amount:
    def over(limit: int, used: int) -> int:
        if not limit or used <= limit * quotas.high_watermark:
            return 0
        return used - int(limit * quotas.low_watermark)

    return Amount(over(limit.size_bytes, used.size_bytes), over(limit.files, used.files))
