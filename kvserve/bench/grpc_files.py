"""The bare loop over gRPC with kvserve's own files: read, sent, and copied into the region."""

from time import perf_counter

from kvserve.bench.grpc_ceiling import CeilingClient
from kvserve.bench.rounds import Case, Timing
from kvserve.bench.tcp_ceiling import opening_for
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations


class GrpcReadFiles(Case):
    """Server to client: each message is a frame, read from the files into new memory."""

    name = "grpc_files"
    label = "bare grpcio, same files"
    requests = 1

    def __init__(
        self, client: CeilingClient, unit: WorkUnit, region: memoryview, files: ChunkLocations
    ) -> None:
        self._client = client
        self._unit = unit
        self._region = region
        self._opening = opening_for(unit, files).encode()
        self.server_pid = client.pid

    async def run(self) -> Timing:
        region, first_layer_ends = self._region, self._unit.layer_size_bytes
        started = perf_counter()
        first_layer_s = 0.0
        at = 0
        call = self._client.read_files(self._opening)
        while isinstance(message := await call.read(), bytes):  # else EOF
            region[at : at + len(message)] = message
            at += len(message)
            if not first_layer_s and at >= first_layer_ends:
                first_layer_s = perf_counter() - started
        took_s = perf_counter() - started
        if at != len(region):
            raise ServerFault(f"the bare stream brought {at} of {len(region)} bytes")
        return Timing(took_s, first_layer_s)
