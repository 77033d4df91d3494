"""The messages of a process to a supervisor that reads when the test does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from xlaserve.processes.supervision import pulse
from xlaserve.processes.supervision.child import Child
from xlaserve.processes.supervision.messages import CHANNEL, Kind, MessageReader, encode

PATIENCE_S = 30.0
AT_ONCE_S = 0.5
"""Bound of a call that takes some microseconds, on a busy machine."""
MORE_THAN_FITS = 8 * 2**20
"""Bytes: more than a socket holds."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A mock in place of `os.kill`."""
    kill = Mock()
    monkeypatch.setattr(os, "kill", kill)
    return kill


class Parent:
    """The supervisor's end, and the process."""

    def __init__(self) -> None:
        self.channel, channel = socket.socketpair()
        self.channel.settimeout(PATIENCE_S)
        self.pulse = pulse.create()
        self.child = Child("front 1", b"", {CHANNEL: channel.detach(), pulse.PULSE: self.pulse, "own": 7})
        self._reader = MessageReader()
        self._heard: list[tuple[Kind, bytes]] = []

    def hear(self) -> tuple[Kind, bytes]:
        """Returns the next message."""
        while not self._heard:
            received = self.channel.recv(2**20)
            assert received, "the channel was closed"
            self._heard += self._reader.feed(received)
        return self._heard.pop(0)

    def close(self) -> None:
        self.child.close()
        self.child._channel.close()
        self.channel.close()
        os.close(self.pulse)


@pytest.fixture
def parent(kill: Mock) -> Iterator[Parent]:
    parent = Parent()
    yield parent
    parent.close()


def until(event: Any) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not event():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


class Slow(Collector):
    """Counts how often it is read, which takes until it may go on."""

    def __init__(self) -> None:
        self.count = 0
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.begun.set()
        self.count += 1
        count = self.count
        assert self.may_go_on.wait(PATIENCE_S)
        metric = Metric("looks", "Looks.", "gauge")
        metric.add_sample("looks", {}, count)
        yield metric


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def looks(message: tuple[Kind, bytes]) -> float:
    kind, content = message
    assert kind is Kind.METRICS
    ((_, _, _, ((_, ((_, _, count),)),)),) = json.loads(content)
    return float(count)


def test_what_is_said_does_not_wait_for_metrics_that_are_read(parent: Parent) -> None:
    slow = Slow()
    parent.child.show_metrics(slow, done)
    parent.channel.sendall(encode(Kind.ASK_METRICS, b""))
    assert slow.begun.wait(PATIENCE_S)
    began = time.monotonic()
    parent.child.keep(b"kept")
    assert time.monotonic() - began < AT_ONCE_S
    assert parent.hear() == (Kind.KEEP, b"kept")
    slow.may_go_on.set()
    assert looks(parent.hear()) == 1


def test_a_question_before_there_are_metrics_is_answered_once_there_are(parent: Parent) -> None:
    slow = Slow()
    slow.may_go_on.set()
    parent.channel.sendall(encode(Kind.ASK_METRICS, b""))
    parent.child.tell_ready()
    assert parent.hear() == (Kind.READY, b"{}")
    time.sleep(0.05)
    parent.child.show_metrics(slow, done)
    assert looks(parent.hear()) == 1


def test_a_question_is_answered_though_the_metrics_can_not_be_read(parent: Parent) -> None:
    collector = Mock(collect=Mock(side_effect=[MemoryError, []]))
    parent.child.show_metrics(collector, done)
    for _ in range(2):  # who has no answer does not ask again
        parent.channel.sendall(encode(Kind.ASK_METRICS, b""))
        assert parent.hear() == (Kind.METRICS, b"[]")
    assert collector.collect.call_count == 2


def test_metrics_that_were_read_earlier_are_shown_earlier(parent: Parent) -> None:
    slow = Slow()
    parent.child.show_metrics(slow, done)
    parent.channel.sendall(encode(Kind.ASK_METRICS, b""))
    assert slow.begun.wait(PATIENCE_S)
    closing = threading.Thread(target=parent.child.close)
    closing.start()
    time.sleep(0.05)  # for it to overtake the other, if it could
    slow.may_go_on.set()
    shown = [looks(parent.hear())]
    if shown == [1]:  # unless the second was there before the first was sent
        shown.append(looks(parent.hear()))
    assert shown[-1] == 2, "what was counted last is shown at the end"
    closing.join(PATIENCE_S)


def test_a_supervisor_that_does_not_read_blocks_nobody_and_loses_nothing(parent: Parent, kill: Mock) -> None:
    began = time.monotonic()
    for number in range(4):
        parent.child.keep(bytes([number]) * MORE_THAN_FITS)
        parent.child.tell_ready({"number": number})
    parent.child.pass_reload()
    assert time.monotonic() - began < AT_ONCE_S
    time.sleep(1.5)
    heard: list[tuple[Kind, Any]] = []
    while not heard or heard[-1][0] is not Kind.RELOAD:
        kind, content = parent.hear()
        heard.append((kind, content[0] if kind is Kind.KEEP else content))
    assert heard[-3:] == [(Kind.KEEP, 3), (Kind.READY, b'{"number": 3}'), (Kind.RELOAD, b"")]
    kept = [content for kind, content in heard if kind is Kind.KEEP]
    assert len(heard) <= 6, "as READY may be sent each time until one that is kept holds it up"
    assert len(kept) <= 2, "but for the one that holds it up, what was said again since is said once"
    kill.assert_not_called()


def test_that_it_ends_is_the_last_that_it_says(parent: Parent) -> None:
    parent.child.keep(b"kept")
    parent.child.close()
    assert [parent.hear()[0] for _ in range(3)] == [Kind.KEEP, Kind.METRICS, Kind.ENDS]


def test_a_process_cut_off_from_its_supervisor_is_told_to_end(parent: Parent, kill: Mock) -> None:
    parent.channel.shutdown(socket.SHUT_RDWR)
    parent.child.keep(b"kept")
    until(lambda: kill.called)
    parent.child.keep(b"kept")
    assert parent.child.is_cut_off
    kill.assert_called_once_with(os.getpid(), signal.SIGTERM)


def test_a_process_that_can_t_understand_an_outcome_is_told_to_end(parent: Parent, kill: Mock) -> None:
    parent.child.ask_for_successor(b"", Mock(side_effect=TypeError("unexpected")))
    assert parent.hear() == (Kind.SUCCEED, b"")
    parent.channel.sendall(encode(Kind.OUTCOME, b"{}"))
    until(lambda: kill.called)
    assert parent.child.is_cut_off


def test_an_end_in_order_is_no_reason_to_end(kill: Mock) -> None:
    parent = Parent()
    parent.child.keep(b"kept")
    parent.close()
    time.sleep(0.05)
    kill.assert_not_called()
    assert not parent.child.is_cut_off


async def test_a_silent_supervisor_is_noticed_until_it_asks_again(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.001)
    changes: asyncio.Queue[bool] = asyncio.Queue()
    parent.child.follow_supervision(lambda: changes.put_nowait(parent.child.is_supervised))
    parent.child.beat()
    await asyncio.sleep(0.1)
    assert changes.empty(), "it is not expected to ask before there is something to show"
    parent.child.show_metrics(CollectorRegistry(), done)
    async with asyncio.timeout(PATIENCE_S):
        assert not await changes.get()
        parent.channel.sendall(encode(Kind.ASK_METRICS, b""))
        assert await changes.get()
