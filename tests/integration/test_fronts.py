"""A server of several processes, each of which may be killed at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import numpy as np
import psutil
import pytest
from grpc import StatusCode as Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.conftest import COMPILES, DIGITS, Brake, Connect, NoopClient, Server, StartServer
from tests.integration.test_shutdown import DEFECT

from xlaserve.processes.supervision.orders import SPARE
from xlaserve_client import AsyncVisionClient, VisionClient
from xlaserve_proto import open_inference_pb2 as pb

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
CONFIG = {"models": [NOOP], "fronts": 2}
CHANNELS = 16
"""Connections, of which each front gets one but once in 2**15 times."""
PATIENCE_S = 60.0
SOON_S = 5.0
LOOKS = 16
"""What takes a second at most, on a busy machine."""
SLOW_START = """
import time
from xlaserve.processes.engine import Engine

Engine._settle = lambda self: time.sleep(0.5)  # as where TensorFlow is imported
"""
IMPATIENT = """
from xlaserve.processes.supervision import liveness, merged_metrics, pulse

liveness.LOOK_S = pulse.BEAT_S = merged_metrics.EVERY_S = 0.1
"""
"""Has what hangs be killed after 3 s, and be told of if nobody can kill it."""


def python_path(*folders: Path) -> str:
    """Returns the search path of a server with the `sitecustomize` of the first of `folders`."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="module")
def module_brake(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    return Brake(tmp_path_factory.mktemp("brake"))


@pytest.fixture(scope="module")
def served(start_module_server: StartServer, module_brake: Brake) -> Iterator[Server]:
    """A server that tests share: leave its model ready, and all of its processes."""
    server = start_module_server({**CONFIG, "shared_memory": True}, env=module_brake.env)
    yield server
    assert server.stop() == 0, server.stderr


@pytest.fixture
def served_brake(module_brake: Brake) -> Iterator[Brake]:
    """The brake of `served`."""
    yield module_brake
    module_brake.release()


@pytest.fixture(scope="module")
def impatient(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Brake]:
    """A server whose processes are killed once they have hung for 3 s, and its brake."""
    brake = Brake(folder := tmp_path_factory.mktemp("impatient"))
    with (folder / "sitecustomize.py").open("a") as file:
        file.write(IMPATIENT)
    return start_module_server(CONFIG, env=brake.env), brake


@pytest.fixture(scope="module")
def slowly_started(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server that leaves time to do something while an engine starts."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "sitecustomize.py").write_text(SLOW_START)
    return start_module_server(CONFIG, env={"PYTHONPATH": python_path(folder)})


Clients = Callable[[Server], list[NoopClient]]


@pytest.fixture
def connected_clients(connect: Connect) -> Clients:
    """Clients of a server, each with a channel of its own, which the end of the test closes."""
    return lambda server: [connect(server) for _ in range(CHANNELS)]


def processes(server: Server) -> dict[str, psutil.Process]:
    """Returns the processes of a server by what `ps` calls them."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(server.pid).children():
        with suppress(psutil.Error):  # it ends at this moment
            name = " ".join(child.cmdline()).strip()
            if child.status() != psutil.STATUS_ZOMBIE and name.startswith("xlaserve") and name != f"xlaserve {SPARE}":
                found[name] = child
    return found


def clients(server: Server, count: int = CHANNELS, *, retries: bool = False) -> list[NoopClient]:
    return [NoopClient(server.grpc, retries=retries) for _ in range(count)]


def health(client: NoopClient, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(client.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return int(stub.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status)


def readiness(server: Server) -> int:
    """Returns the status of /readyz."""
    connection = HTTPConnection(server.metrics, timeout=PATIENCE_S)
    connection.request("GET", "/readyz")
    with connection.getresponse() as response:
        return response.status


def outcomes_of(used: list[NoopClient], calls: list[Any]) -> list[Status]:
    """Returns the outcomes of calls that each sent its number."""
    return [client.outcome(call, number) for number, (client, call) in enumerate(zip(used, calls, strict=True))]


def until(condition: Callable[[], object], otherwise: str, timeout_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, otherwise
        time.sleep(0.02)


def test_all_fronts_answer_and_metrics_are_those_of_all_processes(served: Server, connected_clients: Clients) -> None:
    before = served.metric("xlaserve_requests_total", model="noop", status="OK")
    used = connected_clients(served)
    assert {client.ask(number) for number, client in enumerate(used)} == {Status.OK}
    assert served.metric("xlaserve_requests_total", model="noop", status="OK") == before + len(used)
    text = served.scrape()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    roles = {sample.labels["role"] for sample in families["process_resident_memory_bytes"].samples}
    assert roles == {"supervisor", "engine", "front 1", "front 2"}
    assert {*processes(served)} == {"xlaserve engine", "xlaserve front 1", "xlaserve front 2"}
    at = {
        name: [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
        for name, process in processes(served).items()
    }
    assert at["xlaserve front 1"]
    assert at["xlaserve front 2"]


def looked_at(server: Server) -> Any:
    """Returns what the page shows, which may be a second old."""
    with urlopen(f"http://{server.http}/v1/status", timeout=PATIENCE_S) as answer:
        return json.load(answer)


def test_statistics_and_the_page_are_those_of_all_fronts(served: Server, connected_clients: Clients) -> None:
    def counted(client: NoopClient) -> tuple[int, int]:
        statistics = client.stub.ModelStatistics(pb.ModelStatisticsRequest(name="noop")).model_stats[0]
        assert 0 < statistics.execution_count <= statistics.inference_count
        return statistics.inference_count, statistics.inference_stats.success.count

    def shown() -> list[int]:
        (model,) = looked_at(served)["models"]
        return [model["images"], model["requests"], sum(model["total"]["counts"])]

    used = connected_clients(served)
    assert used[0].ask(1) is Status.OK
    images, requests = counted(used[0])
    until(lambda: shown()[:2] == [images, requests], "the page shows something else")
    shown_before = shown()
    for sent in (16, 32):
        assert {client.ask(number) for number, client in enumerate(used)} == {Status.OK}
        assert {counted(client) for client in used} == {(images + sent, requests + sent)}
    times = times_ready(served, "front 1")
    processes(served)["xlaserve front 1"].kill()
    until(lambda: times_ready(served, "front 1") > times, "no other front came")
    later = connected_clients(served)
    assert {client.ask(number) for number, client in enumerate(later)} == {Status.OK}
    assert {counted(client)[0] for client in later} == {images + 48}
    until(lambda: shown() == [count + 48 for count in shown_before], "the page shows something else")
    running = {name: process.pid for name, process in processes(served).items()}
    assert running.keys() == {"xlaserve engine", "xlaserve front 1", "xlaserve front 2"}

    def roles() -> dict[str, int]:
        return {one["role"]: one["pid"] for one in looked_at(served)["processes"]}

    expected = {"supervisor": served.pid, **{name.removeprefix("xlaserve "): pid for name, pid in running.items()}}
    until(lambda: roles().items() >= expected.items(), "the page shows other processes")


def test_failures_and_metrics_are_the_same_at_all_fronts_and_ports(served: Server, connected_clients: Clients) -> None:
    used = connected_clients(served)
    for number, client in enumerate(used[:12]):
        with pytest.raises(grpc.RpcError):
            client.stub.ModelMetadata(pb.ModelMetadataRequest(name=f"absent {number}"), timeout=PATIENCE_S)

    def failures() -> list[Any]:
        return [one for one in looked_at(served)["failures"] if "absent" in one["reason"]]

    # The kernel picks the front of each look: of so many, some are at each front.
    until(lambda: all(len(failures()) == 12 for _ in range(LOOKS)), "some front does not show all failures")
    for _ in range(LOOKS):
        shown = failures()
        assert {re.sub(r".*(absent \d+).*", r"\1", one["reason"]) for one in shown} == {
            f"absent {each}" for each in range(12)
        }
        assert [one["at_s"] for one in shown] == sorted((one["at_s"] for one in shown), reverse=True)
    answered = served.metric("xlaserve_requests_total", status="OK")
    restarts = served.metric("xlaserve_process_restarts_total")
    restarts_of_front = served.metric("xlaserve_process_restarts_total", role="front 2")
    assert {client.ask(1) for client in used} == {Status.OK}
    for _ in range(4):
        with urlopen(f"http://{served.http}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        assert f'xlaserve_process_restarts_total{{role="front 2"}} {restarts_of_front}' in text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        ok = [sample.value for sample in families["xlaserve_requests"].samples if sample.labels.get("status") == "OK"]
        assert sum(ok) == answered + 16
    processes(served)["xlaserve front 2"].kill()
    until(
        lambda: served.metric("xlaserve_process_restarts_total", role="front 2") == restarts_of_front + 1,
        "it was not counted",
    )
    assert served.metric("xlaserve_process_restarts_total") == restarts + 1


def test_a_model_that_is_loaded_at_one_front_is_there_at_all(served: Server, connected_clients: Clients) -> None:
    used = connected_clients(served)
    used[0].stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="noop"), timeout=PATIENCE_S)
    until(lambda: {client.ask(1) for client in used} == {Status.UNAVAILABLE}, "some front still has the model")
    assert health(used[0], "noop") == health_pb2.HealthCheckResponse.NOT_SERVING
    until(lambda: readiness(served) == HTTPStatus.SERVICE_UNAVAILABLE, "it is still ready")
    used[1].stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="noop"), timeout=PATIENCE_S)
    assert used[1].ask(1) is Status.OK
    until(lambda: {client.ask(1) for client in used} == {Status.OK}, "some front lacks the model")
    until(lambda: readiness(served) == HTTPStatus.OK, "it is not ready")
    with pytest.raises(grpc.RpcError) as raised:
        used[0].stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="other"), timeout=PATIENCE_S)
    assert raised.value.code() is Status.NOT_FOUND


def test_shared_memory_that_is_registered_at_one_front_is_known_at_all(
    served: Server, connected_clients: Clients
) -> None:
    used = connected_clients(served)
    file = Path("/dev/shm") / f"xlaserve-test-fronts-{os.getpid()}"
    size_bytes = 224 * 224 * 3
    file.write_bytes(bytes([7]) * size_bytes)
    try:
        request = pb.SystemSharedMemoryRegisterRequest(name="images", key=f"/{file.name}", byte_size=size_bytes)
        used[0].stub.SystemSharedMemoryRegister(request)
        infer = pb.ModelInferRequest(model_name="noop")
        parameters = infer.inputs.add(name="pixels", datatype="UINT8", shape=(1, 224, 224, 3)).parameters
        parameters["shared_memory_region"].string_param = "images"
        parameters["shared_memory_byte_size"].int64_param = size_bytes
        for client in used:
            assert NoopClient.outcome(client.stub.ModelInfer.future(infer, timeout=PATIENCE_S), 7) is Status.OK
            status = client.stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
            assert [*status.regions] == ["images"]
        used[1].stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="images"))
        for client in used:
            call: Any = client.stub.ModelInfer.future(infer, timeout=PATIENCE_S)
            assert call.exception(timeout=PATIENCE_S).code() is Status.NOT_FOUND
    finally:
        file.unlink()


def test_not_one_call_fails_while_a_model_is_reloaded(served: Server, connected_clients: Clients) -> None:
    outcomes: Counter[Status] = Counter()
    stopping = threading.Event()

    def ask(client: NoopClient) -> None:
        number = 0
        while not stopping.is_set():
            outcomes[client.ask(number % 256)] += 1
            number += 1

    control, *used = connected_clients(served)[:7]
    asking = [threading.Thread(target=ask, args=(client,)) for client in used]
    for thread in asking:
        thread.start()
    for _ in range(4):
        control.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="noop"), timeout=PATIENCE_S)
    stopping.set()
    for thread in asking:
        thread.join(PATIENCE_S)
    assert {*outcomes} == {Status.OK}, outcomes


def test_a_killed_front_fails_its_own_calls_alone_and_is_replaced(
    served: Server, served_brake: Brake, connected_clients: Clients
) -> None:
    until(lambda: not connected(served), "connections of other tests are left")
    used = connected_clients(served)
    assert {client.ask(0) for client in used} == {Status.OK}
    front, times = processes(served)["xlaserve front 1"], times_ready(served, "front 1")
    ports = {one.raddr.port for one in front.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED}
    served_brake.pull()
    calls = [client.send(number) for number, client in enumerate(used)]
    until(lambda: served.metric("xlaserve_in_flight_images", model="noop") == len(calls), "not all calls came")
    front.kill()
    killed_at = time.monotonic()
    until(lambda: times_ready(served, "front 1") > times, "no other front came")
    assert time.monotonic() - killed_at < SOON_S
    served_brake.release()
    outcomes = Counter(outcomes_of(used, calls))
    assert outcomes == {Status.UNAVAILABLE: len(ports), Status.OK: len(used) - len(ports)}
    until(lambda: served.metric("xlaserve_in_flight_images", model="noop") == 0, "images are still counted")
    assert {client.ask(7) for client in connected_clients(served)} == {Status.OK}


def connected(server: Server) -> set[str]:
    """Returns the fronts to which this process is connected."""
    mine = {one.laddr.port for one in psutil.Process().net_connections("tcp")}
    return {
        name
        for name, process in processes(server).items()
        if any(one.raddr and one.raddr.port in mine for one in process.net_connections("tcp"))
    }


def test_one_client_reaches_all_fronts_and_those_started_later(served: Server) -> None:
    until(lambda: not connected(served), "connections of other tests are left")
    pixels = np.zeros((1, 224, 224, 3), np.uint8)
    stopping = threading.Event()
    fronts = {"xlaserve front 1", "xlaserve front 2"}

    def ask(client: VisionClient) -> None:
        while not stopping.is_set():
            client.infer(pixels, model="noop", deadline_s=PATIENCE_S)

    with VisionClient(served.grpc) as client:
        client.infer(pixels, model="noop")
        assert len(connected(served)) == 1
        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(ask, client) for _ in range(8)]
            until(lambda: connected(served) == fronts, "some front has no connection")
            processes(served)["xlaserve front 1"].kill()
            until(lambda: connected(served) == {"xlaserve front 2"}, "the other front has no connection")
            until(lambda: connected(served) == fronts, "the new front has no connection")
            stopping.set()
            for one in asking:
                one.result(PATIENCE_S)
    until(lambda: not connected(served), "a connection is left")


async def test_one_asynchronous_client_has_all_fronts_answer(served: Server) -> None:
    until(lambda: not connected(served), "connections of other tests are left")
    pixels = np.zeros((1, 224, 224, 3), np.uint8)
    async with asyncio.timeout(PATIENCE_S), AsyncVisionClient(served.grpc) as client:
        await client.infer(pixels, model="noop")
        assert len(connected(served)) == 1
        while len(connected(served)) < 2:
            await asyncio.gather(*(client.infer(pixels, model="noop") for _ in range(8)))
    until(lambda: not connected(served), "a connection is left")


def test_limits_hold_for_all_fronts_together_and_survive_a_killed_one(
    start_server: StartServer, brake: Brake, tmp_path: Path
) -> None:
    file = tmp_path / "access.yaml"
    limits = [{"images_per_s": 1e-3, "burst_images": 24, "max_images": 8}]
    file.write_text(json.dumps({"anybody": {"limits": limits}}))
    server = start_server({**CONFIG, "access": str(file)}, env=brake.env)
    used = clients(server)
    outcomes = Counter(client.ask(1) for client in used)
    assert outcomes == {Status.OK: CHANNELS}
    brake.pull()
    calls = [client.send(number) for number, client in enumerate(used[:8])]
    until(lambda: server.metric("xlaserve_in_flight_images", model="noop") == 8, "not 8 are under way")
    calls += [client.send(number) for number, client in enumerate(used[8:], 8)]
    until(lambda: server.metric("xlaserve_requests_limited_total", limit="max_images") == 8, "not 8 were refused")
    processes(server)["xlaserve front 1"].kill()
    until(lambda: server.stderr.count("is ready") == 4, "no other front came")
    brake.release()
    outcomes = Counter(outcomes_of(used, calls))
    assert outcomes[Status.RESOURCE_EXHAUSTED] == 8
    assert outcomes[Status.OK] + outcomes[Status.UNAVAILABLE] == 8
    used = clients(server)
    for call in [client.send(1) for client in used]:
        assert "images_per_s 0.001" in call.exception(timeout=PATIENCE_S).details()
    assert server.metric("xlaserve_requests_limited_total", limit="images_per_s") == CHANNELS


def test_one_front_may_hold_the_servers_whole_message_memory(start_server: StartServer, brake: Brake) -> None:
    megabyte = 2**20
    config = {**CONFIG, "max_message_bytes": megabyte, "max_inflight_bytes": 3 * megabyte}
    server = start_server(config, env=brake.env)
    images = range(4)  # of 150 KB: five such messages fit into all, and two into a half
    brake.pull()
    alone, used = NoopClient(server.grpc), clients(server)
    calls = [alone.send(*images) for _ in range(5)]
    until(lambda: server.metric("xlaserve_in_flight_message_bytes") > 2.8 * megabyte, "not all are held")
    assert server.metric("xlaserve_in_flight_message_bytes_limit") == 3 * megabyte
    for client in used:
        assert client.send(*images).exception(timeout=PATIENCE_S).code() is Status.RESOURCE_EXHAUSTED
    brake.release()
    assert {alone.outcome(call, *images) for call in calls} == {Status.OK}


def test_a_killed_engine_fails_its_calls_at_once_and_is_replaced(
    served: Server, served_brake: Brake, connected_clients: Clients
) -> None:
    used = connected_clients(served)
    served_brake.pull()
    calls = [client.send(number) for number, client in enumerate(used)]
    until(lambda: served.metric("xlaserve_in_flight_images", model="noop") == len(calls), "not all calls came")
    processes(served)["xlaserve engine"].kill()
    killed_at = time.monotonic()
    outcomes = {*outcomes_of(used, calls)}
    assert outcomes == {Status.UNAVAILABLE}
    assert time.monotonic() - killed_at < SOON_S
    assert health(used[0]) == health_pb2.HealthCheckResponse.NOT_SERVING
    served_brake.release()
    until(lambda: health(used[0]) == health_pb2.HealthCheckResponse.SERVING, "no other engine came")
    until(lambda: {client.ask(number) for number, client in enumerate(used)} == {Status.OK}, "it does not answer")


def times_ready(server: Server, name: str) -> int:
    """Returns how many processes of a role were ready."""
    return len(re.findall(rf"{name}: process \d+ is ready", server.stderr))


def told_to_end(engine: psutil.Process, client: NoopClient, defect: Path) -> None:
    engine.terminate()


def batch_loop_dies(engine: psutil.Process, client: NoopClient, defect: Path) -> None:
    """Where there are several engines, those of others may die as well."""
    defect.touch()
    until(lambda: client.ask(1, 2, 3) and not psutil.pid_exists(engine.pid), "its batch loop does not die")
    defect.unlink()


@pytest.mark.parametrize("roles", [["engine"], ["engine 1", "engine 2"]])
def test_an_engine_that_ends_by_itself_is_followed_by_one_that_serves(
    start_server: StartServer, tmp_path: Path, roles: list[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEFECT)
    defect = tmp_path / "defect"
    env = {"PYTHONPATH": python_path(tmp_path), "DEFECT": str(defect)}
    server = start_server({**CONFIG, "engines": len(roles)}, env=env)
    client = NoopClient(server.grpc)
    for ends, name in product((told_to_end, batch_loop_dies), roles):  # each, so that none is left from the start
        until(lambda: all(times_ready(server, role) for role in roles), "not all engines are ready")
        times = times_ready(server, name)
        ends(processes(server)[f"xlaserve {name}"], client, defect)
        until(lambda: times_ready(server, name) > times, f"no other {name} is ready")  # noqa: B023
        until(lambda: client.ask(1) is Status.OK, "it does not serve")
    assert health(client) == health_pb2.HealthCheckResponse.SERVING
    assert readiness(server) == HTTPStatus.OK


def test_no_model_is_unknown_while_another_engine_starts(slowly_started: Server) -> None:
    used = clients(slowly_started)
    processes(slowly_started)["xlaserve engine"].kill()
    outcomes: Counter[Status] = Counter()

    def have_all_answered() -> bool:
        latest = [client.ask(number) for number, client in enumerate(used)]
        outcomes.update(latest)
        return {*latest} == {Status.OK} and outcomes[Status.UNAVAILABLE] > 0

    until(have_all_answered, "no other engine came")
    assert {*outcomes} == {Status.OK, Status.UNAVAILABLE}, outcomes


def test_news_that_come_while_the_engine_starts_are_taken_once(slowly_started: Server) -> None:
    def times_started() -> int:
        return len(re.findall(r"engine: process \d+$", slowly_started.stderr, re.MULTILINE))

    started = times_started()
    processes(slowly_started)["xlaserve engine"].kill()
    until(lambda: times_started() > started, "no other is started")
    os.kill(slowly_started.pid, signal.SIGHUP)
    until(lambda: "read the configuration again" in slowly_started.stderr, "it was not read")
    assert {client.ask(1) for client in clients(slowly_started)} == {Status.OK}
    assert slowly_started.stderr.count("read the configuration again") == 1


def test_another_engine_serves_what_is_configured_by_then(slowly_started: Server) -> None:
    server = slowly_started
    server.config_file.write_text(json.dumps({**CONFIG, "models": [NOOP, {**NOOP, "name": "second"}]}))
    os.kill(server.pid, signal.SIGHUP)
    until(lambda: "read the configuration again: second loaded" in server.stderr, "it was not loaded")
    processes(server)["xlaserve engine"].kill()
    until(lambda: server.stderr.count("second: ready") == 2, "it was not loaded again")
    unchanged = server.stderr.count("no model changed")
    os.kill(server.pid, signal.SIGHUP)
    until(lambda: server.stderr.count("no model changed") > unchanged, "it has changed")
    assert "only a restart applies" not in server.stderr


def test_calls_that_may_be_retried_do_not_notice_killed_engines(served: Server) -> None:
    answered: Counter[bool] = Counter()
    lock = threading.Lock()
    stopping = threading.Event()

    def ask(number: int) -> None:
        with VisionClient(served.grpc) as client:
            while not stopping.is_set():
                number = (number + 1) % 256
                pixels = np.full((1, 224, 224, 3), number, np.uint8)
                (output,) = client.infer(pixels, model="noop", deadline_s=PATIENCE_S).outputs.values()
                with lock:
                    answered[bool((output == number).all())] += 1

    asking = [threading.Thread(target=ask, args=(17 * number,)) for number in range(6)]
    for thread in asking:
        thread.start()
    for _ in range(2):
        wanted = answered.total() + 200
        until(lambda wanted=wanted: answered.total() > wanted, "calls are no longer answered")  # type: ignore[misc]
        before = processes(served)["xlaserve engine"]
        before.kill()
        until(lambda before=before: processes(served).get("xlaserve engine", before) != before, "no other engine")  # type: ignore[misc]
    wanted = answered.total() + 200
    until(lambda: answered.total() > wanted, "calls are no longer answered")
    stopping.set()
    for thread in asking:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert {*answered} == {True}


def test_a_front_or_an_engine_that_hangs_is_replaced_and_its_calls_end(impatient: tuple[Server, Brake]) -> None:
    server, brake = impatient
    used = clients(server)
    assert {client.ask(0) for client in used} == {Status.OK}
    front = processes(server)["xlaserve front 1"]
    met = len([one for one in front.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED])
    brake.pull()
    calls = [client.send(number) for number, client in enumerate(used)]
    until(lambda: server.metric("xlaserve_in_flight_images", model="noop") == len(calls), "not all calls came")
    front.suspend()
    until(lambda: times_ready(server, "front 1") == 2, "no other front came")
    brake.release()
    assert Counter(outcomes_of(used, calls)) == {Status.UNAVAILABLE: met, Status.OK: len(used) - met}
    assert f"front 1: process {front.pid} hangs" in server.stderr
    processes(server)["xlaserve engine"].suspend()
    calls = [client.send(number) for number, client in enumerate(used)]
    assert {*outcomes_of(used, calls)} == {Status.UNAVAILABLE}
    until(lambda: {client.ask(1) for client in used} == {Status.OK}, "no other engine came")
    for name in ("front 1", "engine"):
        assert server.metric("xlaserve_process_restarts_total", role=name) == 1
    assert server.metric("xlaserve_process_restarts_total") == 2


def test_liveness_ends_while_the_supervisor_hangs(impatient: tuple[Server, Brake]) -> None:
    server, _ = impatient
    client = NoopClient(server.grpc)

    def lives_over_http() -> bool:
        try:
            with urlopen(f"http://{server.http}/v2/health/live", timeout=PATIENCE_S):
                return True
        except HTTPError as error:
            assert error.code == HTTPStatus.SERVICE_UNAVAILABLE
            return False

    supervisor = psutil.Process(server.pid)
    until(lambda: health(client, "liveness") == health_pb2.HealthCheckResponse.SERVING, "it is not seen to be alive")
    supervisor.suspend()
    try:
        until(lambda: health(client, "liveness") == health_pb2.HealthCheckResponse.NOT_SERVING, "nobody has noticed")
        assert (health(client, "noop"), client.ask(0)) == (health_pb2.HealthCheckResponse.SERVING, Status.OK)
        assert not client.stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live
        until(lambda: not lives_over_http(), "the other front has not noticed")
    finally:
        supervisor.resume()
    until(lambda: health(client, "liveness") == health_pb2.HealthCheckResponse.SERVING, "it has not recovered")
    assert "the supervisor has asked for nothing for 3 s: it may hang" in server.stderr


@pytest.mark.slow
def test_where_all_processes_were_stopped_for_long_none_is_killed(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    server = start_server(CONFIG, env={"PYTHONPATH": python_path(tmp_path)})
    before = processes(server)
    supervisor = psutil.Process(server.pid)
    for process in (supervisor, *before.values()):
        process.suspend()
    time.sleep(5)
    for process in (supervisor, *before.values()):  # as likely as any order, and the worst
        process.resume()
    time.sleep(5)
    assert processes(server) == before
    assert {client.ask(1) for client in clients(server)} == {Status.OK}
    assert server.metric("xlaserve_process_restarts_total") == 0


def test_all_processes_end_with_a_supervisor_that_is_killed(start_server: StartServer) -> None:
    server = start_server(CONFIG)
    port = int(server.grpc.rpartition(":")[2])
    left = [*processes(server).values()]
    os.kill(server.pid, signal.SIGKILL)
    server.process.wait(PATIENCE_S)
    assert not psutil.wait_procs(left, PATIENCE_S)[1]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_ends_in_order_with_what_it_has_accepted(start_server: StartServer, brake: Brake) -> None:
    server = start_server(CONFIG, env=brake.env)
    used = clients(server)
    brake.pull()
    calls = [client.send(number) for number, client in enumerate(used)]
    until(lambda: server.metric("xlaserve_in_flight_images", model="noop") == len(calls), "not all calls came")
    server.process.terminate()
    until(lambda: server.stderr.count("draining: ") >= 2, "the fronts do not drain")
    brake.release()
    outcomes = {*outcomes_of(used, calls)}
    assert outcomes == {Status.OK}
    assert server.wait() == 0, server.stderr


def test_what_does_not_finish_in_time_and_what_comes_later_is_told_so(start_server: StartServer, brake: Brake) -> None:
    server = start_server({**CONFIG, "drain_timeout_s": 0.5}, env=brake.env)
    used = clients(server)
    brake.pull()
    calls = [client.send(number) for number, client in enumerate(used)]
    until(lambda: server.metric("xlaserve_in_flight_images", model="noop") == len(calls), "not all calls came")
    server.process.terminate()
    until(lambda: not used[0].stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE_S).ready, "it is still ready")
    assert {*outcomes_of(used, calls)} == {Status.UNAVAILABLE}
    assert {"the process that runs this model has ended" in call.details() for call in calls} == {True}
    brake.release()
    assert server.wait() == 0, server.stderr


def test_metrics_show_models_while_they_compile(start_server: StartServer) -> None:
    server = start_server({**CONFIG, **COMPILES, "models": [{**DIGITS, "modes": ["xla"], "buckets": [1]}]}, wait=False)
    until(lambda: server.metric("xlaserve_model_state", state="compiling") == 1, "it did not compile")
    assert server.metric("xlaserve_ready") == 0
    server.wait_until_ready()
    assert server.metric("xlaserve_ready") == 1


def test_a_port_that_another_server_has_is_refused(served: Server) -> None:
    port = served.grpc.rpartition(":")[2]
    flags = ["--fronts", "1", "--http-port", "0", "--metrics-port", "0", "--grpc-port", port]
    command = [sys.executable, "-m", "xlaserve", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert f"grpc_port: expected a free port of 127.0.0.1, got {port}" in done.stderr
