"""Which planes a client asks for: the pinned one, or the best that it can reach."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvclient.planes.base import PLANES, Unreachable
from kvclient.planes.tcp import DataConnections
from kvclient.region import Region
from kvclient.shared_region import SharedRegion
from kvclient.tls import Security
from kvserve import nixl_agent
from kvserve.errors import InvalidRequest, ServerUnavailable

log = logging.getLogger(__name__)

AUTO: Final = "auto"
_AVOIDED_S = 60.0


class PlaneChoice:
    """One per client. `plane`: one of `PLANES`, or `AUTO`."""

    def __init__(
        self,
        plane: str,
        address: str,
        *,
        security: Security | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if plane not in (AUTO, *PLANES):
            raise InvalidRequest(f"plane {plane!r} must be one of {', '.join((AUTO, *PLANES))}")
        if plane == "nixl" and not nixl_agent.is_installed():
            raise InvalidRequest(f"plane nixl: {nixl_agent.HOW_TO_INSTALL}")
        host = "127.0.0.1" if address.startswith("unix:") else address.rpartition(":")[0]
        self.connections = DataConnections(host, security)
        self._address = address
        self._plane = plane
        self._is_secured = security is not None
        self._clock = clock
        self._avoided_until: dict[str, float] = {}
        self._taken: dict[tuple[str, ...], str] = {}

    def __repr__(self) -> str:
        return f"<PlaneChoice {self._plane}, reachable: {', '.join(self._reachable())}>"

    def for_region(self, region: Region) -> Sequence[str]:
        """What to ask for, for a fetch into this region, best first.

        Raises:
            InvalidRequest: shm is pinned, and the region is not shared.
        """
        return self._fitting(region, self._plane)

    def for_store(self, region: Region) -> Sequence[str]:
        """The same for a store from it.

        Raises:
            InvalidRequest: also if nixl is pinned, and the region cannot be written: NIXL registers
                memory for both directions.
        """
        fitting = self._fitting(region, self._plane)
        if region.is_writable:
            return fitting
        if self._plane == "nixl":
            raise InvalidRequest("plane nixl takes writable regions only, in stores as well")
        return [it for it in fitting if it != "nixl"]

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
        self._taken[tuple(planes)] = taken
        return taken

    def expected(self, planes: Sequence[str]) -> str:
        """A guess which the server will take: the one that it took of the same last, else the
        best."""
        return self._taken.get(tuple(planes), planes[0])

    def _fitting(self, region: Region, plane: str) -> Sequence[str]:
        is_shared = isinstance(region, SharedRegion)
        if plane == "shm" and not is_shared:
            raise InvalidRequest("plane shm takes a SharedRegion only")
        if plane != AUTO:
            return (plane,)
        # NIXL encrypts nothing: who asked for TLS gets it only by name.
        is_for_nixl = region.is_lasting and not self._is_secured and nixl_agent.is_installed()
        fits = {"shm": is_shared, "nixl": is_for_nixl}
        return [it for it in self._reachable() if fits.get(it, True)]

    def _reachable(self) -> list[str]:
        now = self._clock()
        return [it for it in PLANES if now >= self._avoided_until.get(it, 0.0)]
