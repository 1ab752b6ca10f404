"""Errors -> gRPC status, the only place. The class name travels in the trailing metadata."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from kvserve.errors import InvalidRequest, KvserveError, MalformedMessage, Overloaded

log = logging.getLogger(__name__)

REASON_KEY = "kvserve-reason"
RETRY_AFTER_KEY = "kvserve-retry-after-s"


def status_code(error: KvserveError) -> grpc.StatusCode:
    return grpc.StatusCode[error.code]


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvserveError) -> NoReturn:
    metadata = [(REASON_KEY, type(error).__name__)]
    if isinstance(error, Overloaded):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    # The whole text goes into a header: bound it well below the 8 KiB that proxies allow.
    await context.abort(status_code(error), str(error)[:2000], tuple(metadata))


def with_status(
    handler: Callable[[Any, Any], Awaitable[Any]],
) -> Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]:
    """Wraps an rpc handler: our errors become statuses, anything else INTERNAL with a stack in the
    log. Cancellation passes."""

    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(request, context)
        except MalformedMessage as error:
            await abort(context, InvalidRequest(str(error)))
        except KvserveError as error:
            log.info("%s refused: %s: %s", handler.__name__, type(error).__name__, error)
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as gone:
            # grpc.aio's word for a write or read on a connection that has ended.
            log.info("%s: the client went away: %s", handler.__name__, gone)
        except Exception:
            log.exception("%s failed", handler.__name__)
            await context.abort(
                grpc.StatusCode.INTERNAL,
                f"{handler.__name__}: a fault in the server; its log has the stack",
                ((REASON_KEY, "ServerFault"),),
            )

    return handle
