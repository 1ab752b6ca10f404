"""Arrow Flight: one `do_get` for the whole unit, record batches of slices over gRPC.

By layer: the ticket asks for all layers in order; a batch holds as many slices of a layer as make
1 MiB, which moves faster through gRPC than a whole layer at once. By chunk: a batch for each chunk.
"""

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from benchmarks.peers.peer import Bytes, Mark, Peer, check

_BATCH_SIZE_BYTES = 1 << 20


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, slice_size_bytes: int) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.schema = pa.schema([("kv", pa.binary(slice_size_bytes))])
        self.batches: dict[bytes, list[pa.RecordBatch]] = {}

    def do_get(self, context: Any, ticket: Any) -> Any:
        batches = self.batches[ticket.ticket]
        return flight.GeneratorStream(self.schema, iter(batches))

    def hold(self, name: bytes, pieces: list[Bytes]) -> None:
        """Each piece becomes one batch, a row for each slice."""
        kind = self.schema.field("kv").type
        self.batches[name] = [
            pa.record_batch(
                [pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])],
                schema=self.schema,
            )
            for rows in pieces
        ]


class Flight(Peer):
    def start(self) -> dict[str, Any]:
        self._server = _Server(self.unit.slice_size_bytes)
        return {"port": self._server.port, "pids": [os.getpid()]}

    def put(self) -> None:
        rows = max(1, _BATCH_SIZE_BYTES // self.unit.slice_size_bytes)
        layers = self.unit.payload()
        pieces = [
            layer[at : at + rows]
            for layer in layers
            for at in range(0, self.unit.chunk_count, rows)
        ]
        self._server.hold(b"layers", pieces)
        self._server.hold(b"chunks", list(self.unit.chunks()))

    def connect(self, served: dict[str, Any], region: Bytes) -> None:
        self._region = region
        self._client = flight.connect(f"grpc://127.0.0.1:{served['port']}")

    def fetch_layers(self, mark: Mark) -> None:
        flat = self._region.reshape(-1, self.unit.slice_size_bytes)
        done = 0
        for rows in self._rows(b"layers"):
            flat[done : done + len(rows)] = rows
            done += len(rows)
            if done >= self.unit.chunk_count:
                mark()
        check(done == len(flat), f"{done} slices came")

    def fetch_chunks(self, mark: Mark) -> None:
        done = 0
        for done, rows in enumerate(self._rows(b"chunks"), 1):
            self._region[:, done - 1] = rows
        mark()
        check(done == self.unit.chunk_count, f"{done} chunks came")

    def _rows(self, name: bytes) -> Any:
        for batch in self._client.do_get(flight.Ticket(name)):
            column = batch.data.column(0)
            rows = np.frombuffer(column.buffers()[1], np.uint8)
            rows = rows.reshape(-1, self.unit.slice_size_bytes)
            yield rows[column.offset : column.offset + len(column)]

    def stop(self) -> None:
        if hasattr(self, "_server"):
            self._server.shutdown()


PEER = Flight
