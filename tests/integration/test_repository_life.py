"""Models come and go while the server serves."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.integration.conftest import Brake, Connect, NoopClient, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc
from xlaserve_proto import vision_pb2 as vision
from xlaserve_proto import vision_pb2_grpc as vision_grpc

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
DIGITS = {"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1, 4]}
PATIENCE_S = 120.0
CALLERS = 6

Status = grpc.StatusCode
State = vision.Model.State

MakeControl = Callable[[Server], "Control"]


class Control:
    """What an operator does to a server."""

    def __init__(self, server: Server, client: NoopClient) -> None:
        self.server = server
        self.client = client
        self._health: Any = health_pb2_grpc.HealthStub(client.channel)
        self._vision = vision_grpc.VisionStub(client.channel)

    def load(self, name: str = "noop") -> Any:
        """Returns the call."""
        return self.client.stub.RepositoryModelLoad.future(
            pb.RepositoryModelLoadRequest(model_name=name), timeout=PATIENCE_S
        )

    def unload(self, name: str = "noop") -> Any:
        """Returns the call."""
        return self.client.stub.RepositoryModelUnload.future(
            pb.RepositoryModelUnloadRequest(model_name=name), timeout=PATIENCE_S
        )

    def configure(self, *models: dict[str, Any], **settings: Any) -> None:
        self.server.config_file.write_text(json.dumps({"models": models, **settings}))

    def index(self) -> list[tuple[str, str, str]]:
        """Returns version, state and reason of each model."""
        lines = self.client.stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=PATIENCE_S).models
        return [(line.version, line.state, line.reason) for line in lines]

    def wait_until(self, *index: tuple[str, str, str]) -> None:
        """Returns once both services give `index`."""
        self.server.wait_for(lambda: self.index() == list(index), f"there was never {index}")
        listed = [(model.version, State.Name(model.state).removeprefix("STATE_")) for model in self.models()]
        assert listed == [(version, state) for version, state, _ in index]

    def models(self) -> list[vision.Model]:
        return list(self._vision.ListModels(vision.ListModelsRequest(), timeout=PATIENCE_S).models)

    def health(self, service: str) -> str:
        response = self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


@pytest.fixture
def control(connect: Connect) -> MakeControl:
    return lambda server: Control(server, connect(server))


@contextmanager
def traffic(ask: Callable[[], Status]) -> Iterator[Counter[Status]]:
    """Keeps asking from several threads, and gives the counts of all answers; complete at the end."""
    outcomes: Counter[Status] = Counter()
    over = threading.Event()

    def call() -> Counter[Status]:
        own: Counter[Status] = Counter()
        while not over.is_set():
            own[ask()] += 1
        return own

    with ThreadPoolExecutor(CALLERS) as threads:
        calls = [threads.submit(call) for _ in range(CALLERS)]
        try:
            yield outcomes
        finally:
            over.set()
        for done in calls:
            outcomes.update(done.result(PATIENCE_S))


def test_reloads_under_traffic_lose_no_request(
    start_server: StartServer, control: MakeControl, connect: Connect
) -> None:
    server = start_server({"models": [NOOP]})
    operator = control(server)
    clients = [connect(server) for _ in range(3)]
    turns = iter(range(10**9))
    with traffic(lambda: clients[next(turns) % 3].ask(next(turns) % 256, 7, next(turns) % 256)) as outcomes:
        for version in range(2, 8):
            operator.configure({**NOOP, "version": version})
            operator.load().result()
            assert operator.index() == [(str(version), "READY", "")]
    assert outcomes.keys() == {Status.OK}
    assert outcomes[Status.OK] > 10 * CALLERS
    assert server.metric("xlaserve_in_flight_images") == 0


def test_what_is_loaded_beside_others_is_compiled_in_a_process_of_its_own(
    start_server: StartServer, control: MakeControl, scans: Any
) -> None:
    server = start_server({"models": [DIGITS, NOOP], "swap": "in_place"})
    operator = control(server)
    compiled = server.metric("xlaserve_xla_compilations_total")
    operator.configure({**DIGITS, "version": "2", "buckets": [1, 2, 4]}, NOOP)
    operator.load("digits").result()
    model = next(model for model in operator.models() if model.name == "digits")
    assert (model.version, len(model.programs)) == ("2", 3)
    assert all(program.from_cache for program in model.programs)
    assert server.metric("xlaserve_xla_compilations_total") == compiled
    stub = vision_grpc.VisionStub(operator.client.channel)
    request = vision.ClassifyRequest(model="digits", images=list(scans.values()), top_k=1)
    rows = stub.Classify(request, timeout=PATIENCE_S).classifications
    assert [row.categories[0].label for row in rows] == list(scans)


def test_a_compiled_model_is_known_at_once_and_reloads_under_traffic(
    start_server: StartServer, control: MakeControl, scans: Any
) -> None:
    server = start_server({"models": [DIGITS]}, wait=False)
    operator = control(server)
    codes = set()
    while not server.is_ready:
        call = operator.client.stub.ModelMetadata.future(pb.ModelMetadataRequest(name="digits"), timeout=PATIENCE_S)
        codes.add((call.code(), call.details().partition(":")[0]))
        assert server.process.poll() is None
    assert {code for code, _ in codes} <= {Status.UNAVAILABLE, Status.OK}
    assert any("loading" in details for _, details in codes)
    images, labels = list(scans.values()), list(scans)

    def classify() -> Status:
        stub = vision_grpc.VisionStub(operator.client.channel)
        try:
            response = stub.Classify(vision.ClassifyRequest(model="digits", images=images, top_k=1), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            code: Status = error.code()
            return code
        assert [row.categories[0].label for row in response.classifications] == labels
        seen.add((response.version, response.mode))
        return Status.OK

    seen: set[tuple[str, str]] = set()
    states = set()
    with traffic(classify) as outcomes:
        operator.configure({**DIGITS, "version": "2", "modes": ["graph", "xla"]})
        load = operator.load("digits")
        while not load.done():
            states.update(operator.index())
            assert operator.health("digits") == operator.health("") == "SERVING"
        load.result()
    assert outcomes.keys() == {Status.OK}
    assert seen == {("1", "xla"), ("2", "graph")}
    assert ("1", "READY", "") in states
    assert any(state == "COMPILING" and "of 4 programs compiled" in reason for _, state, reason in states)
    (model,) = operator.models()
    assert len(model.programs) == model.programs_total == 4
    assert list(model.modes) == ["graph", "xla"]


def test_each_state_of_a_life_is_seen(start_server: StartServer, control: MakeControl, brake: Brake) -> None:
    brake.pull()
    server = start_server({"models": [NOOP], "swap": "in_place"}, env=brake.env, wait=False)
    operator = control(server)
    operator.wait_until(("1", "COMPILING", "0 of 3 programs compiled"))
    assert operator.health("noop") == operator.health("") == "NOT_SERVING"
    assert operator.client.ask(1) is Status.UNAVAILABLE
    assert operator.models()[0].programs_total == 3
    assert server.metric("xlaserve_model_state", state="compiling") == 1
    brake.release()
    server.wait_until_ready()
    operator.wait_until(("1", "READY", ""))
    assert operator.health("noop") == operator.health("") == "SERVING"

    brake.pull()
    accepted = operator.client.send(1, 2, 3)
    server.wait_for(lambda: server.metric("xlaserve_in_flight_images") == 3, "it was not accepted")
    unload = operator.unload()
    operator.wait_until(("1", "DRAINING", ""))
    assert operator.health("noop") == "NOT_SERVING"
    refused = operator.client.send(4)
    assert operator.client.outcome(refused, 4) is Status.UNAVAILABLE
    assert refused.details() == "model noop is draining"
    assert not accepted.done()
    assert not unload.done()
    brake.release()
    assert operator.client.outcome(accepted, 1, 2, 3) is Status.OK
    unload.result()
    operator.wait_until(("1", "UNLOADED", ""))
    refused = operator.client.send(4)
    assert operator.client.outcome(refused, 4) is Status.UNAVAILABLE
    assert refused.details() == "model noop is unloaded"
    assert not operator.client.stub.ServerReady(pb.ServerReadyRequest()).ready

    brake.pull()
    operator.configure({**NOOP, "version": "2"})
    load = operator.load()
    operator.wait_until(("2", "COMPILING", "0 of 3 programs compiled"))
    brake.release()
    load.result()
    operator.wait_until(("2", "READY", ""))
    assert operator.client.ask(1) is Status.OK
    assert operator.health("noop") == operator.health("") == "SERVING"


def test_what_fails_to_load_leaves_the_old_one_serving_and_says_why(
    start_server: StartServer, control: MakeControl
) -> None:
    server = start_server({"models": [NOOP]})
    operator = control(server)
    operator.configure({**NOOP, "version": "2", "buckets": [[1, 8, 8]]})
    error = operator.load().exception()
    assert error.code() is Status.FAILED_PRECONDITION
    said = "model noop version 2 failed: buckets: expected the model's only size, 224x224, got 8x8; "
    assert error.details().startswith(said)
    reason = error.details().removeprefix("model noop version 2 failed: ")
    operator.wait_until(("1", "READY", ""), ("2", "FAILED", reason))
    assert operator.client.ask(1) is Status.OK
    assert operator.health("noop") == operator.health("") == "SERVING"
    assert reason in server.stderr
    operator.configure({**NOOP, "version": "3"})
    operator.load().result()
    assert operator.index() == [("3", "READY", "")]


@pytest.mark.parametrize("text", ["models: [", "models: 3", "no_such_field: 1", '{"models": [{"name": "noop"}]}'])
def test_a_configuration_that_broke_is_told_and_changes_nothing(
    module_server: Server, control: MakeControl, text: str
) -> None:
    operator = control(module_server)
    operator.server.config_file.write_text(text)
    before = operator.index()
    error = operator.load().exception()
    assert error.code() is Status.FAILED_PRECONDITION
    assert error.details() == "the configuration is no longer valid; the server's log says why"
    assert operator.index() == before
    assert operator.client.ask(1) is Status.OK
    assert "ERROR model noop: configuration" in operator.server.stderr
    operator.configure(NOOP)
    operator.load().result()


@pytest.fixture(scope="module")
def module_server(start_module_server: StartServer) -> Any:
    return start_module_server({"models": [NOOP]})


def test_a_model_that_is_added_to_the_configuration_can_be_loaded(module_server: Server, control: MakeControl) -> None:
    operator = control(module_server)
    operator.configure(NOOP, {**NOOP, "name": "another", "buckets": [3]})
    assert operator.load("another").exception() is None
    assert {model.name for model in operator.models()} == {"noop", "another"}
    assert operator.health("another") == "SERVING"
    operator.unload("another").result()
    operator.configure(NOOP)
    error = operator.load("another").exception()
    assert error.code() is Status.NOT_FOUND
    assert error.details() == "no model 'another' is configured; add it to `models` in the configuration first"


def test_a_server_without_tensorflow_says_that_it_must_be_restarted_for_it(
    module_server: Server, control: MakeControl
) -> None:
    operator = control(module_server)
    operator.configure(NOOP, DIGITS)
    error = operator.load("digits").exception()
    assert error.code() is Status.FAILED_PRECONDITION
    assert "restart it to serve this one" in error.details()
    assert operator.client.ask(1) is Status.OK


def test_loads_and_unloads_at_the_same_time_end_well(start_server: StartServer, control: MakeControl) -> None:
    operator = control(start_server({"models": [NOOP]}))
    calls = [turn() for turn in [operator.load, operator.unload] * 4]
    outcomes = [call.code() for call in calls]
    assert outcomes[1::2] == [Status.OK] * 4
    assert set(outcomes) <= {Status.OK, Status.ABORTED}, "an unload ends the loads before it"
    operator.load().result()
    assert [state for _, state, _ in operator.index()] == ["READY"]
    assert operator.client.ask(1) is Status.OK


def test_a_load_goes_on_when_its_client_hangs_up(start_server: StartServer, control: MakeControl, brake: Brake) -> None:
    server = start_server({"models": [NOOP], "swap": "in_place"}, env=brake.env)
    operator = control(server)
    operator.configure({**NOOP, "version": "2"})
    brake.pull()
    load = operator.load()
    operator.wait_until(("1", "READY", ""), ("2", "COMPILING", "0 of 3 programs compiled"))
    load.cancel()
    brake.release()
    operator.wait_until(("2", "READY", ""))


def test_start_up_ends_where_a_model_fails(start_server: StartServer) -> None:
    broken = {**NOOP, "name": "broken", "buckets": [[1, 8, 8]]}
    server = start_server({"models": [NOOP, broken]}, wait=False)
    assert server.wait() == 1
    last = server.stderr.strip().splitlines()[-1]
    assert last.startswith("xlaserve: model broken failed: ")
    assert "Traceback" not in server.stderr
    assert not server.is_ready


def test_unfetchable_weights_fail_the_model_and_random_ones_are_reported(
    start_server: StartServer, control: MakeControl, tmp_path: Any
) -> None:
    application = {"source": "keras.applications:MobileNetV3Small", "modes": ["eager"], "buckets": [1]}
    models = [
        {**application, "name": "fetched", "weights": "imagenet"},
        {**application, "name": "random", "weights": "random", "input_size": [32, 32]},
        NOOP,
    ]
    closed = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    began = time.monotonic()
    server = start_server(
        {"models": models, "exit_on_model_failure": False},
        env={**closed, "no_proxy": "", "NO_PROXY": "", "KERAS_HOME": str(tmp_path)},
    )
    assert time.monotonic() - began < PATIENCE_S
    operator = control(server)
    fetched, random, noop = operator.models()
    assert (fetched.state, random.state, noop.state) == (State.STATE_FAILED, State.STATE_READY, State.STATE_READY)
    assert "could not be downloaded" in fetched.reason
    assert "set weights to the path of a weights file, or to random" in fetched.reason
    assert str(tmp_path) not in fetched.reason
    assert fetched.weights == ""
    assert fetched.reason in server.stderr
    assert operator.health("fetched") == "NOT_SERVING"
    assert operator.health("random") == operator.health("") == "SERVING"

    assert random.weights == "random"
    assert noop.weights == "built in"
    stub = pb_grpc.GRPCInferenceServiceStub(operator.client.channel)
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="random"), timeout=PATIENCE_S)
    assert metadata.properties["weights"] == "random"
    assert "model random has random weights: its answers mean nothing" in server.stderr


def test_hanging_up_has_the_configuration_read_again(
    start_server: StartServer, control: MakeControl, connect: Connect
) -> None:
    server = start_server({"models": [NOOP, {**NOOP, "name": "gone"}]})
    operator = control(server)

    def hang_up(until: str) -> None:
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: until in server.stderr, f"it never said {until!r}")

    clients = [connect(server) for _ in range(2)]
    with traffic(lambda: clients[0].ask(1, 2, 3)) as outcomes:
        hang_up("read the configuration again: no model changed")
        operator.configure({**NOOP, "version": "2"}, {**NOOP, "name": "new"}, max_queue_images=77)
        hang_up("read the configuration again: noop loaded; new loaded; gone unloaded")
        assert "only a restart applies it: max_queue_images" in server.stderr
        assert operator.health("new") == operator.health("noop") == "SERVING"
        assert operator.health("gone") == "NOT_SERVING"

        server.config_file.write_text("models: [")
        hang_up("the configuration is as before: configuration file")
        server.config_file.unlink()
        hang_up("can't be read: ")
    assert outcomes.keys() == {Status.OK}
    assert server.stop() == 0
    assert "Traceback" not in server.stderr


def test_hanging_up_ends_no_server_whatever_it_does(
    start_server: StartServer, control: MakeControl, connect: Connect, brake: Brake
) -> None:
    brake.pull()
    server = start_server({"models": [NOOP]}, env=brake.env, wait=False)
    server.wait_for(lambda: "noop: compiling" in server.stderr, "it did not compile")
    server.process.send_signal(signal.SIGHUP)
    brake.release()
    server.wait_until_ready()
    server.wait_for(lambda: "read the configuration again: no model changed" in server.stderr, "it was not read again")

    brake.pull()
    client = connect(server)
    accepted = client.send(1)
    server.wait_for(lambda: server.metric("xlaserve_in_flight_images") == 1, "it was not accepted")
    server.process.terminate()
    server.wait_for(lambda: "draining: " in server.stderr, "it did not drain")
    server.process.send_signal(signal.SIGHUP)
    server.metric("xlaserve_ready")
    brake.release()
    assert client.outcome(accepted, 1) is Status.OK
    assert server.wait() == 0
