"""Every error that crosses a boundary of kvserve, named by what the caller does next.

```
KvserveError
├── RequestError            the caller must change something
│   ├── InvalidRequest         INVALID_ARGUMENT
│   └── HandleClosed           FAILED_PRECONDITION  the handle or client has ended
├── TransferError           the request was fine, this try of it was not
│   ├── TransferCancelled      CANCELLED
│   ├── DeadlineExceeded       DEADLINE_EXCEEDED
│   ├── MessageTooLarge        RESOURCE_EXHAUSTED
│   ├── Overloaded             UNAVAILABLE          retry after `retry_after_s`
│   ├── ServerUnavailable      UNAVAILABLE          retry: no server answers, or it drains
│   └── ServerFault            INTERNAL             a defect; the server's log has the stack
└── StorageError
    ├── StorageFull            RESOURCE_EXHAUSTED   no space left
    │   └── QuotaExceeded          RESOURCE_EXHAUSTED   no quota left
    └── StorageUnavailable     UNAVAILABLE          retry: EIO, ESTALE, no answer in time, ...
```

A miss is a value (`model.ChunkStatus`), never an error. `OSError` becomes a `StorageError` in `fs`
only, and a `ServerUnavailable` in `data_socket.py` and `tls_socket.py` only; an error becomes a
gRPC status in `rpc/status.py` only, and a status an error in `kvclient/status.py` only, by the
class name in the trailing metadata.
"""

from typing import ClassVar


class KvserveError(Exception):
    """Root; never raised itself. `code` is the name of the gRPC status, `retryable` whether the
    same call may succeed later without a change."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class RequestError(KvserveError):
    """The caller must change something."""


class InvalidRequest(RequestError):
    """An argument breaks a rule; the message names it and the rule."""

    code = "INVALID_ARGUMENT"


class HandleClosed(RequestError):
    """The handle, region or client was used after its end."""

    code = "FAILED_PRECONDITION"


class TransferError(KvserveError):
    """The request was fine, this try of it was not."""


class TransferCancelled(TransferError):
    """The caller cancelled the handle."""

    code = "CANCELLED"


class DeadlineExceeded(TransferError):
    """The deadline passed, queueing included."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class MessageTooLarge(TransferError):
    """A message over the limit of its receiver; the limits are in the server info."""

    code = "RESOURCE_EXHAUSTED"


class Overloaded(TransferError):
    """A bound is reached (transfers, open files); retry after `retry_after_s` seconds."""

    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerUnavailable(TransferError):
    """No server answers at the address, the connection broke, or the server drains."""

    code = "UNAVAILABLE"
    retryable = True


class ServerFault(TransferError):
    """A defect in the server; its log has the stack."""

    code = "INTERNAL"


class StorageError(KvserveError):
    """The file system refused; the message has path and errno."""


class StorageFull(StorageError):
    """ENOSPC: make room. On Lustre one full storage target is enough; another may have room."""

    code = "RESOURCE_EXHAUSTED"


class QuotaExceeded(StorageFull):
    """EDQUOT: raise the quota or make room; wherever the next file lands, it is refused too."""


class StorageUnavailable(StorageError):
    """EIO, ESTALE, ETIMEDOUT and the like: the file system may come back.

    `timeout_s` is not 0 where it gave no answer at all for so long.
    """

    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, message: str, *, timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class MalformedMessage(ValueError):
    """A message that cannot be read. The server answers it with `InvalidRequest`; for a client it
    is a `ServerFault`: whoever sent it has the defect."""


_BRANCHES = (RequestError, TransferError, StorageError)


def raised_classes(root: type[KvserveError] = KvserveError) -> list[type[KvserveError]]:
    """The classes that are raised: all but the root and its three branches."""
    found: list[type[KvserveError]] = []
    for cls in root.__subclasses__():
        found.extend([] if cls in _BRANCHES else [cls])
        found.extend(raised_classes(cls))
    return found
