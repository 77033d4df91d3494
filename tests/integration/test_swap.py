"""What serves is replaced by another engine beside the one that serves, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc import StatusCode as Status
from tests.integration.conftest import DIGITS, NoopClient, Server, StartServer
from tests.integration.test_fronts import PATIENCE_S, clients, processes, readiness, until

from xlaserve_proto import open_inference_pb2 as pb

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
OTHER = {**NOOP, "name": "other"}
CONFIG: dict[str, Any] = {"models": [NOOP, OTHER], "fronts": 2}
HELD_START = """
import os, time
from xlaserve.processes.engine import Engine

def settle(self):
    while os.path.exists(os.environ["HELD"]):
        time.sleep(0.01)

Engine._settle = settle
"""


class Swaps:
    """A server whose engines start only while nothing holds them."""

    def __init__(self, start: StartServer, folder: Path, **settings: Any) -> None:
        (folder / "sitecustomize.py").write_text(HELD_START)
        self._held = folder / "held"
        path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.server = start({**CONFIG, **settings}, env={"PYTHONPATH": path, "HELD": str(self._held)})
        self.client = NoopClient(self.server.grpc)

    def hold(self) -> None:
        self._held.touch()

    def release(self) -> None:
        self._held.unlink()

    def engines(self) -> list[int]:
        """Returns the numbers of all engines that were started, as they came."""
        return [int(pid) for pid in re.findall(r"engine: process (\d+)$", self.server.stderr, re.MULTILINE)]

    def living(self) -> list[int]:
        return [pid for pid in self.engines() if psutil.pid_exists(pid)]

    def load(self, name: str = "noop") -> Any:
        """Begins to load a model again, and returns once another engine has begun."""
        before = len(self.engines())
        call = self.client.stub.RepositoryModelLoad.future(
            pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE_S
        )
        until(lambda: call.done() or len(self.engines()) > before, "no other engine has begun")
        return call

    def unload(self, name: str) -> None:
        self.client.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=PATIENCE_S)

    def configure(self, *models: Any) -> None:
        self.server.config_file.write_text(json.dumps({**CONFIG, "models": models}))

    def states(self) -> dict[str, str]:
        """Returns the state of each model that is listed."""
        index = self.client.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE_S)
        return {model.name: model.state for model in index.models}


@pytest.fixture
def make_swaps(start_server: StartServer, tmp_path: Path) -> Callable[..., Swaps]:
    return lambda **settings: Swaps(start_server, tmp_path, **settings)


@pytest.fixture
def swaps(make_swaps: Callable[..., Swaps]) -> Swaps:
    return make_swaps()


@contextmanager
def asked(
    server: Server, ask: Callable[[NoopClient, int], object], connections: int = 4, *, retries: bool = False
) -> Iterator[Counter[object]]:
    """Asks a server again and again over several connections, until its block ends; counts what comes of it."""
    outcomes: Counter[object] = Counter()
    stopping = threading.Event()

    def work(client: NoopClient) -> None:
        number = 0
        while not stopping.is_set():
            outcomes[ask(client, number % 256)] += 1
            number += 1

    with ExitStack() as stack:
        for client in clients(server, connections, retries=retries):
            thread = threading.Thread(target=work, args=(client,))
            stack.callback(thread.join, PATIENCE_S)
            thread.start()
        stack.callback(stopping.set)
        yield outcomes
    assert outcomes


def test_nothing_shows_that_another_engine_takes_the_place_of_one(swaps: Swaps) -> None:
    server = swaps.server
    shown: list[tuple[float, float, int]] = []

    def look() -> None:
        ready, text = readiness(server), server.scrape()
        shown.append((_value(text, "xlaserve_requests_total"), _value(text, "xlaserve_ready"), ready))
        assert _value(text, "xlaserve_lanes") == lanes
        assert swaps.states() == {"noop": "READY", "other": "READY"}

    lanes = _value(server.scrape(), "xlaserve_lanes")
    with asked(server, lambda client, number: client.ask(number)) as outcomes:
        for _ in range(2):
            swaps.hold()
            call = swaps.load()
            look()
            swaps.release()
            while not call.done():
                look()
            assert call.exception() is None
    assert {*outcomes} == {Status.OK}, outcomes
    assert {(ready, status) for _, ready, status in shown} == {(1, HTTPStatus.OK)}
    assert [count for count, _, _ in shown] == sorted(count for count, _, _ in shown)
    until(lambda: swaps.living() == swaps.engines()[-1:], "the others have not ended")
    assert len(swaps.engines()) == 3
    assert server.metric("xlaserve_requests_total", model="noop", status="OK") == outcomes.total()


def _value(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


def test_a_model_that_fails_in_another_engine_goes_on_as_before(swaps: Swaps) -> None:
    swaps.configure({**NOOP, "source": "/nonexistent/model.keras"}, OTHER)
    call = swaps.load()
    assert call.code() is not Status.OK
    assert "noop failed: " in call.details()
    swaps.server.wait_for(lambda: "all is as before" in swaps.server.stderr, "it is not said")
    os.kill(swaps.server.pid, signal.SIGHUP)
    until(lambda: "noop as before: " in swaps.server.stderr, "the configuration was not read")
    assert swaps.client.ask(1) is Status.OK
    assert len(swaps.engines()) == 3
    until(lambda: swaps.living() == swaps.engines()[:1], "the others have not ended")
    gone = {**OTHER, "name": "gone", "source": "/nonexistent/model.keras"}
    swaps.configure({**NOOP, "buckets": [1, 2]}, OTHER, gone)
    os.kill(swaps.server.pid, signal.SIGHUP)
    done = "read the configuration again: noop loaded; gone failed: "
    until(lambda: done in swaps.server.stderr, "it was not loaded, or what failed was called loaded")
    assert swaps.client.ask(1) is Status.OK


def test_an_engine_that_is_killed_before_it_is_ready_changes_nothing(swaps: Swaps) -> None:
    swaps.hold()
    call = swaps.load()
    with asked(swaps.server, lambda client, number: client.ask(number)) as outcomes:
        os.kill(swaps.engines()[1], signal.SIGKILL)
        assert call.code() is not Status.OK
        assert "ended with signal 9" in call.details()
    assert {*outcomes} == {Status.OK}
    swaps.release()
    assert swaps.load().exception() is None


@pytest.mark.slow
def test_one_that_is_killed_meanwhile_is_followed_by_the_one_that_starts(swaps: Swaps) -> None:
    swaps.hold()
    call = swaps.load()
    os.kill(swaps.engines()[0], signal.SIGKILL)
    assert call.code() is Status.UNAVAILABLE
    until(lambda: readiness(swaps.server) == HTTPStatus.SERVICE_UNAVAILABLE, "it is still ready")
    swaps.release()
    until(lambda: swaps.client.ask(1) is Status.OK, "it does not serve again")
    assert len(swaps.engines()) == 2
    assert swaps.load().exception() is None
    assert readiness(swaps.server) == HTTPStatus.OK


@pytest.mark.slow
def test_a_front_that_is_killed_meanwhile_comes_back(swaps: Swaps) -> None:
    swaps.hold()
    call = swaps.load()
    fronts = [process for name, process in processes(swaps.server).items() if "front" in name]
    (idle,) = (front for front in fronts if not any(one.raddr for one in front.net_connections("tcp")))
    idle.kill()
    until(lambda: swaps.server.stderr.count("is ready") == 4, "no other front came")
    swaps.release()
    assert call.exception() is None
    assert {client.ask(1) for client in clients(swaps.server)} == {Status.OK}
    until(lambda: swaps.living() == swaps.engines()[1:], "the other has not ended")


def test_the_end_waits_for_no_engine_that_starts(swaps: Swaps) -> None:
    swaps.hold()
    call = swaps.load()
    swaps.server.process.terminate()
    until(lambda: swaps.server.stderr.count("draining: ") == 2, "the fronts do not drain")
    swaps.release()
    assert swaps.server.wait() == 0, swaps.server.stderr
    assert call.code() in (Status.UNAVAILABLE, Status.CANCELLED)
    assert not swaps.living()


@pytest.mark.slow
def test_news_that_come_meanwhile_are_taken_by_what_serves_then(swaps: Swaps) -> None:
    swaps.hold()
    call = swaps.load()
    swaps.configure(NOOP)
    os.kill(swaps.server.pid, signal.SIGHUP)
    swaps.release()
    assert call.exception() is None
    until(lambda: "read the configuration again: other unloaded" in swaps.server.stderr, "it was not read")
    assert swaps.states() == {"noop": "READY", "other": "UNLOADED"}


def test_changes_of_clients_are_made_one_after_the_other_and_last(swaps: Swaps) -> None:
    swaps.unload("other")
    assert swaps.states() == {"noop": "READY", "other": "UNLOADED"}
    calls = [swaps.load("noop"), swaps.load("other")]
    assert [call.exception() for call in calls] == [None, None]
    assert swaps.states() == {"noop": "READY", "other": "READY"}
    swaps.unload("other")
    os.kill(swaps.engines()[-1], signal.SIGKILL)
    until(lambda: swaps.client.ask(1) is Status.OK, "no other engine came")
    assert swaps.states() == {"noop": "READY", "other": "UNLOADED"}, "as the last one had it"


def test_in_place_the_engine_stays(make_swaps: Callable[..., Swaps]) -> None:
    swaps = make_swaps(swap="in_place")
    with asked(swaps.server, lambda client, number: client.ask(number)) as outcomes:
        assert swaps.load().exception() is None
    assert {*outcomes} == {Status.OK}
    assert len(swaps.engines()) == 1


@pytest.mark.slow
def test_no_room_for_two_is_refused_with_what_to_do(make_swaps: Callable[..., Swaps]) -> None:
    swaps = make_swaps(max_resident_bytes=64 * 2**20)
    with pytest.raises(grpc.RpcError, match="swap: in_place"):
        swaps.load().result()
    assert swaps.client.ask(1) is Status.OK
    assert len(swaps.engines()) == 1


RELOADS = 30
SETTLED_AFTER = 5
"""Reloads after which memory is to stay as it is."""
PACE_S = 0.02
PROCESSES = 4
"""An engine, two fronts, and the process that waits for the end of one."""
MOST_DISTURBED = 1.5
"""The p99 of a neighbour's calls while another model is reloaded, over that before; in half of the reloads."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_reloads_leave_no_memory_behind_and_disturb_nobody(start_server: StartServer, tmp_path: Path) -> None:
    mobilenet = {
        "name": "mobilenet",
        "source": "keras.applications:MobileNetV2",
        "weights": "random",
        "buckets": [1, 4],
    }
    config = {"models": [mobilenet, DIGITS], "fronts": 2, "compile_cache": str(tmp_path / "cache")}
    server = start_server(config)
    mobilenet_request = pb.ModelInferRequest(model_name="mobilenet")
    mobilenet_request.inputs.add(name="pixels", datatype="UINT8", shape=(1, 224, 224, 3))
    mobilenet_request.raw_input_contents.append(bytes(224 * 224 * 3))
    digits_request = pb.ModelInferRequest(model_name="digits")
    digits_request.inputs.add(name="pixels", datatype="UINT8", shape=(1, 32, 32, 3))
    digits_request.raw_input_contents.append(bytes(32 * 32 * 3))
    seconds: list[float] = []
    """Of the neighbour's calls."""

    def ask(client: NoopClient, number: int) -> Status:
        time.sleep(PACE_S)
        request = mobilenet_request if number % 8 == 0 else digits_request
        began = time.perf_counter()
        call = client.stub.ModelInfer.future(request, timeout=PATIENCE_S)
        error = call.exception()
        if request is digits_request:
            seconds.append(time.perf_counter() - began)
        return Status.OK if error is None else call.code()

    def p99_ms() -> float:
        found = float(np.percentile(seconds, 99)) * 1000
        seconds.clear()
        return found

    resident_mib, quiet_ms, reloading_ms = [], [], []
    control = NoopClient(server.grpc)
    with asked(server, ask) as outcomes:
        for number in range(RELOADS):
            time.sleep(5)
            quiet_ms.append(p99_ms())
            began = time.monotonic()
            control.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="mobilenet"), timeout=600)
            took_s = time.monotonic() - began
            reloading_ms.append(p99_ms())
            until(lambda: len(psutil.Process(server.pid).children()) == PROCESSES, "the engine before has not ended")
            time.sleep(1)
            family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            resident_mib.append(sum(process.memory_info().rss for process in family) / 2**20)
            print(
                f"reload {number + 1}: {took_s:.1f} s, {resident_mib[-1]:.0f} MiB, the neighbour's p99"
                f" {quiet_ms[-1]:.1f} ms before, {reloading_ms[-1]:.1f} ms meanwhile",
                flush=True,
            )
    print(f"{outcomes.total()} calls; p99 {np.median(quiet_ms):.1f} ms, {np.median(reloading_ms):.1f} ms meanwhile")
    assert {*outcomes} == {Status.OK}, outcomes
    disturbed = np.divide(reloading_ms, quiet_ms)
    print(f"the neighbour's p99 was {np.median(disturbed):.2f} times that before, {max(disturbed):.2f} times at most")
    assert np.median(disturbed) <= MOST_DISTURBED
    settled = np.median(resident_mib[:SETTLED_AFTER])
    assert max(resident_mib[SETTLED_AFTER:]) < 1.05 * settled, resident_mib
