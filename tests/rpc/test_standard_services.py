"""The standard health and reflection services, as probes and grpcurl use them."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvclient import AsyncClient
from kvserve.format.messages import SERVICE
from kvserve.rpc.server import Server
from tests.payload import payload_for, small_descriptor

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_turns_when_the_server_drains(server: Server, client: AsyncClient) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == SERVING
        watching = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watching.read()).status == SERVING
        descriptor = small_descriptor()
        handle = client.store(descriptor, payload_for(descriptor))
        await handle.needed()
        stopping = asyncio.ensure_future(server.stop())
        assert (await watching.read()).status == NOT_SERVING
        watching.cancel()
        await handle.cancel()
        await stopping


async def test_reflection_lists_the_services(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        reply = await call.read()
        assert reply.file_descriptor_response.file_descriptor_proto
        await call.done_writing()
