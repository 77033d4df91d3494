from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc
import pytest

from xlaserve.errors import QueueFull, XlaserveError
from xlaserve.rpc.refusal import refuse
from xlaserve.status import INTERNAL_MESSAGE, explain


class Aborted(Exception):
    pass


class Call:
    """A context that, like grpc's, holds what it raised."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
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

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
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
