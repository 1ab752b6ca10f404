"""Server memory while streaming: a fresh server for each payload, one transfer, its peak.

Fresh, since an allocator that has seen one transfer hides the next. What a server holds must follow
the frames in flight, never the payload, so the same transfer is repeated with four times the bytes.
"""

from kvserve.bench.measure import Meter
from kvserve.bench.report import ServerGrowth
from kvserve.bench.rounds import Case
from kvserve.config import LimitsConfig

PAYLOAD_FACTOR = 4
_FRAMES_IN_FLIGHT_FACTOR = 4


async def server_growth(case: Case, payload_bytes: int) -> ServerGrowth:
    """Runs `case` once against its server, which has a connection but has moved nothing yet."""
    assert case.server_pid is not None, f"{case.name} has no server"
    await case.prepare()
    try:
        meter = Meter(case.server_pid)
        meter.start()
        await case.run()
        growth_bytes = meter.stop().growth_bytes
    finally:
        await case.clean_up()
    return ServerGrowth(case.name, case.label, payload_bytes, growth_bytes)


def rise_max_bytes() -> int:
    """How much more the large payload may cost the server than the small one.

    Four times the frames that one transfer may hold: gRPC's receive windows, which widen while a
    stream runs, and the allocator's slack are as large again. Bare grpcio shows them too.
    """
    limits = LimitsConfig()
    return _FRAMES_IN_FLIGHT_FACTOR * limits.frames_in_flight * int(limits.frame_size_bytes)
