"""Large descriptors are decoded once, for exactly the bytes they came as, and not kept for ever."""

import asyncio
import threading

import pytest

from kvserve.errors import InvalidRequest, Overloaded
from kvserve.format.messages import descriptor_to_pb
from kvserve.format.request_size import parse_bounded
from kvserve.model import Descriptor
from kvserve.rpc import requests
from kvserve.rpc.requests import DescriptorReader, KeptLocations
from kvserve.service import Service
from kvserve.store.locations import ChunkLocations
from kvserve.transfer.long_steps import LongSteps
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import small_descriptor

BIG = 2000


class Located(Service):
    """A service that only locates; `made` in which order, on which thread."""

    def __init__(self) -> None:
        self.long_steps = LongSteps()
        self.made: list[int] = []

    def __repr__(self) -> str:
        return "<Located>"

    def locate(self, descriptor: Descriptor) -> ChunkLocations:
        self.made.append(threading.get_ident())
        return ChunkLocations("/root", descriptor)


def encoded(descriptor: Descriptor) -> pb.Descriptor:
    return descriptor_to_pb(descriptor)


async def test_a_large_descriptor_is_decoded_once_and_off_the_loop() -> None:
    service = Located()
    reader = DescriptorReader(service, chunks_max=BIG)
    descriptor = small_descriptor(chunks=BIG)
    first, *others = await asyncio.gather(*(reader.read(encoded(descriptor)) for _ in range(4)))
    assert all(other is first for other in others)
    assert await reader.read(encoded(descriptor)) is first
    assert first.descriptor == descriptor
    assert first.paths is first.paths, "made once"
    assert len(service.made) == 1
    assert threading.get_ident() not in service.made
    service.long_steps.close()


async def test_another_descriptor_is_never_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the digests collide."""
    monkeypatch.setattr(requests.xxhash, "xxh3_128_digest", lambda _: b"all alike")
    reader = DescriptorReader(service := Located(), chunks_max=BIG)
    one, other = (small_descriptor(chunks=BIG, tenant=tenant) for tenant in ("a", "b"))
    for descriptor in (one, other, one):
        assert (await reader.read(encoded(descriptor))).descriptor == descriptor
    assert len(service.made) == 3
    service.long_steps.close()


async def test_a_small_one_is_decoded_in_place_once() -> None:
    reader = DescriptorReader(service := Located(), chunks_max=BIG)
    for _ in range(2):
        await reader.read(encoded(small_descriptor()))
    assert service.made == [threading.get_ident()]


async def test_a_large_one_that_breaks_a_rule_is_refused_each_time() -> None:
    reader = DescriptorReader(service := Located(), chunks_max=BIG - 1)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="names 2000 chunks; this server takes 1999"):
            await reader.read(encoded(small_descriptor(chunks=BIG)))
    service.long_steps.close()


async def test_too_much_in_line_is_refused_retryably(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "WAITING_BYTES_MAX", 3 * BIG * 32)
    reader = DescriptorReader(service := Located(), chunks_max=BIG)
    messages = [encoded(small_descriptor(chunks=BIG, tenant=str(n))) for n in range(5)]
    found = await asyncio.gather(*map(reader.read, messages), return_exceptions=True)
    assert [isinstance(it, Overloaded) for it in found] == [False] * 3 + [True] * 2
    assert isinstance(await reader.read(messages[4]), ChunkLocations), "once there is room again"
    service.long_steps.close()


def test_the_oldest_go_when_there_are_too_many_chunks() -> None:
    kept = KeptLocations(chunks_max=200)  # each counts as 30 chunks, 4 layers, and 32
    for n in range(5):
        kept.put(bytes([n]), ChunkLocations("/root", small_descriptor(chunks=30)))
        kept.get(b"\0")
    assert [kept.get(bytes([n])) is not None for n in range(5)] == [True, False, False, True, True]
    assert kept.chunk_count == 198
    kept.put(b"\4", ChunkLocations("/root", small_descriptor(chunks=10)))
    assert kept.chunk_count == 178, "replaced, not counted twice"
    kept.put(b"huge", ChunkLocations("/root", small_descriptor(chunks=201)))
    assert kept.chunk_count == 0, "what is larger than all is not kept"


def test_a_request_without_chunks_has_no_reason_to_be_large() -> None:
    raw = b"\x0a\xff\xff\x0f" + bytes((1 << 18) - 1)
    with pytest.raises(InvalidRequest, match="GetServerInfoRequest has more than 131072 bytes"):
        parse_bounded(pb.GetServerInfoRequest, raw)
