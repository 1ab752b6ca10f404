"""Which planes are asked for, and for how long one that cannot be reached is avoided."""

import pytest

from kvclient.planes.base import Unreachable
from kvclient.planes.choice import PlaneChoice
from kvclient.region import Region
from kvclient.shared_region import SharedRegion
from kvserve.errors import InvalidRequest, ServerUnavailable

PRIVATE = Region(bytearray(1))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_by_itself_the_best_that_the_region_allows() -> None:
    choice = PlaneChoice("auto", "host:1")
    assert list(choice.for_region(PRIVATE)) == ["tcp", "grpc"]
    assert list(choice.for_region(SharedRegion(1))) == ["shm", "tcp", "grpc"]


@pytest.mark.parametrize("plane", ["grpc", "tcp"])
def test_a_pinned_plane_is_the_only_one(plane: str) -> None:
    choice = PlaneChoice(plane, "host:1")
    assert list(choice.for_region(SharedRegion(1))) == [plane]
    assert list(choice.for_region(PRIVATE)) == [plane]
    with pytest.raises(ServerUnavailable, match=f"host:1: plane {plane}: gone"):
        choice.without([plane], Unreachable(plane, "gone"))


def test_pinned_shm_is_for_shared_memory() -> None:
    choice = PlaneChoice("shm", "host:1")
    assert list(choice.for_region(SharedRegion(1))) == ["shm"]
    with pytest.raises(InvalidRequest, match="plane shm takes a SharedRegion only"):
        choice.for_region(PRIVATE)


def test_what_cannot_be_reached_is_avoided_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    choice = PlaneChoice("auto", "host:1", clock=clock)
    region = SharedRegion(1)
    left = choice.without(choice.for_region(region), Unreachable("shm", "another host"))
    assert list(left) == ["tcp", "grpc"]
    clock.now = 10
    assert list(choice.without(left, Unreachable("tcp", "a firewall"))) == ["grpc"]
    assert list(choice.for_region(region)) == ["grpc"]
    clock.now = 60
    assert list(choice.for_region(region)) == ["shm", "grpc"]
    clock.now = 70
    assert list(choice.for_region(region)) == ["shm", "tcp", "grpc"]
    assert "host:1: a firewall; tcp is avoided for 60 s" in caplog.text


@pytest.mark.parametrize(("said", "taken"), [("", "grpc"), ("grpc", "grpc"), ("tcp", "tcp")])
def test_what_the_server_took(said: str, taken: str) -> None:
    """A server that is older than planes names none."""
    assert PlaneChoice("auto", "host:1").check(["tcp", "grpc"], said) == taken


@pytest.mark.parametrize("said", ["", "grpc", "shm", "rdma"])
def test_a_server_that_took_another_plane(said: str) -> None:
    with pytest.raises(InvalidRequest, match="plane tcp is not there: host:1 took"):
        PlaneChoice("tcp", "host:1").check(["tcp"], said)
