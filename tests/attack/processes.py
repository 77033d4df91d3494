"""Signals: to servers that were busy; starts and upgrades that can't be."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from tests.attack import http1, http2, samples
from tests.attack.client import INFERENCE, PATIENCE_S, Client
from tests.attack.http2 import DATA, END_HEADERS, HEADERS
from tests.attack.registry import BUSY, OK, Round, attack
from tests.attack.server import Server, ServerError

from xlaserve_proto import open_inference_pb2 as pb

CLIENTS: Final = 32
DRAIN_S: Final = 4.0
CONFIG: Final[dict[str, Any]] = {
    "models": [{"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}]
}
DIGITS: Final = {"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1]}
Ended = list[tuple[str, str, str | None]]


@dataclass
class Load:
    """Clients that ask a server on and on."""

    stop: threading.Event
    clients: list[Future[Ended]]

    def settle(self, round: Round, allowed: frozenset[str]) -> None:
        """Stops the clients and accounts for all that they asked."""
        self.stop.set()
        for client in self.clients:
            for outcome, details, wrong in client.result(PATIENCE_S * 2):
                round.count(outcome, f"a call ({details[:150]})", allowed, wrong)


@contextmanager
def load(address: str, *, timeout_s: float = PATIENCE_S) -> Iterator[Load]:
    """Has CLIENTS ask the server at `address` in closed loops until they are stopped, or one call fails."""
    stop = threading.Event()

    def ask(number: int) -> Ended:
        ended: Ended = []
        valid = samples.noop([number])
        data = valid.message.SerializeToString()
        with Client(address) as client:
            while not stop.is_set():
                outcome, answer, details = client.send(valid.method, data, timeout_s).outcome()
                ended.append((outcome, details, valid.check(answer) if outcome == OK else None))
                if outcome == "UNAVAILABLE":
                    break
        return ended

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            yield Load(stop, clients)
        finally:
            stop.set()


def check_serves(round: Round, server: Server) -> None:
    """Accounts for a valid request."""
    valid = samples.noop([42])
    with Client(server.grpc) as client:
        call = client.send(valid.method, valid.message.SerializeToString())
        round.settle(call, "a valid request afterwards", allowed=frozenset({OK}), check=valid.check)


@attack(allowed=BUSY | {"UNAVAILABLE"}, site="own", weight=2)
def terminate_under_load(round: Round) -> None:
    """SIGTERM while 32 clients ask: each call is answered or UNAVAILABLE, the server ends with status 0."""
    while True:
        server = round.start(CONFIG).wait_until_ready()
        with load(server.grpc) as clients:
            time.sleep(round.random.uniform(0.1, 0.5))
            status = server.stop()
            clients.settle(round, round.attack.allowed)
        round.count(OK if status == 0 else f"status {status}", "the end after SIGTERM", frozenset({OK}))
        if not round.has_time:
            return


def is_written_by(ready_file: Path, pid: int) -> bool:
    return ready_file.exists() and bool(json.loads(ready_file.read_text())["pid"] == pid)


@attack(allowed=BUSY | {"UNAVAILABLE"}, site="own")
def kill_and_restart(round: Round) -> None:
    """kill -9 while 32 clients ask, and another server on the same ports, with the same ready file."""
    ready_file = round.folder / "ready.json"
    config = {**CONFIG, "ready_file": str(ready_file)}
    ports: tuple[int, ...] = (0, 0, 0)
    while True:
        server = round.start(config, ports=ports)
        server.wait_for(
            partial(is_written_by, ready_file, server.process.pid),
            "be ready",
            60,
        )
        server.wait_until_ready()
        ports = server.ports
        check_serves(round, server)
        with load(server.grpc) as clients:
            time.sleep(round.random.uniform(0.1, 0.4))
            server.kill()
            clients.settle(round, round.attack.allowed)
        if not round.has_time:
            return


@attack(allowed={OK, "UNAVAILABLE"}, site="own", is_short=False)
def ask_while_it_starts(round: Round) -> None:
    """A valid request again and again, from before it listens: UNAVAILABLE until it is ready, and never unknown."""
    valid = samples.classify([1])
    data = valid.message.SerializeToString()
    other = round.start(CONFIG).wait_until_ready()
    ports = other.ports
    other.stop()
    server = round.start({"models": [DIGITS]}, ports=ports)
    while not server.is_ready:
        with Client(f"127.0.0.1:{ports[0]}") as client:  # one that was refused waits before it connects again
            round.settle(client.send(valid.method, data), "a request at the start", check=valid.check)
    with Client(server.wait_until_ready().grpc) as client:
        call = client.send(valid.method, data)
        round.settle(call, "a request afterwards", allowed=frozenset({OK}), check=valid.check)
    round.count(OK if server.stop() == 0 else "bad status", "the end", frozenset({OK}))


@attack(allowed=BUSY | {"DEADLINE_EXCEEDED"}, site="own")
def stop_and_continue(round: Round) -> None:
    """SIGSTOP and SIGCONT while 32 clients ask that have half a second: answers or deadlines, and it serves on.

    Where it is several processes, one of them each time.
    """
    server = round.start(CONFIG).wait_until_ready()
    while True:
        with load(server.grpc, timeout_s=0.5) as clients:
            for _ in range(3):
                time.sleep(round.random.uniform(0.05, 0.2))
                process = round.random.choice(server.processes)
                process.send_signal(signal.SIGSTOP)
                time.sleep(round.random.uniform(0.05, 1.0))
                process.send_signal(signal.SIGCONT)
            clients.settle(round, round.attack.allowed)
        check_serves(round, server)
        if not round.has_time:
            break
    round.count(OK if server.stop() == 0 else "bad status", "the end", frozenset({OK}))


@attack(allowed=BUSY, site="own", expects="the configuration is as before")
def hang_up_signals(round: Round) -> None:
    """SIGHUP while 32 clients ask, the configuration valid, wrong and valid again: every call is answered."""
    server = round.start(CONFIG).wait_until_ready()
    with load(server.grpc) as clients:
        for text in (None, "models: [", json.dumps(CONFIG)):
            if text is not None:
                server.config_file.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.4)
            round.count(OK if server.is_alive else f"died with {server.process.poll()}", "SIGHUP", frozenset({OK}))
        clients.settle(round, round.attack.allowed)
    if server.is_alive:
        check_serves(round, server)
        round.count(OK if server.stop() == 0 else "bad status", "the end", frozenset({OK}))


@attack(allowed={OK, "UNAVAILABLE", "CANCELLED"}, site="own", is_short=False)
def signals_at_any_time(round: Round) -> None:
    """SIGTERM and SIGINT at any moment of a start: a server that ends, soon, without a traceback."""
    while round.has_time:
        server = round.start(CONFIG)
        time.sleep(round.random.uniform(0.0, 1.2))
        # Before it says anything Python itself is starting, and would tell of an interrupt in its own way.
        number = round.random.choice((signal.SIGTERM, signal.SIGINT)) if server.log else signal.SIGTERM
        server.process.send_signal(number)
        try:
            status = server.process.wait(20)
        except Exception:
            round.count("did not end", f"{number.name} during the start")
            continue
        # Before Python has set its handlers, the signal itself ends the process.
        is_right = status in (0, 128 + number, -number)
        round.count(OK if is_right else f"status {status}", f"{number.name} during the start")


@attack(allowed={OK}, site="own")
def uploads_at_the_end(round: Round) -> None:
    """SIGTERM while requests have arrived in part, by either protocol: those that go on are answered, all in time."""
    message = http2.message(samples.noop([5]).message.SerializeToString())[:5]
    head = http2.frame(HEADERS, END_HEADERS, 1, http2.headers(f"{INFERENCE}ModelInfer"))
    text = b"POST /v2/models/noop/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    while True:
        server = round.start({**CONFIG, "drain_timeout_s": DRAIN_S}).wait_until_ready()
        with ExitStack() as opened:
            slow = [opened.enter_context(http2.Connection(server.grpc)) for _ in range(4)]
            for one in slow:
                one.send(head + http2.frame(DATA, 0, 1, message))
            going_on = [opened.enter_context(http1.Connection(server.http)) for _ in range(16)]
            sizes = [round.random.randrange(1, len(text)) for _ in going_on]
            for connection, size in zip(going_on, sizes, strict=True):
                connection.send(text[:size])
            time.sleep(0.3)
            began = time.monotonic()
            server.process.terminate()
            time.sleep(round.random.uniform(0.5, DRAIN_S / 2))
            for connection, size in zip(going_on, sizes, strict=True):
                connection.send(text[size:])
                outcome, wrong = connection.outcome(within_s=DRAIN_S)
                # It asks for nothing: what matters is that it is read.
                round.count(outcome, f"{size} bytes before the end", frozenset({"400"}), wrong)
            status = server.process.wait(PATIENCE_S)
        round.count(OK if status == 0 else f"status {status}", "the end with uploads")
        round.count(OK if time.monotonic() - began < DRAIN_S + 15 else "late", "the end with uploads, in time")
        if not round.has_time:
            return


@attack(allowed={OK}, site="own", is_short=False)
def idle_streams_at_the_end(round: Round) -> None:
    """SIGTERM with streams open that send nothing: the server ends all the same, in time."""
    server = round.start(CONFIG).wait_until_ready()
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait(PATIENCE_S)
        yield from ()

    clients = [Client(server.grpc) for _ in range(8)]
    try:
        for client in clients:
            client.stream(f"{INFERENCE}ModelStreamInfer", nothing())
        time.sleep(0.3)
        began = time.monotonic()
        status = server.stop()
        round.count(OK if status == 0 else f"status {status}", "the end with idle streams")
        round.count(OK if time.monotonic() - began < 15 else "late", "the end with idle streams, in time")
    finally:
        never.set()
        for client in clients:
            client.close()


STARTED: Final = re.compile(r"upgrade: process (\d+) starts")
UPGRADABLE: Final[dict[str, Any]] = {**CONFIG, "fronts": 1, "max_connection_age_s": 1.0}


@contextmanager
def with_successors(server: Server) -> Iterator[None]:
    """Ends the servers that have taken the place of `server`, which are not its own processes."""
    try:
        yield
    finally:
        for pid in STARTED.findall(server.log):
            with suppress(psutil.Error):
                successor = psutil.Process(int(pid))
                successor.terminate()
                successor.wait(PATIENCE_S)


def upgrade(server: Server, pid: int, outcome: str) -> None:
    """Sends SIGUSR2 to process `pid`, which wrote the log of `server`, and waits until it says `outcome` once more."""
    before = server.log.count(outcome)
    os.kill(pid, signal.SIGUSR2)
    give_up_at = time.monotonic() + PATIENCE_S * 2
    while server.log.count(outcome) == before:
        if time.monotonic() > give_up_at:
            raise ServerError(f"an upgrade did not come to {outcome!r}\n{server.log[-3000:]}")
        time.sleep(0.05)


@attack(allowed={OK}, site="own", expects="this one goes on", is_short=False)
def upgrade_without_a_ready_file(round: Round) -> None:
    """SIGUSR2 while no ready file can be written: the old server goes on, and a later upgrade succeeds."""
    ready_file = round.folder / "ready.json"
    server = round.start({**UPGRADABLE, "ready_file": str(ready_file)}).wait_until_ready()
    with with_successors(server):
        ready_file.unlink()
        ready_file.mkdir()
        upgrade(server, server.process.pid, "this one goes on")
        check_serves(round, server)
        round.count(OK if server.is_alive else "ended", "the old server, whose ready file can't be written")
        ready_file.rmdir()
        upgrade(server, server.process.pid, "this is the server from now on")
        status = server.process.wait(PATIENCE_S * 2)
        round.count(OK if status == 0 else f"status {status}", "the end of the old server")
        check_serves(round, server)


@attack(allowed={OK}, site="own", is_short=False)
def second_start(round: Round) -> None:
    """The same configuration started twice: the second ends with a sentence, and the first keeps its ready file."""
    ready_file = round.folder / "ready.json"
    config = {**CONFIG, "ready_file": str(ready_file)}
    first = round.start(config).wait_until_ready()
    second = round.start(config, ports=first.ports)
    second.process.wait(PATIENCE_S * 2)
    round.count(OK if second.has_refused else "no reason", "the second start")
    is_there = is_written_by(ready_file, first.process.pid)
    round.count(OK if is_there else "no ready file", "the ready file of the first")
    check_serves(round, first)
    round.count(OK if first.stop() == 0 and not ready_file.exists() else "bad end", "the end of the first")


@attack(allowed={OK}, site="own", is_short=False)
def loads_during_upgrades(round: Round) -> None:
    """Loads without an end, on old connections and new ones, while servers take each other's place: each is made."""
    server = round.start({**UPGRADABLE, "max_connection_age_s": 300.0}).wait_until_ready()
    load_model = pb.RepositoryModelLoadRequest(model_name="noop").SerializeToString()
    stop = threading.Event()

    def change(*, stays: bool) -> list[tuple[str, str]]:
        ended = []
        while not stop.is_set():
            with Client(server.grpc) as client:
                while True:
                    loading = client.send(f"{INFERENCE}RepositoryModelLoad", load_model, PATIENCE_S * 3)
                    outcome, _, details = loading.outcome()  # a server's whole start may come first
                    ended.append((outcome, details))
                    if stop.is_set() or not stays:
                        break
        return ended

    with with_successors(server), ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(change, stays=stays) for stays in (True, False) * 2]
        try:
            upgrade(server, server.process.pid, "this is the server from now on")
            (successor,) = STARTED.findall(server.log)
            time.sleep(round.random.uniform(0.0, 3.0))
            upgrade(server, int(successor), "this is the server from now on")
        finally:
            stop.set()
        for outcome, details in (one for client in clients for one in client.result(PATIENCE_S * 4)):
            round.count(outcome, f"a load ({details[:150]})")
        check_serves(round, server)
