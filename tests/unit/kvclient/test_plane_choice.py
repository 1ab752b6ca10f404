"""Which planes are asked for, and for how long one that cannot be reached is avoided."""

import pytest

from kvclient.planes.base import Unreachable
from kvclient.planes.choice import PlaneChoice
from kvclient.region import Region, as_region
from kvclient.shared_region import SharedRegion
from kvclient.tls import Security, Tls
from kvserve import nixl_agent
from kvserve.errors import InvalidRequest, ServerUnavailable

PRIVATE = as_region(bytearray(1))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["with NIXL", "without NIXL"], autouse=True)
def has_nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it is installed here does not matter."""
    has: bool = request.param == "with NIXL"
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: has)
    return has


def test_nixl_is_for_regions_that_are_made_once(has_nixl: bool) -> None:
    """A bare buffer is not worth registering: that would take longer than most fetches."""
    choice = PlaneChoice("auto", "host:1")
    nixl = ["nixl"] if has_nixl else []
    assert list(choice.for_region(Region(bytearray(1)))) == [*nixl, "tcp", "grpc"]
    assert list(choice.for_region(as_region(bytearray(1)))) == ["tcp", "grpc"]


def test_who_asks_for_tls_gets_nixl_only_by_name(has_nixl: bool) -> None:
    """It encrypts nothing."""
    region, security = Region(bytearray(1)), Security(Tls(), "host:1")
    choice = PlaneChoice("auto", "host:1", security=security)
    assert list(choice.for_region(region)) == ["tcp", "grpc"]
    if has_nixl:
        choice = PlaneChoice("nixl", "host:1", security=security)
        assert list(choice.for_region(region)) == ["nixl"]


def test_pinned_nixl_is_for_any_region_that_can_be_written(has_nixl: bool) -> None:
    if not has_nixl:
        with pytest.raises(InvalidRequest, match=r"plane nixl: the package nixl-cu12 is not"):
            PlaneChoice("nixl", "host:1")
        return
    choice = PlaneChoice("nixl", "host:1")
    assert list(choice.for_region(as_region(bytearray(1)))) == ["nixl"]
    assert list(choice.for_store(as_region(bytearray(1)))) == ["nixl"]
    with pytest.raises(InvalidRequest, match="plane nixl takes writable regions only"):
        choice.for_store(Region(b"x"))


def test_by_itself_the_best_that_the_region_allows(has_nixl: bool) -> None:
    choice = PlaneChoice("auto", "host:1")
    nixl = ["nixl"] if has_nixl else []
    assert list(choice.for_region(PRIVATE)) == ["tcp", "grpc"]
    assert list(choice.for_region(SharedRegion(1))) == ["shm", *nixl, "tcp", "grpc"]
    assert list(choice.for_store(PRIVATE)) == ["tcp", "grpc"]
    assert list(choice.for_store(SharedRegion(1))) == ["shm", *nixl, "tcp", "grpc"]
    assert list(choice.for_store(Region(bytearray(1)))) == [*nixl, "tcp", "grpc"]
    assert list(choice.for_store(Region(b"x"))) == ["tcp", "grpc"]


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
    region.is_lasting = False  # so not over nixl
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


def test_the_plane_that_was_taken_last_is_expected_again() -> None:
    choice = PlaneChoice("auto", "127.0.0.1:1")
    assert choice.expected(["nixl", "tcp", "grpc"]) == "nixl"
    choice.check(["nixl", "tcp", "grpc"], "tcp")
    assert choice.expected(["nixl", "tcp", "grpc"]) == "tcp"
    assert choice.expected(["shm", "grpc"]) == "shm"
    choice.check(["shm", "grpc"], "")
    assert choice.expected(["shm", "grpc"]) == "grpc"
    assert choice.expected(["nixl", "tcp", "grpc"]) == "tcp"
