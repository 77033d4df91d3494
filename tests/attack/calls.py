"""Valid requests from clients that change their mind, are in a hurry, or are many."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tests.attack import samples
from tests.attack.client import INFERENCE, PATIENCE_S, Client
from tests.attack.registry import BUSY, OK, Round, attack

BATCH: Final = 64
"""Calls that are under way at a time."""


@attack(allowed=BUSY, weight=2)
def cancels_and_deadlines(round: Round) -> None:
    """Calls that are cancelled at random moments or have no time, among patient ones, which must be answered."""
    hurried, fickle = BUSY | {"DEADLINE_EXCEEDED"}, BUSY | {"CANCELLED"}
    number = 0
    with Client(round.server.grpc) as client:
        while round.has_time:
            settling: list[tuple[Any, str, samples.Valid, frozenset[str]]] = []
            timers = []
            for _ in range(BATCH):
                number += 1
                valid, kind = samples.anything(round.random, has_shapes=round.has_shapes), round.random.random()
                data = valid.message.SerializeToString()
                if kind < 0.35:
                    timeout_s = round.random.choice((1e-6, 0.001, 0.003, 0.01, 0.05))
                    call = client.send(valid.method, data, timeout_s)
                    settling.append((call, f"call {number} in {timeout_s} s", valid, hurried))
                elif kind < 0.7:
                    call = client.send(valid.method, data)
                    delay_s = round.random.choice((0.0, 0.001, 0.004, 0.02))
                    if delay_s:
                        timers.append(threading.Timer(delay_s, call.cancel))
                        timers[-1].start()
                    else:
                        call.cancel()
                    settling.append((call, f"call {number}, cancelled after {delay_s} s", valid, fickle))
                else:
                    settling.append((client.send(valid.method, data), f"call {number}", valid, BUSY))
            for call, what, valid, allowed in settling:
                round.settle(call, what, allowed=allowed, check=valid.check)
            for timer in timers:
                timer.join()


@attack(allowed=BUSY)
def flood_of_calls(round: Round) -> None:
    """Far more calls at once than a queue takes, from several connections: answers, or RESOURCE_EXHAUSTED at once."""
    valid = samples.noop([7] * 4)
    data = valid.message.SerializeToString()
    while round.has_time:
        clients = [Client(round.server.grpc) for _ in range(8)]
        try:
            for call in [client.send(valid.method, data) for _ in range(50) for client in clients]:
                round.settle(call, "one of a flood", check=valid.check)
        finally:
            for client in clients:
                client.close()


@attack(allowed=BUSY | {"CANCELLED"})
def clients_that_go_away(round: Round) -> None:
    """Connections that are closed with calls and streams under way."""
    while round.has_time:
        client = Client(round.server.grpc)
        calls = []
        for _ in range(16):
            valid = samples.anything(round.random, has_shapes=round.has_shapes)
            calls.append((client.send(valid.method, valid.message.SerializeToString()), valid))
        endless = threading.Event()

        def messages(endless: threading.Event = endless) -> Any:
            while not endless.is_set():
                yield samples.infer(round.random, [3]).message.SerializeToString()

        stream = client.stream(f"{INFERENCE}ModelStreamInfer", messages())
        time.sleep(round.random.choice((0.0, 0.002, 0.02, 0.1)))
        client.close()
        endless.set()
        stream.cancel()
        for call, valid in calls:
            round.settle(call, "a call of a closed connection", check=valid.check)


@attack(allowed={OK})
def live_while_busy(round: Round) -> None:
    """ServerLive and health stay answered while 24 clients keep every model busy."""
    stop = threading.Event()

    def load(number: int) -> list[tuple[str, str | None]]:
        ended = []
        with Client(round.server.grpc) as client:
            while not stop.is_set():
                valid = chosen[number % len(chosen)]
                outcome, data, _ = client.send(valid.method, valid.message.SerializeToString()).outcome()
                ended.append((outcome, valid.check(data) if outcome == OK else None))
        return ended

    chosen = [samples.anything(round.random, has_shapes=round.has_shapes) for _ in range(24)]
    with ThreadPoolExecutor(24) as pool, Client(round.server.grpc) as client:
        loads = [pool.submit(load, number) for number in range(24)]
        try:
            while round.has_time:
                round.settle(client.send(f"{INFERENCE}ServerLive", b"", PATIENCE_S), "ServerLive")
                round.count(OK if round.server.get("/healthz")[0] == 200 else "not live", "/healthz")
                time.sleep(0.01)
        finally:
            stop.set()
        for each in loads:
            for outcome, wrong in each.result(PATIENCE_S * 2):
                round.count(outcome, "a call of the load", BUSY, wrong)
