"""Which planes a client asks for: the pinned one, or the best that it can reach."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvclient.planes.base import PLANES, Unreachable
from kvclient.planes.tcp import DataConnections
from kvserve.errors import InvalidRequest, ServerUnavailable

log = logging.getLogger(__name__)

AUTO: Final = "auto"
_AVOIDED_S = 60.0


class PlaneChoice:
    """One per client. `plane`: one of `PLANES`, or `AUTO`."""

    def __init__(
        self, plane: str, address: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if plane not in (AUTO, *PLANES):
            raise InvalidRequest(f"plane {plane!r} must be {AUTO}, {' or '.join(PLANES)}")
        host = "127.0.0.1" if address.startswith("unix:") else address.rpartition(":")[0]
        self.connections = DataConnections(host.strip("[]"))
        self._address = address
        self._plane = plane
        self._clock = clock
        self._avoided_until = 0.0

    def __repr__(self) -> str:
        return f"<PlaneChoice {self._plane}: {', '.join(self.wanted())}>"

    def wanted(self) -> Sequence[str]:
        """What to ask for, best first."""
        if self._plane != AUTO:
            return (self._plane,)
        return PLANES if self._clock() >= self._avoided_until else ("grpc",)

    def without(self, error: Unreachable) -> Sequence[str]:
        """What to ask for instead, at once and for a while.

        Raises:
            ServerUnavailable: no other plane will do, this one is pinned.
        """
        if self._plane != AUTO:
            raise ServerUnavailable(f"{self._address}: plane {self._plane}: {error}") from error
        self._avoided_until = self._clock() + _AVOIDED_S
        log.warning("%s: %s; grpc is used for %g s", self._address, error, _AVOIDED_S)
        return ("grpc",)

    def check(self, plane: str) -> None:
        """`plane` is what the server took, empty if it knows only grpc.

        Raises:
            InvalidRequest: that is not the pinned one.
        """
        if self._plane not in (AUTO, plane or "grpc"):
            raise InvalidRequest(
                f"plane {self._plane} is not there: {self._address} has only {plane or 'grpc'}"
            )
