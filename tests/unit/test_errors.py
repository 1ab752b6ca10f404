"""The error tree, and that every error that is raised survives the way over gRPC and back."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvclient.status import to_error
from kvserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvserveError,
    MalformedMessage,
    MessageTooLarge,
    Overloaded,
    QuotaExceeded,
    RequestError,
    ServerFault,
    ServerUnavailable,
    StorageError,
    StorageFull,
    StorageUnavailable,
    TransferError,
    raised_classes,
)
from kvserve.rpc.status import status_code, with_status

RAISED = sorted(raised_classes(), key=lambda cls: cls.__name__)
METHOD = "/test.Raises/Raise"


@pytest.mark.parametrize("cls", RAISED)
def test_every_error_has_the_name_of_a_grpc_status(cls: type[KvserveError]) -> None:
    assert grpc.StatusCode[cls.code] is status_code(cls("text"))
    assert grpc.StatusCode[cls.code] is not grpc.StatusCode.OK


def test_errors_belong_to_one_of_three_branches() -> None:
    """By what the caller does next: change the request, try again, mend the storage."""
    for cls in RAISED:
        branches = [
            branch
            for branch in (RequestError, TransferError, StorageError)
            if issubclass(cls, branch)
        ]
        assert len(branches) == 1, cls


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    retryable = {cls for cls in RAISED if cls.retryable}
    assert retryable == {DeadlineExceeded, Overloaded, ServerUnavailable, StorageUnavailable}


def test_the_picture_in_the_module_is_the_tree() -> None:
    import kvserve.errors

    picture = (kvserve.errors.__doc__ or "").splitlines()
    drawn: dict[str, str] = {}
    for line in picture:
        words = line.strip("│├└─ ").split()
        if "──" in line and words:
            drawn[words[0]] = words[1] if len(words) > 1 else ""
    assert {name for name in drawn if drawn[name].isupper()} == {cls.__name__ for cls in RAISED}
    for cls in RAISED:
        assert drawn[cls.__name__] == cls.code


@pytest.fixture
async def raising(tmp_path: Path) -> AsyncIterator[Any]:
    """A real server whose one method raises what the request names; yields the call."""

    async def raise_it(request: bytes, context: Any) -> bytes:
        name = request.decode()
        if name == "fine":
            return b"fine"
        if name == "malformed":
            raise MalformedMessage("cut short")
        if name == "defect":
            raise KeyError("a secret of the server")
        if name == "busy":
            raise Overloaded("busy", retry_after_s=2.5)
        if name == "long":
            raise InvalidRequest("x" * 100_000)
        raise {cls.__name__: cls for cls in RAISED}[name](f"text of {name}")

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(with_status(raise_it))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Raises", {"Raise": method}),)
    )
    address = f"unix:{tmp_path}/socket"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel.unary_unary(METHOD)
    await server.stop(0)


async def ask(raising: Any, name: str) -> KvserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raising(name.encode())
    return to_error(caught.value, "host:1")


async def test_every_error_arrives_as_itself(raising: Any) -> None:
    assert await raising(b"fine") == b"fine"
    for cls in RAISED:
        error = await ask(raising, cls.__name__)
        assert type(error) is cls
        assert str(error) == f"host:1: text of {cls.__name__}"
        assert error.retryable is cls.retryable


async def test_overloaded_says_when_to_retry(raising: Any) -> None:
    error = await ask(raising, "busy")
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.5


async def test_a_malformed_message_is_the_callers_mistake(raising: Any) -> None:
    error = await ask(raising, "malformed")
    assert type(error) is InvalidRequest
    assert "cut short" in str(error)


async def test_a_defect_is_a_server_fault_that_tells_nothing(
    raising: Any, caplog: pytest.LogCaptureFixture
) -> None:
    error = await ask(raising, "defect")
    assert type(error) is ServerFault
    assert "secret" not in str(error)
    assert "the server; its log has the stack" in str(error)
    assert "a secret of the server" in caplog.text, "the log has the stack"


async def test_a_long_message_is_cut_and_arrives(raising: Any) -> None:
    error = await ask(raising, "long")
    assert type(error) is InvalidRequest
    assert 1000 < len(str(error)) < 4000


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("CANCELLED", ServerUnavailable),
        ("DEADLINE_EXCEEDED", DeadlineExceeded),
        ("UNAVAILABLE", ServerUnavailable),
        ("RESOURCE_EXHAUSTED", MessageTooLarge),
        ("UNIMPLEMENTED", InvalidRequest),
        ("INVALID_ARGUMENT", InvalidRequest),
        ("INTERNAL", ServerUnavailable),
        ("UNKNOWN", ServerUnavailable),
        ("DATA_LOSS", ServerFault),
        ("UNAUTHENTICATED", ServerFault),
    ],
)
def test_a_status_that_grpc_itself_made(code: str, cls: type[KvserveError]) -> None:
    """No metadata of ours: a proxy, a broken connection, gRPC's own limits."""
    bare = grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata())
    error = to_error(bare, "host:1")
    assert type(error) is cls
    assert str(error) == f"host:1: {code}"


@pytest.mark.parametrize("reason", ["NewError", "", "KvserveError", "MalformedMessage"])
def test_a_reason_of_another_version_falls_back_to_the_status(reason: str) -> None:
    metadata = grpc.aio.Metadata(("kvserve-reason", reason))
    status = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, "details"
    )
    assert type(to_error(status, "host:1")) is ServerUnavailable


def test_no_space_and_too_large_share_a_status_and_stay_apart() -> None:
    assert StorageFull.code == MessageTooLarge.code
    metadata = grpc.aio.Metadata(("kvserve-reason", "StorageFull"))
    status = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata)
    assert type(to_error(status, "host:1")) is StorageFull


def test_a_quota_is_a_kind_of_full() -> None:
    """Whoever handles a full file system handles a quota; only the retries tell them apart."""
    assert {StorageFull, QuotaExceeded} <= set(RAISED)
    assert issubclass(QuotaExceeded, StorageFull)
    assert QuotaExceeded.code == StorageFull.code
