"""Regions over every kind of buffer, and never given up while a handle uses them."""

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvclient.region import Region, as_region
from kvclient.shared_region import SharedRegion
from kvserve.errors import HandleClosed, InvalidRequest


def mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(64),
    "mmap": lambda: mapped(64),
    "memoryview": lambda: memoryview(bytearray(64)),
    "memoryview of words": lambda: memoryview(bytearray(64)).cast("I"),
    "numpy bytes": lambda: np.zeros(64, np.uint8),
    "numpy float16 of two dimensions": lambda: np.zeros((4, 8), np.float16),
    "numpy big-endian": lambda: np.zeros(16, ">f4"),
    "part of a numpy array": lambda: np.zeros((10, 32), np.uint8)[2:4],
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_region_is_the_buffers_own_bytes(kind: str) -> None:
    buffer = BUFFERS[kind]()
    region = Region(buffer)
    assert region.size_bytes == 64
    assert region.is_writable
    assert (region.view.format, region.view.ndim, region.view.itemsize) == ("B", 1, 1)
    region.view[:] = bytes(range(64))
    assert bytes(memoryview(buffer).cast("B")) == bytes(range(64)), "no copy"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "float32"])
def test_torch_tensors_of_every_kv_dtype(dtype: str) -> None:
    """torch has no buffer protocol for bfloat16 and float8."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 16), dtype=getattr(torch, dtype))
    region = Region(tensor)
    assert region.size_bytes == 32 * tensor.element_size()
    assert region.is_writable
    region.view[:] = bytes(at % 251 for at in range(region.size_bytes))
    assert bytes(tensor.view(torch.uint8).numpy().tobytes()) == bytes(region.view)


def test_a_torch_region_keeps_the_memory_alive() -> None:
    torch = pytest.importorskip("torch")
    region = Region(torch.full((1 << 20,), 7, dtype=torch.uint8))
    for _ in range(3):
        torch.zeros(1 << 20, dtype=torch.uint8)
    assert bytes(region.view[:64]) == b"\7" * 64


def test_torch_tensors_that_are_no_host_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidRequest, match="must be in host memory, this tensor is on meta"):
        Region(torch.zeros(4, device="meta"))
    with pytest.raises(InvalidRequest, match=r"must be contiguous: take \.contiguous\(\) first"):
        Region(torch.zeros((4, 4)).t())


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((4, 8), np.uint8)[:, :4],
        np.zeros(16, np.uint8)[::2],
        np.zeros((4, 8), np.uint8, order="F"),
        memoryview(bytearray(16))[::-1],
    ],
    ids=["columns", "every second", "fortran", "backwards"],
)
def test_memory_with_holes_is_refused(buffer: Any) -> None:
    with pytest.raises(InvalidRequest, match="a region must be contiguous"):
        Region(buffer)


@pytest.mark.parametrize("buffer", [b"kv", memoryview(bytearray(2)).toreadonly()])
def test_read_only_memory_is_a_region_that_says_so(buffer: Any) -> None:
    """Good for a store; a fetch into it is refused by the handle."""
    region = Region(buffer)
    assert not region.is_writable
    assert region.size_bytes == 2
    with pytest.raises(TypeError, match="read-only"):
        region.view[0] = 1


def test_a_read_only_mmap(tmp_path: Any) -> None:
    path = tmp_path / "payload"
    path.write_bytes(b"payload")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        region = Region(memory)
        assert bytes(region.view) == b"payload"
        assert not region.is_writable
        region.close()


@pytest.mark.parametrize("buffer", [bytearray(), np.zeros(0, np.float16)])
def test_no_bytes_are_a_region_of_size_0(buffer: Any) -> None:
    assert Region(buffer).size_bytes == 0


@pytest.mark.parametrize("value", ["text", None, [1, 2], np.zeros(4, object)])
def test_what_is_no_buffer_of_numbers_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="a region"):
        Region(value)


class TestClose:
    def test_an_open_region_pins_the_address(self) -> None:
        buffer = bytearray(8)
        region = Region(buffer)
        with pytest.raises(BufferError):
            buffer.extend(b"more")
        region.close()
        buffer.extend(b"more")

    def test_close_gives_the_buffer_up(self) -> None:
        memory = mapped(64)
        region = Region(memory)
        with pytest.raises(BufferError):
            memory.close()
        region.close()
        memory.close()

    def test_close_is_refused_while_a_handle_uses_it(self) -> None:
        """B6: late writes would land in memory with another owner."""
        region = Region(bytearray(8))
        region.acquire()
        region.acquire()
        with pytest.raises(HandleClosed, match="the region is in use by 2 open handles"):
            region.close()
        region.release()
        with pytest.raises(HandleClosed, match="in use by 1 open handles"):
            region.close()
        assert region.size_bytes == 8, "the refusal changed nothing"
        region.release()
        region.close()

    def test_a_with_block_closes(self) -> None:
        with Region(bytearray(8)) as region:
            assert region.size_bytes == 8
        with pytest.raises(HandleClosed, match="the region is closed"):
            _ = region.view

    def test_a_with_block_is_no_way_around_an_open_handle(self) -> None:
        with pytest.raises(HandleClosed, match="in use by 1"), Region(bytearray(8)) as region:
            region.acquire()

    def test_a_with_block_gives_shared_memory_back(self) -> None:
        with SharedRegion(4096) as region:
            fd = region.fd
            assert os.fstat(fd).st_size == 4096
        assert region.fd == -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_close_twice_is_fine(self) -> None:
        region = Region(bytearray(8))
        region.close()
        region.close()

    def test_a_closed_region_cannot_be_used(self) -> None:
        region = Region(bytearray(8))
        region.close()
        for use in (
            lambda: region.view,
            lambda: region.size_bytes,
            lambda: region.is_writable,
            region.acquire,
        ):
            with pytest.raises(HandleClosed, match="the region is closed"):
                use()

    def test_repr_says_size_and_users(self) -> None:
        region = Region(bytearray(8))
        region.acquire()
        assert repr(region) == "<Region 8 B, 1 handles>"
        region.release()
        region.close()
        assert repr(region) == "<Region closed, 0 handles>"


def test_a_region_is_used_as_it_is() -> None:
    region = Region(bytearray(8))
    assert as_region(region) is region
    assert as_region(bytearray(4)).size_bytes == 4
