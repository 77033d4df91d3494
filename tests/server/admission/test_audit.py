from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from tests.fakes import Clock
from tests.server.admission.conftest import KEY, Write, entry

from xlaserve.admission.audit import Refusals, audited
from xlaserve.admission.authenticator import Authenticator
from xlaserve.admission.caller import ADMIN, ANYBODY, CURRENT, INFER, Caller
from xlaserve.admission.log_lines import BURST_LINES, LINES_PER_S
from xlaserve.errors import PermissionDenied, Unauthenticated
from xlaserve.wire.grpc.method_guard import MethodGuard


@pytest.fixture(autouse=True)
def _in_a_call_of_its_own(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    token = CURRENT.set(ANYBODY)
    yield
    CURRENT.reset(token)


def test_who_is_refused_what_is_for_administrators_is_named(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    authenticator = Authenticator(write(entry("shop")))
    load, infer = (
        MethodGuard(authenticator, ADMIN, "RepositoryModelLoad"),
        MethodGuard(authenticator, INFER, "ModelInfer"),
    )
    with pytest.raises(PermissionDenied):
        load.check_metadata([("x-api-key", KEY)])
    for guard in (load, infer):
        with pytest.raises(Unauthenticated):
            guard.check_metadata([("x-api-key", "wrong")])
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "audit: RepositoryModelLoad by shop: PERMISSION_DENIED"),
        ("WARNING", "audit: RepositoryModelLoad by stranger: UNAUTHENTICATED"),
    ]


def test_what_others_wrote_can_not_be_taken_for_an_outcome(caplog: pytest.LogCaptureFixture) -> None:
    CURRENT.set(Caller("x: OK", frozenset()))
    with audited("load", "digits by operators: OK"):
        pass
    assert caplog.messages == ['audit: load "digits by operators: OK" by "x: OK": OK']


def test_a_flood_of_refusals_is_bounded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)

    async def flood(requests: int) -> None:
        for _ in range(requests):
            refusals.note("load", ADMIN, PermissionDenied())

    asyncio.run(flood(3 * BURST_LINES))
    assert len(caplog.records) == BURST_LINES
    clock.now += 2 / LINES_PER_S
    asyncio.run(flood(10))
    assert len(caplog.records) == BURST_LINES + 2
