"""Calls of both clients that a fleet answers late, and their copies to a second server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest
from tests.client.conftest import Puppet
from tests.client.fleets import PATIENCE_S, Blocking, MakeClient, NameService, ask, eventually

from xlaserve_client import AsyncVisionClient, VisionClient
from xlaserve_client.fleet import CALLS_PER_HEDGE

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "draining")


def test_a_slow_server_is_hedged_by_another_and_the_first_answer_wins(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    slow, *others = puppets
    slow.hold = threading.Event()
    with make_client(service.target, hedge_after_s=0.05, deadline_s=60) as client:
        assert ask(client, 5) == 5
        assert [len(puppet.seen) for puppet in puppets] == [1, 1, 0]
        assert slow.cancelled.wait(10)  # long before its deadline, or the end of its hold
        assert not any(puppet.cancelled.is_set() for puppet in others)


def test_without_being_asked_for_nothing_is_hedged(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    puppets[0].hold = threading.Event()
    with make_client(service.target) as client, ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, client)
        eventually(lambda: puppets[0].seen)
        time.sleep(0.2)
        puppets[0].hold.set()
        held.result(PATIENCE_S)
    assert [len(puppet.seen) for puppet in puppets] == [1, 0, 0]


def test_where_all_servers_are_slow_few_calls_are_sent_twice(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    calls = 60
    for puppet in puppets:
        puppet.hold = threading.Event()
    with make_client(service.target, hedge_after_s=0.001) as client, ThreadPoolExecutor(calls) as pool:
        held = [pool.submit(ask, client, number) for number in range(calls)]
        wanted = sum(1 for _ in puppets) * 16  # calls that the servers can hold at a time
        eventually(lambda: sum(len(puppet.seen) for puppet in puppets) >= wanted)
        for puppet in puppets:
            puppet.hold.set() if puppet.hold else None
        assert [each.result(PATIENCE_S) for each in held] == list(range(calls))
    assert sum(len(puppet.seen) for puppet in puppets) <= calls + 1 + calls // CALLS_PER_HEDGE


def test_a_failed_hedged_call_has_the_answer_or_the_error_of_its_copy(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    first, second, third = puppets
    first.hold = threading.Event()
    first.failures = [UNAVAILABLE]
    with make_client(service.target, hedge_after_s=0.05) as client, ThreadPoolExecutor(1) as pool:
        second.hold = threading.Event()
        held = pool.submit(ask, client, 5)
        eventually(lambda: second.seen)
        first.hold.set()  # it fails while the copy is under way
        eventually(lambda: not first.failures)
        second.hold.set()
        assert held.result(PATIENCE_S) == 5
    assert len(third.seen) == 0


@pytest.mark.parametrize("hedge_after_s", [0.0, -1.0, float("nan"), float("inf")])
def test_the_time_of_a_hedge_is_finite_and_positive(make_client: MakeClient, hedge_after_s: float) -> None:
    kind = AsyncVisionClient if make_client is Blocking else VisionClient
    with pytest.raises(ValueError, match="hedge_after_s: expected seconds greater than 0"):
        kind("fleet://127.0.0.1:1", hedge_after_s=hedge_after_s)
    with pytest.raises(ValueError, match="hedge_after_s: expected a fleet"):
        kind("127.0.0.1:1", hedge_after_s=1.0)
    with pytest.raises(ValueError, match="expected fleet://HOST:PORT"):
        kind("fleet://nonsense")
