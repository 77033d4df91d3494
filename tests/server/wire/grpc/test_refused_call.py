from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from xlaserve.errors import (
    INTERNAL_MESSAGE,
    DeadlineExceeded,
    LimitExceeded,
    OutOfDeviceMemory,
    QueueFull,
    ShuttingDown,
    XlaserveError,
    explain,
)
from xlaserve.wire.grpc.refused_call import refuse


class Aborted(Exception):
    pass


class Call:
    """A context that, like grpc's, holds what it raised."""

    def trailing_metadata(self) -> Any:
        return (("x-request-id", "7"),)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.trailing = dict(trailing_metadata)
        self.raised = Aborted(code, details)
        raise self.raised


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (QueueFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        (XlaserveError("no leaf"), grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE),
        (ZeroDivisionError("/etc/secret"), grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE),
    ],
)
async def test_whatever_a_method_raises_is_answered_with_its_status(
    error: Exception, status: grpc.StatusCode, message: str
) -> None:
    with pytest.raises(Aborted) as caught:
        await refuse(cast(Any, Call()), error)
    assert caught.value.args == (status, message)


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [(None, "1", "1000"), (0.0, "0", "0"), (0.0312, "1", "32"), (2.5, "3", "2500"), (4e9, "4000000000", "2147483647")],
)
async def test_a_refusal_says_when_to_come_again_next_to_what_is_said_already(
    wait_s: float | None, seconds: str, milliseconds: str
) -> None:
    call = Call()
    with pytest.raises(Aborted):
        await refuse(cast(Any, call), LimitExceeded("too much", wait_s))
    details = Status.FromString(call.trailing.pop("grpc-status-details-bin"))
    assert call.trailing == {"x-request-id": "7", "retry-after": seconds, "grpc-retry-pushback-ms": milliseconds}
    assert (details.code, details.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "too much")
    (detail,) = details.details
    retry = RetryInfo()
    assert detail.Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == (1.0 if wait_s is None else wait_s)


@pytest.mark.parametrize("error", [ShuttingDown("stopping"), DeadlineExceeded("late"), OutOfDeviceMemory("no room")])
async def test_who_had_better_ask_another_server_is_not_told_to_wait(error: Exception) -> None:
    call = Call()
    with pytest.raises(Aborted):
        await refuse(cast(Any, call), error)
    assert not call.trailing


def test_what_is_not_ours_to_explain_goes_to_the_log_and_what_is_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        explain(QueueFull("full"))
        assert caplog.records == []
        explain(ZeroDivisionError("a defect"))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


class GoneContext:
    """The context of a client that is gone: nothing can be written to it."""

    def trailing_metadata(self) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("full"),
        grpc.aio.InternalError("Failed grpc_call_start_batch"),
        ExceptionGroup("unhandled errors in a TaskGroup", [grpc.aio.InternalError("Failed grpc_call_start_batch")]),
    ],
)
async def test_a_client_that_is_gone_ends_its_call_without_an_error(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(asyncio.CancelledError):
        await refuse(cast(Any, GoneContext()), error)
    assert not caplog.records
