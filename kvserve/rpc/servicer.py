"""The rpcs: protobuf in, one call of the service, protobuf out.

Messages pass gRPC as raw bytes; in fetch replies and store requests the payload frames are encoded
and decoded by hand around the payload (`format/frames.py`), since protobuf would copy it twice.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

import kvserve
from kvserve.config import LimitsConfig
from kvserve.errors import InvalidRequest
from kvserve.format import chunk_file
from kvserve.format.messages import (
    SERVICE,
    verdicts_to_pb,
)
from kvserve.format.request_size import parse_bounded
from kvserve.model import leading_hits
from kvserve.names import check_lease_owner, check_tenant
from kvserve.rpc.requests import DescriptorReader
from kvserve.rpc.status import with_status
from kvserve.service import Service
from kvserve.transfer.planes.offered import Planes
from kvserve.v1 import kvserve_pb2 as pb

_Context = grpc.aio.ServicerContext[Any, Any]


class Servicer:
    """One per server; `handlers` is what the gRPC server registers."""

    def __init__(
        self,
        service: Service,
        limits: LimitsConfig,
        file_system: str,
        planes: Planes,
        *,
        lease_ttl_s_max: float,
    ) -> None:
        self._lease_ttl_s_max = lease_ttl_s_max
        self._service = service
        self._limits = limits
        self._descriptors = DescriptorReader(service, limits.chunks_max)
        self._file_system = file_system
        self._planes = planes

    def handlers(self) -> grpc.GenericRpcHandler:
        # Requests come as raw bytes: a message that cannot be decoded is then the caller's mistake,
        # with a status that says so, instead of gRPC's own UNKNOWN.
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetServerInfo": unary(with_status(self.get_server_info)),
                "Lookup": unary(with_status(self.lookup)),
                "Verify": unary(with_status(self.verify)),
                "Delete": unary(with_status(self.delete)),
                "Release": unary(with_status(self.release)),
                "Pin": unary(with_status(self.pin)),
                "Unpin": unary(with_status(self.unpin)),
                "Fetch": stream(with_status(self.fetch)),
                "Store": grpc.stream_stream_rpc_method_handler(with_status(self.store)),
            },
        )

    async def get_server_info(self, raw: bytes, context: _Context) -> bytes:
        parse_bounded(pb.GetServerInfoRequest, raw)
        limits = self._limits
        reply = pb.GetServerInfoReply(
            version=kvserve.__version__,
            capabilities=[f"plane.{name}" for name in self._planes.names],
            limits=pb.Limits(
                chunks_max=limits.chunks_max,
                message_size_bytes_max=limits.message_size_bytes_max,
                frame_size_bytes_max=limits.frame_size_bytes,
                transfers_max=limits.transfers_max,
                lease_ttl_s_max=self._lease_ttl_s_max,
            ),
            file_system=self._file_system,
            chunk_file_version=chunk_file.VERSION,
            data_address=self._planes.data_address,
        )
        return reply.SerializeToString()

    async def lookup(self, raw: bytes, context: _Context) -> bytes:
        request = parse_bounded(pb.LookupRequest, raw)
        where = await self._descriptors.read(request.descriptor)
        leased = 0
        if request.lease_owner or request.lease_ttl_s:
            verdicts, leased = await self._service.lease(
                where, request.lease_owner, request.lease_ttl_s, all_ranks=request.all_ranks
            )
        else:
            verdicts = await self._service.lookup(where, all_ranks=request.all_ranks)
        chunk_statuses, details = verdicts_to_pb(verdicts)
        reply = pb.LookupReply(
            prefix_chunks=leading_hits(verdicts),
            chunk_statuses=chunk_statuses,
            details=details,
            leased_chunks=leased,
        )
        return reply.SerializeToString()

    async def verify(self, raw: bytes, context: _Context) -> bytes:
        request = parse_bounded(pb.VerifyRequest, raw)
        verdicts = await self._service.verify(await self._descriptors.read(request.descriptor))
        chunk_statuses, details = verdicts_to_pb(verdicts)
        return pb.VerifyReply(chunk_statuses=chunk_statuses, details=details).SerializeToString()

    async def delete(self, raw: bytes, context: _Context) -> bytes:
        request = parse_bounded(pb.DeleteRequest, raw)
        statuses = await self._service.delete(await self._descriptors.read(request.descriptor))
        return pb.DeleteReply(chunk_statuses=bytes(statuses)).SerializeToString()

    async def release(self, raw: bytes, context: _Context) -> bytes:
        request = parse_bounded(pb.ReleaseRequest, raw)
        check_tenant(request.tenant)
        check_lease_owner(request.lease_owner)
        released = await self._service.release(request.tenant, request.lease_owner)
        return pb.ReleaseReply(released_chunks=released).SerializeToString()

    async def pin(self, raw: bytes, context: _Context) -> bytes:
        return await self._pin(raw, is_pinned=True)

    async def unpin(self, raw: bytes, context: _Context) -> bytes:
        return await self._pin(raw, is_pinned=False)

    async def _pin(self, raw: bytes, *, is_pinned: bool) -> bytes:
        request = parse_bounded(pb.PinRequest, raw)
        where = await self._descriptors.read(request.descriptor)
        statuses = await self._service.pin(where, is_pinned=is_pinned)
        return pb.PinReply(chunk_statuses=bytes(statuses)).SerializeToString()

    async def fetch(self, raw: bytes, context: _Context) -> None:
        request = parse_bounded(pb.FetchRequest, raw)
        where = await self._descriptors.read(request.descriptor)
        layers, wanted = tuple(request.layers), tuple(request.planes)
        kept = request.kept if request.HasField("kept") else None
        planes, of = self._planes, where.descriptor
        async with planes.fetch(wanted, of, layers, context.write, kept=kept) as plane:
            await self._service.fetch(where, layers, plane)

    async def store(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        # `context.read` and not `requests`: a generator step less for every frame.
        first = await context.read()
        if not isinstance(first, bytes):  # the end
            raise InvalidRequest("the store stream ended before `open`")
        message = parse_bounded(pb.StoreRequest, first)
        if message.WhichOneof("message") != "open":
            raise InvalidRequest("the first message of a store must be `open`")
        where = await self._descriptors.read(message.open.descriptor)
        wanted = tuple(message.open.planes)
        del message, first  # megabytes, maybe, for as long as the store goes on
        planes, of = self._planes, where.descriptor
        async with planes.store(wanted, of, context.read, context.write) as plane:
            await self._service.store(where, plane)
