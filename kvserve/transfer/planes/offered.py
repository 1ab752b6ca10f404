"""The planes that this server has, and which of them a transfer takes."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from kvserve.errors import InvalidRequest
from kvserve.model import Descriptor
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.planes.grpc import GrpcFetchPlane, GrpcStorePlane, Read, Write
from kvserve.transfer.planes.nixl import NixlFetchPlane
from kvserve.transfer.planes.nixl_port import NixlPort
from kvserve.transfer.planes.nixl_store import NixlStorePlane
from kvserve.transfer.planes.shm import ShmFetchPlane, ShmStorePlane
from kvserve.transfer.planes.tcp import TcpFetchPlane, TcpStorePlane
from kvserve.v1 import kvserve_pb2 as pb

_WANTED_MAX = 16


class Planes:
    """Makes the plane of each transfer; as a context it lets go of its connection at the end."""

    def __init__(
        self, port: DataPort, *, frame_size_bytes_max: int, nixl: NixlPort | None = None
    ) -> None:
        self._port = port
        self._nixl = nixl
        self._frame_size_bytes_max = frame_size_bytes_max

    @property
    def names(self) -> list[str]:
        has = {
            "grpc": True,
            "tcp": bool(self._port.address),
            "shm": bool(self._port.unix_address),
            "nixl": bool(self._port.address) and self._nixl is not None,
        }
        return [name for name, is_there in has.items() if is_there]

    @property
    def data_address(self) -> str:
        """Where the tcp plane listens, as clients are told; empty if it is off."""
        return self._port.address

    def fetch(
        self,
        wanted: Sequence[str],
        descriptor: Descriptor,
        layers: Sequence[int],
        write: Write,
        *,
        kept: pb.KeptConnection | None = None,
    ) -> AbstractAsyncContextManager[FetchPlane]:
        """The first plane of `wanted` that is there; grpc if none is named.

        `kept`: the connection that the client would like it to use.

        Raises:
            InvalidRequest: none of them is there.
        """
        match self._pick(wanted, self.names):
            case "shm":
                return ShmFetchPlane(write, self._port, descriptor, layers, kept=kept)
            case "nixl":
                assert self._nixl is not None, "it is not offered"
                return NixlFetchPlane(write, self._port, self._nixl, descriptor, layers)
            case "tcp":
                return TcpFetchPlane(write, self._port, kept)
            case _:
                return nullcontext(GrpcFetchPlane(write))

    def store(
        self, wanted: Sequence[str], descriptor: Descriptor, read: Read, write: Write
    ) -> AbstractAsyncContextManager[StorePlane]:
        """The same for a store."""
        size = self._frame_size_bytes_max
        match self._pick(wanted, self.names):
            case "shm":
                return ShmStorePlane(read, write, size, self._port, descriptor)
            case "nixl":
                assert self._nixl is not None, "it is not offered"
                return NixlStorePlane(
                    read, write, size, self._port, nixl=self._nixl, descriptor=descriptor
                )
            case "tcp":
                return TcpStorePlane(read, write, size, self._port)
            case _:
                return nullcontext(GrpcStorePlane(read, write, size))

    @staticmethod
    def _pick(wanted: Sequence[str], names: Sequence[str]) -> str:
        for name in wanted[:_WANTED_MAX]:
            if name in names:
                return name
        if wanted:
            asked = ", ".join(name[:32] for name in wanted[:_WANTED_MAX])
            raise InvalidRequest(
                f"plane {asked} is not there; this server has {' and '.join(names)}"
            )
        return "grpc"
