"""How long single calls took."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Latency:
    """One kind of call in one phase, milliseconds; percentiles by nearest rank."""

    name: str
    label: str
    calls: int
    p50_ms: float
    p99_ms: float
    p99_9_ms: float
    max_ms: float


async def timed(call: Callable[[], Awaitable[None]]) -> float:
    """Seconds that one call took."""
    started = perf_counter()
    await call()
    return perf_counter() - started


def latency(name: str, label: str, taken_s: Sequence[float]) -> Latency:
    """Of at least one call."""
    ordered = sorted(taken_s)

    def at_ms(share: float) -> float:
        rank = max(1, -(-len(ordered) * share // 1))
        return 1e3 * ordered[int(rank) - 1]

    return Latency(
        name=name,
        label=label,
        calls=len(ordered),
        p50_ms=at_ms(0.5),
        p99_ms=at_ms(0.99),
        p99_9_ms=at_ms(0.999),
        max_ms=1e3 * ordered[-1],
    )
