from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import pytest

from xlaserve.admission.log_lines import BURST_LINES, LEFT_OUT_S, LINES_PER_S
from xlaserve.config import Mode
from xlaserve.engine.timings import Timings
from xlaserve.telemetry import request_context
from xlaserve.telemetry.access_log import AccessLog
from xlaserve.telemetry.tracing import Endpoint

TIMINGS = Timings(queue_s=0.001, execute_s=0.002, total_s=0.0035)


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "xlaserve")


def answer(log: AccessLog) -> None:
    if log.has_answers:
        log.answered("ModelInfer", "digits", "2", Mode.XLA, images=3, timings=TIMINGS, caller="shop")


@pytest.mark.parametrize(
    ("lines", "levels"),
    [
        ("off", [logging.ERROR]),
        ("errors", [logging.INFO, logging.WARNING, logging.ERROR]),
        ("all", [logging.INFO, logging.INFO, logging.WARNING, logging.ERROR]),
    ],
)
async def test_the_setting_says_which_requests_have_lines(
    lines: Literal["off", "errors", "all"], levels: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    log = AccessLog(lines)
    answer(log)
    for status in ("NOT_FOUND", "RESOURCE_EXHAUSTED", "INTERNAL"):
        log.failed("ModelInfer", status, "why", model="digits")
    assert [record.levelno for record in caplog.records] == levels


async def test_a_line_of_a_failure_has_all_that_is_known_of_it(caplog: pytest.LogCaptureFixture) -> None:
    request_context.begin(Endpoint("service/Method", {}), [("x-request-id", "7")])
    AccessLog().failed(
        "ModelInfer", "NOT_FOUND", "no model 'cat'", caller="shop", model="cat", version="2", seconds=0.00025
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "method=ModelInfer status=NOT_FOUND model=cat version=2 total_s=0.000250 reason=\"no model 'cat'\" caller=shop"
    )
    fields: Any = record
    assert (fields.request_id, fields.caller, fields.model, fields.status) == ("7", "shop", "cat", "NOT_FOUND")
    assert fields.version == "2"
    assert (fields.reason, fields.total_s, fields.method) == ("no model 'cat'", 0.00025, "ModelInfer")


async def test_a_line_of_an_answer_has_its_stages(caplog: pytest.LogCaptureFixture) -> None:
    answer(AccessLog("all"))
    (record,) = caplog.records
    assert record.getMessage() == (
        "method=ModelInfer status=OK model=digits version=2 mode=xla images=3 decode_s=0.000000 queue_s=0.001000 "
        "gather_s=0.000000 execute_s=0.002000 encode_s=0.000000 total_s=0.003500 caller=shop"
    )


async def test_a_client_can_forge_no_field(caplog: pytest.LogCaptureFixture) -> None:
    async def answer_message() -> None:
        request_context.begin_message('1 caller=root "')
        model = "m status=OK\ncaller=root" + "y" * 1000
        AccessLog().failed("ModelInfer", "NOT_FOUND", 'x" status=OK', caller="shop", model=model)

    request_context.begin(Endpoint("service/Method", {}), ())
    await asyncio.create_task(answer_message())
    (record,) = caplog.records
    message = record.getMessage()
    assert len(message) < 500
    assert message.startswith(r'method=ModelInfer status=NOT_FOUND model="m status=OK\ncaller=rootyy')
    assert message.endswith(r'reason="x\" status=OK" caller=shop message_id="1 caller=root \""')


async def test_a_flood_is_bounded_and_counted(caplog: pytest.LogCaptureFixture, virtual_time: Any) -> None:
    log = AccessLog(clock=virtual_time.time)
    for _ in range(BURST_LINES):
        log.failed("ModelInfer", "NOT_FOUND", "no such model")
    assert len(caplog.records) == BURST_LINES
    for _ in range(40):
        log.failed("ModelInfer", "NOT_FOUND", "no such model")
    log.failed("ModelInfer", "UNAUTHENTICATED", "who?")
    assert len(caplog.records) == BURST_LINES
    log.failed("ModelInfer", "INTERNAL", "a defect")
    assert caplog.records[-1].levelno == logging.ERROR, "what clients do hides no error of the server"
    await asyncio.sleep(LEFT_OUT_S + 1)
    assert caplog.records[-1].getMessage() == (
        "left out the lines of 41 more failures: NOT_FOUND 40, UNAUTHENTICATED 1"
    )
    assert caplog.records[-1].levelno == logging.INFO
    before = len(caplog.records)
    for _ in range(1000):
        log.failed("ModelInfer", "NOT_FOUND", "no such model")
    assert len(caplog.records) - before == int((LEFT_OUT_S + 1) * LINES_PER_S)
    log.flush()
    assert "945 more failures" in caplog.records[-1].getMessage()
    await asyncio.sleep(2 * LEFT_OUT_S)
    assert "945 more failures" in caplog.records[-1].getMessage(), "said once"
