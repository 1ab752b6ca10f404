"""Which planes a client asks for: the pinned one, or the best that it can reach."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvclient.planes.base import PLANES, Unreachable
from kvclient.planes.tcp import DataConnections
from kvclient.region import Region
from kvclient.shared_region import SharedRegion
from kvserve import nixl_agent
from kvserve.errors import InvalidRequest, ServerUnavailable

log = logging.getLogger(__name__)

AUTO: Final = "auto"
_AVOIDED_S = 60.0
_FETCH_ONLY: Final = ("shm", "nixl")


class PlaneChoice:
    """One per client. `plane`: one of `PLANES`, or `AUTO`."""

    def __init__(
        self, plane: str, address: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if plane not in (AUTO, *PLANES):
            raise InvalidRequest(f"plane {plane!r} must be {AUTO}, {' or '.join(PLANES)}")
        if plane == "nixl" and not nixl_agent.is_installed():
            raise InvalidRequest(f"plane nixl: {nixl_agent.HOW_TO_INSTALL}")
        host = "127.0.0.1" if address.startswith("unix:") else address.rpartition(":")[0]
        self.connections = DataConnections(host)
        self._address = address
        self._plane = plane
        self._clock = clock
        self._avoided_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<PlaneChoice {self._plane}: {', '.join(self.for_store())}>"

    def for_fetch(self, region: Region) -> Sequence[str]:
        """What to ask for, best first.

        Raises:
            InvalidRequest: shm is pinned, and the region is not shared.
        """
        is_shared = isinstance(region, SharedRegion)
        if self._plane == "shm" and not is_shared:
            raise InvalidRequest("plane shm fetches into a SharedRegion only")
        if self._plane != AUTO:
            return (self._plane,)
        fits = {"shm": is_shared, "nixl": region.is_lasting and nixl_agent.is_installed()}
        return [it for it in self._reachable() if fits.get(it, True)]

    def for_store(self) -> Sequence[str]:
        """The same; shm and nixl are for fetches, a client that pins one of them stores over the
        best other plane."""
        if self._plane not in (AUTO, *_FETCH_ONLY):
            return (self._plane,)
        return [it for it in self._reachable() if it not in _FETCH_ONLY]

    def without(self, planes: Sequence[str], error: Unreachable) -> Sequence[str]:
        """What is left of `planes` for this transfer; later ones avoid the plane for a while.

        Raises:
            ServerUnavailable: nothing, it is pinned.
        """
        left = [it for it in planes if it != error.plane]
        if not left:
            raise ServerUnavailable(f"{self._address}: plane {error.plane}: {error}") from error
        self._avoided_until[error.plane] = self._clock() + _AVOIDED_S
        log.warning("%s: %s; %s is avoided for %g s", self._address, error, error.plane, _AVOIDED_S)
        return left

    def check(self, planes: Sequence[str], plane: str) -> str:
        """The plane that the server took: `plane`, or grpc if it knows no other.

        Raises:
            InvalidRequest: that is none of `planes`.
        """
        taken = plane or "grpc"
        if taken not in planes:
            raise InvalidRequest(
                f"plane {' or '.join(planes)} is not there: {self._address} took {taken}"
            )
        return taken

    def _reachable(self) -> list[str]:
        now = self._clock()
        return [it for it in PLANES if now >= self._avoided_until.get(it, 0.0)]
