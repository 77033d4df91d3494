from __future__ import annotations

import logging

import pytest

from xlaserve.admission.log_lines import BURST_LINES
from xlaserve.wire.grpc.unreceived import MAX_METADATA_BYTES, Unreceived


async def test_calls_without_their_message_are_counted_and_few_have_lines(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[tuple[str, str]] = []
    unreceived = Unreceived(4096, lambda method, status: counted.append((method, status)), clock=lambda: 0.0)
    with caplog.at_level(logging.INFO, "xlaserve.wire.grpc.unreceived"):
        for _ in range(3 * BURST_LINES):
            unreceived.note("ModelInfer")
    assert counted == [("ModelInfer", "CANCELLED")] * (3 * BURST_LINES)
    assert [record.levelno for record in caplog.records] == [logging.INFO] * BURST_LINES
    assert "max_message_bytes 4096" in caplog.messages[0]
    assert f"its metadata have more than {MAX_METADATA_BYTES}" in caplog.messages[0]
