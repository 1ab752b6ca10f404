"""The planes that this server has, and which of them a transfer takes."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from kvserve.errors import InvalidRequest
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.planes.grpc import GrpcFetchPlane, GrpcStorePlane, Read, Write
from kvserve.transfer.planes.tcp import TcpFetchPlane, TcpStorePlane
from kvserve.transfer.planes.tcp_port import TcpPort

_WANTED_MAX = 16


class Planes:
    """Makes the plane of each transfer; as a context it lets go of its connection at the end."""

    def __init__(self, tcp: TcpPort | None, *, frame_size_bytes_max: int) -> None:
        self._tcp = tcp
        self._frame_size_bytes_max = frame_size_bytes_max

    @property
    def names(self) -> list[str]:
        return ["grpc"] if self._tcp is None else ["grpc", "tcp"]

    @property
    def data_address(self) -> str:
        """Where the tcp plane listens, as clients are told; empty if it is off."""
        return "" if self._tcp is None else self._tcp.address

    def fetch(self, wanted: Sequence[str], write: Write) -> AbstractAsyncContextManager[FetchPlane]:
        """The first plane of `wanted` that is there; grpc if none is named.

        Raises:
            InvalidRequest: none of them is there.
        """
        if self._pick(wanted) == "tcp" and self._tcp is not None:
            return TcpFetchPlane(write, self._tcp)
        return nullcontext(GrpcFetchPlane(write))

    def store(
        self, wanted: Sequence[str], read: Read, write: Write
    ) -> AbstractAsyncContextManager[StorePlane]:
        """The same for a store."""
        if self._pick(wanted) == "tcp" and self._tcp is not None:
            return TcpStorePlane(read, write, self._frame_size_bytes_max, self._tcp)
        return nullcontext(GrpcStorePlane(read, write, self._frame_size_bytes_max))

    def _pick(self, wanted: Sequence[str]) -> str:
        for name in wanted[:_WANTED_MAX]:
            if name in self.names:
                return name
        if wanted:
            asked = ", ".join(name[:32] for name in wanted[:_WANTED_MAX])
            raise InvalidRequest(
                f"plane {asked} is not there; this server has {' and '.join(self.names)}"
            )
        return "grpc"
