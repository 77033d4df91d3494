"""Versions of a model over real sockets, in every protocol, while they are rolled."""

from __future__ import annotations

import io
import json
import shutil
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image
from tests.integration.conftest import Brake, Connect, NoopClient, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import tensorflow_messages_pb2 as serving_pb
from xlaserve_proto import vision_pb2 as vision_pb
from xlaserve_proto.tensorflow_serving_pb2_grpc import ModelServiceStub, PredictionServiceStub
from xlaserve_proto.vision_pb2_grpc import VisionStub

NOOP: dict[str, Any] = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
PIXELS = bytes(224 * 224 * 3)
FAILED = "failed"
NONE: Mapping[str, str] = {}
TIMEOUT_S = 60.0

Ask = Callable[[str], str]
"""Asks a version or a label, empty for none, and returns the version that answered, or what went wrong."""


def versions(*numbers: int, **shared: Any) -> list[dict[str, Any]]:
    return [{**NOOP, "version": number, **shared} for number in numbers]


def _named(header: str) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", header),) if header else ()


class Asker:
    """Asks the model `noop` of a server in four protocols."""

    def __init__(self, server: Server, client: NoopClient) -> None:
        self._server = server
        self._client = client
        self._prediction = PredictionServiceStub(client.channel)
        self._vision = VisionStub(client.channel)
        self.status = ModelServiceStub(client.channel).GetModelStatus
        self.all: list[Ask] = [self.open_inference, self.rest, self.predict, self.predict_over_rest]

    def open_inference(self, version: str, request_id: str = "", header: str = "") -> str:
        request = self._client.request(0)
        request.model_version, request.id = version, request_id
        answer = self._client.stub.ModelInfer(request, timeout=TIMEOUT_S, metadata=_named(header))
        return str(answer.model_version)

    def stream(self, version: str, request_id: str = "", header: str = "") -> str:
        request = self._client.request(0)
        request.model_version, request.id = version, request_id
        stream = self._client.stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S, metadata=_named(header))
        (answer,) = stream
        assert not answer.error_message
        return str(answer.infer_response.model_version)

    def vision(self, version: str, header: str = "") -> str:
        pixels = vision_pb.Pixels(images=1, height=224, width=224, rgb=PIXELS)
        request = vision_pb.ClassifyRequest(model="noop", version=version, pixels=pixels)
        return str(self._vision.Classify(request, timeout=TIMEOUT_S, metadata=_named(header)).version)

    def vision_over_rest(self, version: str, header: str = "") -> str:
        kind = "versions" if version.isdecimal() else "labels"
        path = "/v1/models/noop" + (f"/{kind}/{version}" if version else "")
        image = io.BytesIO()
        Image.new("RGB", (8, 8)).save(image, "PNG")
        return str(self._post(f"{path}:classify", image.getvalue(), dict(_named(header)))["version"])

    def rest(self, version: str, request_id: str = "", header: str = "") -> str:
        head = {
            **({"id": request_id} if request_id else {}),
            "inputs": [
                {
                    "name": "pixels",
                    "datatype": "UINT8",
                    "shape": [1, 224, 224, 3],
                    "parameters": {"binary_data_size": len(PIXELS)},
                }
            ],
        }
        text = json.dumps(head).encode()
        path = "/v2/models/noop" + (f"/versions/{version}" if version else "") + "/infer"
        headers = {"inference-header-content-length": str(len(text)), "content-type": "application/octet-stream"}
        headers |= dict(_named(header))
        return str(self._post(path, text + PIXELS, headers)["model_version"])

    def predict(self, version: str, header: str = "") -> str:
        request = serving_pb.PredictRequest(model_spec=serving_pb.ModelSpec(name="noop"))
        if version.isdecimal():
            request.model_spec.version.value = int(version)
        elif version:
            request.model_spec.version_label = version
        tensor = request.inputs["pixels"]
        tensor.dtype, tensor.tensor_content = serving_pb.DT_UINT8, PIXELS
        for side in (1, 224, 224, 3):
            tensor.tensor_shape.dim.add(size=side)
        answer = self._prediction.Predict(request, timeout=TIMEOUT_S, metadata=_named(header))
        return str(answer.model_spec.version.value)

    def predict_over_rest(self, version: str) -> str:
        """Returns the version that was asked for: TensorFlow Serving's REST says none."""
        kind = "versions" if version.isdecimal() else "labels"
        path = "/v1/models/noop" + (f"/{kind}/{version}" if version else "")
        body = json.dumps({"instances": [[[[0, 0, 0]] * 224] * 224]}).encode()
        assert len(self._post(f"{path}:predict", body, {})["predictions"]) == 1
        return version

    def get(self, path: str) -> Any:
        return self._http("GET", path)

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        return self._http("POST", path, body, headers)

    def _http(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = NONE) -> Any:
        connection = HTTPConnection(self._server.http, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answered = json.loads(response.read())
            assert response.status == 200, answered
            return answered
        finally:
            connection.close()


@pytest.fixture
def askers(connect: Connect) -> Callable[[Server], Asker]:
    return lambda server: Asker(server, connect(server))


@contextmanager
def traffic(asks: list[tuple[Ask, str]]) -> Iterator[Counter[tuple[str, str]]]:
    """Keeps asking, each from a thread, and counts what was asked for with what answered; complete at the end."""
    found: Counter[tuple[str, str]] = Counter()
    over = threading.Event()

    def call(ask: Ask, version: str) -> Counter[tuple[str, str]]:
        own: Counter[tuple[str, str]] = Counter()
        while not over.is_set():
            try:
                own[version, ask(version)] += 1
            except (grpc.RpcError, AssertionError, OSError) as error:
                own[version, f"{FAILED}: {error}"[:300]] += 1
        return own

    with ThreadPoolExecutor(len(asks)) as threads:
        calls = [threads.submit(call, *one) for one in asks]
        try:
            yield found
        finally:
            over.set()
        for done in calls:
            found.update(done.result(TIMEOUT_S))


def test_every_protocol_asks_versions_and_labels_while_they_are_rolled(
    start_server: StartServer, askers: Callable[[Server], Asker]
) -> None:
    server = start_server({"models": versions(1, 2, version_labels={"stable": 1, "canary": 2})})
    asker = askers(server)
    for ask in (asker.open_inference, asker.rest, asker.predict):
        assert [ask(version) for version in ("", "1", "2", "stable", "canary")] == ["1", "1", "2", "1", "2"]
    asks = [(ask, version) for ask in asker.all for version in ("", "2", "stable", "canary")]
    with traffic(asks) as found:
        for old in (2, 3, 4):
            numbers = sorted({2, old, old + 1})
            models = versions(*numbers, version_labels={"stable": old, "canary": old + 1})
            server.config_file.write_text(json.dumps({"models": models}))
            server.process.send_signal(signal.SIGHUP)
            server.wait_for(
                lambda stable=str(old), canary=str(old + 1): (
                    [  # type: ignore[misc]
                        asker.open_inference(label) for label in ("stable", "canary")
                    ]
                    == [stable, canary]
                ),
                "the labels did not move",
            )
    assert not [each for each in found if each[1].startswith(FAILED)], found
    assert {answered for asked, answered in found if asked == "2"} == {"2"}
    assert {"1", "4"} < {answered for asked, answered in found if asked == "stable"}
    listed = asker.status(serving_pb.GetModelStatusRequest(model_spec=serving_pb.ModelSpec(name="noop")))
    assert {one.version for one in listed.model_version_status} == {2, 4, 5}
    assert server.metric("xlaserve_requests_total", model="noop", version="5", status="OK") > 0
    assert server.metric("xlaserve_requests_total", model="noop", version="3", status="OK") > 0, "it is scraped later"
    assert server.metric("xlaserve_model_state", version="3") == 0


def test_an_unknown_label_is_not_found_and_counts_for_no_version(
    start_server: StartServer, askers: Callable[[Server], Asker]
) -> None:
    server = start_server({"models": versions(1, 2, version_labels={"stable": 1})})
    asker = askers(server)
    for ask in (asker.open_inference, asker.predict):
        with pytest.raises(grpc.RpcError) as refused:
            ask("beta")
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details() == "model noop has no version 'beta'; it has 1, 2, stable"
    assert server.metric("xlaserve_requests_total", model="noop") == 0
    assert server.metric("xlaserve_requests_total", model="", status="NOT_FOUND") == 2


def test_requests_with_one_id_go_to_one_version_over_grpc_and_rest(
    start_server: StartServer, askers: Callable[[Server], Asker]
) -> None:
    server = start_server({"models": versions(1, 2, version_labels={"stable": 1}, routing={"2": 50})})
    asker = askers(server)
    ids = [f"id-{number}" for number in range(24)]
    answered = [asker.open_inference("", id_) for id_ in ids]
    assert {*answered} == {"1", "2"}
    assert [asker.rest("", id_) for id_ in ids] == answered
    assert [asker.open_inference("stable", id_) for id_ in ids] == ["1"] * len(ids)


def test_requests_without_an_id_go_by_that_of_their_call_in_every_method(
    start_server: StartServer, askers: Callable[[Server], Asker]
) -> None:
    server = start_server({"models": versions(1, 2, version_labels={"stable": 1}, routing={"2": 50})})
    asker = askers(server)
    ids = [f"id-{number}" for number in range(24)]
    answered = [asker.open_inference("", id_) for id_ in ids]
    methods: list[Callable[..., str]] = [asker.open_inference, asker.stream, asker.rest]
    for ask in methods:
        assert [ask("", ids[0], header=id_) for id_ in ids] == answered[:1] * len(ids)
    methods += [asker.vision, asker.vision_over_rest, asker.predict]
    for ask in methods:
        assert [ask("", header=id_) for id_ in ids] == answered


def test_a_flood_of_one_version_leaves_another_its_half_of_the_device(
    start_server: StartServer, askers: Callable[[Server], Asker], brake: Brake
) -> None:
    settings = {"lanes": 1, "threads_per_lane": 1, "models": versions(1, 2)}
    server = start_server(settings, {**brake.env, "BATCH_S": "0.02"})
    asker = askers(server)
    with traffic([(asker.open_inference, "1")] * 12) as flood:
        server.wait_for(lambda: server.metric("xlaserve_images_total", version="1") > 12, "no flood")
        before = server.metric("xlaserve_images_total", version="1")
        with traffic([(asker.open_inference, "2")] * 3) as others:
            server.wait_for(lambda: server.metric("xlaserve_images_total", version="2") >= 50, "it starved")
        flooded = server.metric("xlaserve_images_total", version="1") - before
    assert set(flood) == {("1", "1")}
    assert set(others) == {("2", "2")}
    share = others["2", "2"] / (others["2", "2"] + flooded)
    assert 0.35 < share < 0.65, share


def test_statistics_metadata_and_the_index_show_each_version(
    start_server: StartServer, askers: Callable[[Server], Asker], connect: Connect
) -> None:
    server = start_server({"models": versions(1, 2)})
    asker, stub = askers(server), connect(server).stub
    asker.open_inference("1")
    asker.open_inference("")
    asker.open_inference("2")
    statistics = stub.ModelStatistics(pb.ModelStatisticsRequest(name="noop")).model_stats
    assert [(one.version, one.inference_count) for one in statistics] == [("1", 1), ("2", 2)]
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="noop")).versions == ["1", "2"]
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="noop", version="1")).versions == ["1"]
    for version in ("", "1"):
        config = stub.ModelConfig(pb.ModelConfigRequest(name="noop", version=version)).config
        assert list(config.version_policy.specific.versions) == [1, 2]
    assert asker.get("/v2/models/noop/config")["version_policy"] == {"specific": {"versions": [1, 2]}}
    index = stub.RepositoryIndex(pb.RepositoryIndexRequest()).models
    assert [(one.version, one.state) for one in index] == [("1", "READY"), ("2", "READY")]
    for version in ("1", "2"):
        assert server.metric("xlaserve_model_state", model="noop", version=version, state="ready") == 1


def test_a_new_version_folder_is_served_and_one_without_a_model_is_not(
    start_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    from xlaserve.models.networks.keras_runtime import keras

    keras.utils.set_random_seed(1)
    pixels = keras.Input((6, 5, 3), dtype="uint8")
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255)(pixels))
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        keras.Model(pixels, keras.layers.Dense(4, activation="softmax")(x)).save(tmp_path / "net.keras")
    folder = tmp_path / "net"
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
        shutil.copy(tmp_path / "net.keras", folder / version / "net.keras")
    model = {"name": "net", "source": str(folder), "modes": ["graph"], "buckets": [1], "versions": "latest 2"}
    server = start_server({"models": [model], "poll_versions_s": 0.2, "load_process": False})
    stub = connect(server).stub

    def index() -> list[tuple[str, str]]:
        models = stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=TIMEOUT_S).models
        return sorted((one.version, one.state) for one in models)

    assert index() == [("1", "READY"), ("2", "READY")]
    (folder / "3").mkdir()
    (folder / "3" / "net.keras").write_text("half of a file")
    both = [("1", "READY"), ("2", "READY")]
    server.wait_for(lambda: index() == [*both, ("3", "FAILED")], "it was not tried")
    shutil.copy(tmp_path / "net.keras", folder / "3" / "net.keras")
    server.wait_for(lambda: index() == [("2", "READY"), ("3", "READY")], "it was not served")
