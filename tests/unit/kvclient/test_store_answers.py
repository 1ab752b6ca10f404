"""What a server says in a store over shm or nixl."""

from collections.abc import Sequence

import pytest

from kvclient.planes.tcp import receive_kind
from kvserve.data_socket import DataSocket
from kvserve.errors import ServerFault
from kvserve.format.records import HEAD_SIZE_BYTES, RecordKind, encode_quiet, encode_taken


class OneRecord(DataSocket):
    """Brings these bytes."""

    def __init__(self, record: bytes) -> None:
        self._record = record

    async def receive(self, buffers: Sequence[memoryview]) -> None:
        (buffer,) = buffers
        buffer[:] = self._record


async def kind_of(record: bytes) -> RecordKind:
    return await receive_kind(OneRecord(record), memoryview(bytearray(HEAD_SIZE_BYTES)))


async def test_known_records() -> None:
    assert await kind_of(encode_taken()) is RecordKind.TAKEN
    assert await kind_of(encode_quiet()) is RecordKind.QUIET


async def test_a_record_of_no_known_kind_is_a_fault_of_the_server() -> None:
    with pytest.raises(ServerFault, match="unknown kind 99"):
        await kind_of(b"\x63".ljust(HEAD_SIZE_BYTES, b"\0"))
