from __future__ import annotations

import math

import grpc
import numpy as np

from xlaserve_loadtest.record import REQUEST, BlockRecord, Record, Status


def test_requests_come_back_as_they_were_added_beyond_one_chunk():
    record = Record()
    block = BlockRecord(3, "xla", slots=1, start_ns=0)
    count = 20_000
    for n in range(count):
        record.add(
            block,
            measured=n % 2 == 0,
            scheduled_ns=n,
            start_ns=n + 1,
            end_ns=2**62 + n,
            status=Status.OK,
            images=4,
            stages=(0.5, math.nan, 0.5, 0.5, 0.5, 2.0),
        )
        if n == 10_000:
            assert record.requests().size == n + 1
    rows = record.requests()
    assert rows.dtype == REQUEST
    np.testing.assert_array_equal(rows["scheduled_ns"], np.arange(count))
    np.testing.assert_array_equal(rows["end_ns"] - 2**62, np.arange(count))
    assert rows["measured"].sum() == count / 2
    assert set(rows["block"]) == {3}
    assert rows["total_s"][0] == 2.0
    assert np.isnan(rows["queue_s"]).all()


def test_the_first_message_of_each_failure_of_each_arm_is_kept():
    record = Record()
    for arm, status, detail in [
        ("xla", Status.INTERNAL, "first"),
        ("xla", Status.INTERNAL, "second"),
        ("xla", Status.UNAVAILABLE, "gone"),
        ("graph", Status.INTERNAL, "other"),
    ]:
        block = BlockRecord(0, arm, slots=1, start_ns=0)
        record.add(block, measured=True, scheduled_ns=0, start_ns=0, end_ns=1, status=status, images=1, detail=detail)
    assert record.failures == {
        ("xla", Status.INTERNAL): "first",
        ("xla", Status.UNAVAILABLE): "gone",
        ("graph", Status.INTERNAL): "other",
    }


def test_an_empty_record_has_no_requests():
    assert Record().requests().size == 0


def test_statuses_have_the_numbers_of_grpc():
    assert {status.name: status.value[0] for status in grpc.StatusCode} == {
        status.name: status.value for status in Status if status is not Status.INVALID_REPLY
    }
