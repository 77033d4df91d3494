"""A server of several engines, each of which may be killed, or be replaced, while the others serve."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from typing import Any

import psutil
import pytest
from grpc import StatusCode as Status
from grpc_health.v1 import health_pb2
from tests.integration.conftest import Brake, NoopClient, Server, StartServer
from tests.integration.test_fronts import (
    PATIENCE_S,
    clients,
    health,
    outcomes_of,
    processes,
    times_ready,
    until,
)
from tests.integration.test_swap import NOOP, OTHER, asked

from xlaserve.programs.tf.device import usable_cores
from xlaserve_proto import open_inference_pb2 as pb

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="each engine has a core of its own")

CONFIG: dict[str, Any] = {"models": [NOOP, OTHER], "fronts": 2, "engines": 2}
ENGINES = ("engine 1", "engine 2")


def until_ready(server: Server, times: int = 1) -> None:
    """Returns once each engine was ready as often."""
    until(lambda: all(times_ready(server, name) >= times for name in ENGINES), "an engine is not ready")


@pytest.fixture(scope="module")
def served(start_module_server: StartServer) -> Server:
    server = start_module_server(CONFIG)
    until_ready(server)
    return server


def states(client: NoopClient) -> dict[str, str]:
    index = client.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE_S)
    return {model.name: model.state for model in index.models}


def test_an_engine_that_is_killed_fails_its_own_calls_and_no_others(start_server: StartServer, brake: Brake) -> None:
    server = start_server(CONFIG, env=brake.env)
    until_ready(server)
    used = clients(server)
    for name in ENGINES:
        brake.pull()
        calls = [client.send(number) for number, client in enumerate(used)]
        until(lambda: server.metric("xlaserve_in_flight_images", model="noop") == len(calls), "they have not come")  # noqa: B023
        processes(server)[f"xlaserve {name}"].kill()
        until(lambda: any(call.done() for call in calls), "none has failed")  # noqa: B023
        assert health(used[0]) == health_pb2.HealthCheckResponse.SERVING
        brake.release()
        outcomes = Counter(outcomes_of(used, calls))
        assert {*outcomes} == {Status.OK, Status.UNAVAILABLE}, outcomes
        # Each front has brought as many to the one as to the other, or one more.
        assert abs(outcomes[Status.OK] - outcomes[Status.UNAVAILABLE]) <= 2
        assert {client.ask(1) for client in used} == {Status.OK}
        until(lambda: times_ready(server, name) == 2, "no other came")  # noqa: B023
        until(lambda: server.metric("xlaserve_lanes") == usable_cores(), "it does not serve")
        assert server.metric("xlaserve_process_restarts_total", role=name) == 1


def test_engines_have_cores_of_their_own_and_all_is_counted_once(served: Server) -> None:
    found = processes(served)
    assert {*found} == {"xlaserve engine 1", "xlaserve engine 2", "xlaserve front 1", "xlaserve front 2"}
    first, second = ({*found[f"xlaserve {name}"].cpu_affinity()} for name in ENGINES)
    assert not first & second
    assert first | second == os.sched_getaffinity(0)
    used = clients(served)
    assert {client.ask(number) for number, client in enumerate(used)} == {Status.OK}
    assert served.metric("xlaserve_requests_total", model="noop", status="OK") == len(used)  # the first test here
    for client in used[:4]:  # at both fronts
        request = pb.ModelStatisticsRequest(name="noop")
        (statistics,) = client.stub.ModelStatistics(request, timeout=PATIENCE_S).model_stats
        assert statistics.inference_count == len(used)
        assert statistics.inference_stats.success.count == len(used)


def test_engines_are_replaced_one_after_the_other_without_a_failed_call(served: Server) -> None:
    before = {name: process.pid for name, process in processes(served).items() if "engine" in name}
    served.config_file.write_text(json.dumps({**CONFIG, "models": [{**NOOP, "buckets": [1, 2]}, OTHER]}))
    times, shown = times_ready(served, ENGINES[0]) + 1, len(served.stderr)
    with asked(served, lambda client, number: client.ask(number)) as outcomes:
        os.kill(served.pid, signal.SIGHUP)
        until_ready(served, times)
        until(lambda: not any(map(psutil.pid_exists, before.values())), "those before have not ended")
    assert {*outcomes} == {Status.OK}, outcomes
    started = re.findall(r"(engine \d): process \d+( is ready)?$", served.stderr[shown:], re.MULTILINE)
    assert [bool(ready) for _, ready in started] == [False, True, False, True], "two were started at once"
    assert {name for name, _ in started} == {*ENGINES}


def test_what_clients_change_is_changed_in_all_engines_and_stays(served: Server) -> None:
    client = NoopClient(served.grpc)
    times = times_ready(served, ENGINES[0]) + 1
    client.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="other"), timeout=PATIENCE_S)
    assert states(client) == {"noop": "READY", "other": "UNLOADED"}
    until_ready(served, times)
    for name in ENGINES:
        processes(served)[f"xlaserve {name}"].kill()
    until(lambda: client.ask(1) is Status.OK, "no other came")
    assert states(client) == {"noop": "READY", "other": "UNLOADED"}
    client.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="other"), timeout=PATIENCE_S)
    assert states(client) == {"noop": "READY", "other": "READY"}
