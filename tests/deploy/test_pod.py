"""Servers that run as the manifests have them: command, environment, user, probes, and the end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import psutil
import pytest
import trustme
from tests.deploy.manifests import KSERVE, KUBERNETES, kustomized, one, read
from tests.deploy.pod import PATIENCE_S, Pod, may_mount

from xlaserve.config import load
from xlaserve.processes.event_loop import SECOND_SIGNAL_S
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc

CONFIG = KUBERNETES / "base" / "xlaserve.yaml"
CALLERS = 4
NOOP = '[{"name": "noop", "source": "builtin:noop", "buckets": [1]}]'
SAVE_MODEL = """
import sys, keras
layers = [keras.Input((32, 32, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10, activation="softmax")]
keras.Sequential(layers).save(sys.argv[1])
"""

StartPod = Callable[..., Pod]

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def start_pod() -> Iterator[StartPod]:
    with ExitStack() as started:

        def start(*arguments: Any, **options: Any) -> Pod:
            pod = Pod(*arguments, **options)
            started.callback(pod.close)
            return pod

        yield start


def image(model: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="pixels", datatype="UINT8", shape=(1, 32, 32, 3))
    request.raw_input_contents.append(bytes(32 * 32 * 3))
    return request


class Load:
    """Callers that send one request after another on connections of their own, and retry nothing, until `leave`."""

    def __init__(self, address: str, model: str) -> None:
        self.outcomes: Counter[grpc.StatusCode] = Counter()
        self._address, self._request = address, image(model)
        self._leaving = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _call(self) -> None:
        options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self._address, options) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            while not self._leaving.is_set():
                try:
                    stub.ModelInfer(self._request, timeout=PATIENCE_S)
                    self.outcomes[grpc.StatusCode.OK] += 1
                except grpc.RpcError as error:
                    self.outcomes[error.code()] += 1


def test_a_pod_compiles_serves_and_ends_without_losing_a_request(start_pod: StartPod, folder: Path) -> None:
    spec = read(KUBERNETES / "base" / "deployment.yaml")[0]["spec"]["template"]["spec"]
    container, settings = spec["containers"][0], load(CONFIG, environ={})
    begin = time.monotonic()
    pod = start_pod(spec, folder, {"config": {CONFIG.name: CONFIG.read_text()}})
    assert pod.succeeds(container["livenessProbe"])
    assert not pod.succeeds(container["startupProbe"])
    pod.wait_for(lambda: pod.succeeds(container["startupProbe"]))
    print(f"started in {time.monotonic() - begin:.1f} s")
    assert pod.succeeds(container["readinessProbe"])
    assert [*(folder / "cache").iterdir()] != []
    if psutil.Process().uids().real == 0:
        assert psutil.Process(pod.process.pid).uids().real == spec["securityContext"]["runAsUser"]

        if may_mount():
            assert [pod.run(["touch", f"{place}/file"]) for place in (folder / "tmp", "/var/tmp")] == [0, 1]

    # A Service learns late that the pod ends, when the server has almost stopped taking requests.
    load_on_it = Load(pod.grpc, "digits")
    before = time.monotonic()
    assert pod.run(container["lifecycle"]["preStop"]["exec"]["command"]) == 0
    assert pod.succeeds(container["readinessProbe"])
    pod.process.terminate()
    pod.wait_for(lambda: not pod.succeeds(container["readinessProbe"]))
    assert pod.succeeds(container["livenessProbe"])
    time.sleep(0.7 * settings.shutdown_delay_s)
    load_on_it.leave()
    assert pod.process.wait(PATIENCE_S) == 0
    assert time.monotonic() - before < spec["terminationGracePeriodSeconds"]
    print(dict(load_on_it.outcomes))
    assert set(load_on_it.outcomes) == {grpc.StatusCode.OK}


def test_a_pod_ends_without_losing_a_request_and_refuses_an_upgrade(start_pod: StartPod, folder: Path) -> None:
    spec = read(KUBERNETES / "base" / "deployment.yaml")[0]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    pod = start_pod(spec, folder, {"config": {CONFIG.name: CONFIG.read_text()}}, {"XLASERVE_FRONTS": "1"})
    assert pod.succeeds(container["livenessProbe"])
    pod.wait_for(lambda: pod.succeeds(container["startupProbe"]))
    supervisor = psutil.Process(pod.process.pid)
    started = {child.name(): child for child in supervisor.children()}
    assert started.keys() >= {"front 1", "engine"}
    if psutil.Process().uids().real == 0:
        users = {child.uids().real for child in (supervisor, *started.values())}
        assert users == {spec["securityContext"]["runAsUser"]}
    # As process 1 of a container tini ends with the supervisor.
    pod.process.send_signal(signal.SIGUSR2)
    pod.wait_for(lambda: "upgrade: " in pod.said)
    load_on_it = Load(pod.grpc, "digits")
    pod.wait_for(lambda: load_on_it.outcomes[grpc.StatusCode.OK] > CALLERS)
    started["front 1"].kill()
    pod.wait_for(lambda: len(re.findall("front 1: process .* is ready", pod.said)) == 2)
    answered = load_on_it.outcomes[grpc.StatusCode.OK]
    pod.wait_for(lambda: load_on_it.outcomes[grpc.StatusCode.OK] > answered + CALLERS)
    load_on_it.leave()
    assert set(load_on_it.outcomes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}

    load_on_it = Load(pod.grpc, "digits")
    assert pod.run(container["lifecycle"]["preStop"]["exec"]["command"]) == 0
    assert pod.succeeds(container["readinessProbe"])
    pod.process.terminate()
    pod.wait_for(lambda: not pod.succeeds(container["readinessProbe"]))
    assert pod.succeeds(container["livenessProbe"])
    time.sleep(0.7 * load(CONFIG, environ={}).shutdown_delay_s)
    load_on_it.leave()
    assert pod.process.wait(PATIENCE_S) == 0
    print(dict(load_on_it.outcomes))
    assert set(load_on_it.outcomes) == {grpc.StatusCode.OK}
    assert not any(child.is_running() for child in started.values())


def test_a_pod_with_tls_is_probed_over_https(start_pod: StartPod, folder: Path) -> None:
    spec = one(kustomized(KUBERNETES / "overlays" / "tls"), "Deployment")["spec"]["template"]["spec"]
    container = spec["containers"][0]
    issued = trustme.CA().issue_cert("vision.example")
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    files = {
        "config": {CONFIG.name: CONFIG.read_text()},
        "tls": {"tls.crt": chain, "tls.key": issued.private_key_pem.bytes()},
    }
    pod = start_pod(spec, folder, files, {"XLASERVE_MODELS": NOOP, "XLASERVE_SHUTDOWN_DELAY_S": "60"})
    pod.wait_for(lambda: pod.succeeds(container["startupProbe"]))
    assert pod.succeeds(container["readinessProbe"])
    assert pod.succeeds(container["livenessProbe"])
    pod.process.terminate()
    pod.wait_for(lambda: not pod.succeeds(container["readinessProbe"]))
    assert pod.succeeds(container["livenessProbe"])
    time.sleep(SECOND_SIGNAL_S)  # a signal that comes sooner is the same one
    pod.process.terminate()
    assert pod.process.wait(PATIENCE_S) == 0


def test_kserves_runtime_serves_a_keras_file_in_each_of_its_protocols(start_pod: StartPod, folder: Path) -> None:
    (runtime,) = read(KSERVE / "runtime.yaml")
    spec = json.loads(json.dumps(runtime["spec"]).replace("{{.Name}}", "flowers"))
    container = spec["containers"][0]
    container["volumeMounts"].append({"name": "models", "mountPath": "/mnt/models", "readOnly": True})  # as KServe does
    file = folder / "saved.keras"
    # In a process of its own: Keras stays out of the tests'.
    subprocess.run([sys.executable, "-c", SAVE_MODEL, str(file)], check=True, capture_output=True, timeout=PATIENCE_S)
    pod = start_pod(spec, folder, {"models": {"flowers.keras": file.read_bytes()}}, {"XLASERVE_SHUTDOWN_DELAY_S": "0"})
    pod.wait_for(lambda: pod.succeeds(container["readinessProbe"]))

    with grpc.insecure_channel(pod.grpc, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(image("flowers"), timeout=PATIENCE_S)
    over_grpc = np.frombuffer(answer.raw_output_contents[0], np.float32)
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [0] * (32 * 32 * 3)}
    over_v2 = asked(f"http://{pod.http}/v2/models/flowers/infer", {"inputs": [pixels]})["outputs"][0]["data"]
    instances = np.zeros((1, 32, 32, 3), int).tolist()
    over_v1 = asked(f"http://{pod.http}/v1/models/flowers:predict", {"instances": instances})["predictions"][0]
    np.testing.assert_allclose(over_v2, over_grpc, rtol=1e-5)
    np.testing.assert_allclose(over_v1, over_grpc, rtol=1e-5)
    pod.process.terminate()
    assert pod.process.wait(PATIENCE_S) == 0


def asked(address: str, body: object) -> Any:
    request = Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())
