"""Slots of the nixl plane, without NIXL."""

import pytest

from kvserve.errors import Overloaded
from kvserve.transfer.planes.nixl_slots import Slots

SIZE_BYTES = 8 << 20


def test_those_for_frames_that_pass_keep_none() -> None:
    blocks: list[tuple[int, int]] = []
    slots = Slots(
        SIZE_BYTES,
        to_keep=2,
        to_pass=3,
        register=lambda address, size_bytes: blocks.append((address, size_bytes)),
    )
    held = [slots.take_to_keep(), slots.take_to_keep()]
    assert None not in held
    assert slots.take_to_keep() is None
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
    assert slots.take_to_keep() is not None


def test_a_part_of_the_view_holds_the_slot() -> None:
    """A thread that hangs in a file call has no more than that."""
    slots = Slots(4096, to_keep=1, to_pass=0, register=lambda address, size_bytes: None)
    part = slots.take().view[1000:][:10]
    assert slots.taken == 1
    with pytest.raises(Overloaded):
        slots.take()
    part[:] = b"0123456789"
    del part
    assert slots.taken == 0
    assert bytes(slots.take().view[1000:1010]) == b"0123456789"
