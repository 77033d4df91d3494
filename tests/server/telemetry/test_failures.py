from __future__ import annotations

from tests.fakes import Clock

from xlaserve.telemetry import request_context
from xlaserve.telemetry.access_log import MAX_TEXT_LENGTH
from xlaserve.telemetry.failures import KEPT, MAX_REASON_LENGTH, Failures
from xlaserve.telemetry.tracing import Endpoint


async def test_a_failure_is_kept_with_all_that_names_its_call() -> None:
    request_context.begin(Endpoint("service/Method", {}), [("x-request-id", "7")])
    failures = Failures(Clock(3.0))
    failures.note("classify", "NOT_FOUND", "no model 'cat'", caller="shop", model="cat", seconds=0.5)
    (kept,) = failures
    assert (kept.at_s, kept.method, kept.status, kept.reason) == (3.0, "classify", "NOT_FOUND", "no model 'cat'")
    assert (kept.model, kept.caller, kept.request_id, kept.total_s) == ("cat", "shop", "7", 0.5)


def test_client_errors_never_displace_the_servers_own_failures() -> None:
    clock = Clock()
    failures = Failures(clock)
    failures.note("infer", "INTERNAL", "first")
    for number in range(3 * KEPT):
        clock.now += 1
        failures.note("infer", "INVALID_ARGUMENT", str(number))
    clock.now += 1
    failures.note("infer", "DEADLINE_EXCEEDED", "last")
    kept = [failure.reason for failure in failures]
    assert kept == ["last", *(str(number) for number in reversed(range(2 * KEPT, 3 * KEPT))), "first"]


def test_texts_of_clients_are_cut() -> None:
    failures = Failures()
    failures.note("infer", "NOT_FOUND", "r" * 10_000, model="m" * 10_000)
    (kept,) = failures
    assert (len(kept.reason), len(kept.model)) == (MAX_REASON_LENGTH, MAX_TEXT_LENGTH)
