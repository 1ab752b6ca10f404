"""gRPC statuses -> the errors of `kvserve.errors`, the only place."""

import grpc

from kvserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvserveError,
    MessageTooLarge,
    Overloaded,
    ServerFault,
    ServerUnavailable,
    TransferCancelled,
    leaves,
)

_BY_NAME = {cls.__name__: cls for cls in leaves()}
# Statuses that gRPC itself makes, without our metadata.
_BY_CODE: dict[grpc.StatusCode, type[KvserveError]] = {
    grpc.StatusCode.CANCELLED: TransferCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLarge,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequest,
}


def to_error(error: grpc.aio.AioRpcError, address: str) -> KvserveError:
    """The class that the server raised, or the one that fits gRPC's own status."""
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    cls = _BY_NAME.get(metadata.get("kvserve-reason", ""))
    if cls is None:
        cls = _BY_CODE.get(error.code(), ServerFault)
    message = f"{address}: {error.details() or error.code().name}"
    if cls is Overloaded:
        after = float(metadata.get("kvserve-retry-after-s", "0.1"))
        return Overloaded(message, retry_after_s=after)
    return cls(message)
