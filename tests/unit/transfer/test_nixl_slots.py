"""Slots of the nixl plane, without NIXL."""

import pytest

from kvserve.errors import Overloaded
from kvserve.transfer.planes.nixl_slots import Slots

SIZE_BYTES = 8 << 20


def test_those_to_write_from_are_not_read_into() -> None:
    blocks: list[tuple[int, int]] = []
    slots = Slots(
        SIZE_BYTES,
        to_read_into=2,
        to_write_from=3,
        register=lambda address, size_bytes: blocks.append((address, size_bytes)),
    )
    held = [slots.take_to_read_into(), slots.take_to_read_into()]
    assert None not in held
    assert slots.take_to_read_into() is None
    held += [slots.take() for _ in range(3)]
    with pytest.raises(Overloaded, match="all 5 frames of staging memory are in use"):
        slots.take()
    addresses = {slot.address for slot in held if slot is not None}
    assert len(addresses) == 5
    for address in addresses:
        assert any(at <= address < at + size for at, size in blocks)
    assert [size for _, size in blocks] == [4 * SIZE_BYTES, SIZE_BYTES]
    held.clear()
    assert slots.taken == 0
    assert slots.take_to_read_into() is not None
