"""Several resolutions on a real server; and one without buckets: in graph mode at once, then in XLA."""

from __future__ import annotations

import io
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import COMPILES, NoopClient, Server, StartServer
from tests.integration.test_engines import until_ready
from tests.integration.test_fronts import processes, times_ready
from tests.required import required

from xlaserve.programs.tf.device import usable_cores
from xlaserve.programs.watch.compile_watch import KNOWN
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

PATIENCE_S = 120
BATCHES = [1, 4]
PHASES = ("warm_up", "background")
NOISE = np.random.default_rng(7)


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "fronts"])
def fronts(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def dump(fronts: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which XLA writes what it compiles."""
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of any size."""
    from xlaserve.models.networks.keras_runtime import keras

    pixels = keras.Input((None, None, 3))
    x = keras.layers.Rescaling(1 / 255)(pixels)
    for filters in (8, 16, 16, 16):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = keras.layers.Conv2D(16, 3, groups=4)(x)  # which Keras would have XLA compile in graph mode
    x = keras.layers.Conv2D(8, 5, padding="valid")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    folder = tmp_path_factory.mktemp("model")
    with warnings.catch_warnings():
        # Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        keras.Model(pixels, keras.layers.Dense(6)(x)).save(folder / "any.keras")
    return {
        "name": "any",
        "source": str(folder / "any.keras"),
        "buckets": BATCHES,
        "resolutions": [[32, 32], [32, 48]],
        "unmatched": "background",
        "max_background_resolutions": 3,
    }


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, model: dict[str, Any], fronts: int, dump: Path) -> Server:
    env = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}
    return start_module_server({"models": [model], "fronts": fronts, **COMPILES}, env=env)


@pytest.fixture
def stub(server: Server) -> Iterator[oip_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield oip_grpc.GRPCInferenceServiceStub(channel)


def infer(stub: oip_grpc.GRPCInferenceServiceStub, images: np.ndarray) -> np.ndarray:
    request = oip.ModelInferRequest(model_name="any")
    request.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
    request.raw_input_contents.append(images.tobytes())
    response = stub.ModelInfer(request, timeout=PATIENCE_S)
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)


def images_of(height: int, width: int, n: int = 3) -> np.ndarray:
    return NOISE.integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def compilations(server: Server) -> tuple[float, ...]:
    return tuple(server.metric("xlaserve_compilations_total", phase=phase) for phase in PHASES)


def xla_compilations(folder: Path) -> int:
    """Returns how many programs XLA itself says that it has compiled, except the one that the watch is tried with."""
    return sum(KNOWN.function not in file.name for file in folder.glob("*.before_optimizations.txt"))


def batches(server: Server, mode: str, size: str) -> float:
    return sum(server.metric("xlaserve_bucket_batches_total", mode=mode, bucket=f"{n}x{size}") for n in BATCHES)


def test_encoded_images_of_a_request_go_to_the_resolutions_that_suit_them(
    server: Server, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    square, wide = images_of(32, 32), images_of(32, 48)
    expected = np.concatenate([infer(stub, square), infer(stub, wide)])
    order = [3, 0, 4, 1, 2, 5]
    request = oip.ModelInferRequest(model_name="any")
    tensor = request.inputs.add(name="image", datatype="BYTES", shape=[6])
    for index in order:
        buffer = io.BytesIO()
        Image.fromarray([*square, *wide][index]).save(buffer, "PNG")
        tensor.contents.bytes_contents.append(buffer.getvalue())
    response = stub.ModelInfer(request, timeout=PATIENCE_S)
    (output,) = response.outputs
    answer = np.array(output.contents.fp32_contents, np.float32).reshape(output.shape)
    np.testing.assert_allclose(answer, expected[order], rtol=0, atol=1e-5)


def test_another_resolution_runs_in_graph_mode_and_then_in_its_own_buckets(
    server: Server, stub: oip_grpc.GRPCInferenceServiceStub, dump: Path
) -> None:
    warmed = len(BATCHES) * 2
    assert compilations(server) == (warmed, 0)
    compiled_before = xla_compilations(dump)
    assert compiled_before == warmed
    images = images_of(24, 40)
    first = infer(stub, images)
    assert batches(server, "graph", "24x40") > 0

    # Requests of all resolutions go on meanwhile, and none comes near to waiting for a compilation.
    server.wait_for(
        lambda: infer(stub, images) is not None and batches(server, "xla", "24x40") > 0, "it did not switch"
    )
    np.testing.assert_allclose(infer(stub, images), first, rtol=0, atol=1e-4)
    assert compilations(server) == (warmed, len(BATCHES))
    assert xla_compilations(dump) == warmed + len(BATCHES)
    in_graph = batches(server, "graph", "24x40")
    for _ in range(5):
        infer(stub, images)
    assert batches(server, "graph", "24x40") == in_graph

    with grpc.insecure_channel(server.grpc) as channel:
        (model,) = pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest()).models
    made = [(p.mode, p.bucket.batch, p.bucket.height, p.bucket.width) for p in model.programs if p.in_background]
    assert made == [("xla", batch, 24, 40) for batch in BATCHES]


def test_what_is_configured_never_notices(server: Server, stub: oip_grpc.GRPCInferenceServiceStub) -> None:
    slowest = 0.0
    stop = threading.Event()

    def traffic() -> None:
        nonlocal slowest
        image = images_of(32, 32, 1)
        while not stop.is_set():
            began = time.perf_counter()
            infer(stub, image)
            slowest = max(slowest, time.perf_counter() - began)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        infer(stub, images_of(28, 36))
        server.wait_for(lambda: server.metric("xlaserve_compilations_total", phase="background") >= 4, "no switch")
    finally:
        stop.set()
        thread.join()
    assert batches(server, "graph", "32x32") == 0
    assert slowest < 5.0


def test_resolutions_are_bounded_and_those_that_cannot_run_are_refused(
    server: Server, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    def refusal(height: int, width: int) -> str:
        with pytest.raises(grpc.RpcError) as raised:
            infer(stub, images_of(height, width))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return required(raised.value.details())

    assert (
        refusal(100, 100) == "pixels: expected at most 6144 pixels an image, as the largest bucket has, got 100 x 100"
    )
    # The convolution without padding needs five rows.
    assert refusal(3, 32) == "pixels: expected a size that the network can take, got 3 x 32"
    assert refusal(3, 32) == "pixels: expected a size that the network can take, got 3 x 32"
    assert "no more are taken (max_background_resolutions), got 20 x 20" in refusal(20, 20)
    assert infer(stub, images_of(24, 40)).shape == (3, 6)
    assert compilations(server) == (4, 4)


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="each engine has a core of its own")
def test_each_engine_serves_a_resolution_and_goes_on_without_the_others(
    start_server: StartServer, model: dict[str, Any], connect: Callable[[Server], NoopClient]
) -> None:
    small = {**model, "buckets": [1], "resolutions": [[32, 32]], "max_background_resolutions": 2}
    server = start_server({"models": [small], "fronts": 2, "engines": 2})
    until_ready(server)
    stubs = [connect(server).stub for _ in range(8)]

    def compiled() -> float:
        """Sends an image over each connection; returns what has compiled in the background, in all engines so far."""
        for stub in stubs:
            infer(stub, images_of(24, 24, 1))
        return server.metric("xlaserve_compilations_total", phase="background")

    server.wait_for(lambda: compiled() == 2, "the engines have not compiled it")
    processes(server)["xlaserve engine 1"].kill()
    server.wait_for(lambda: server.stderr.count("engine 1 is lost") == 2, "the fronts have not seen it")
    compiled()
    server.wait_for(lambda: times_ready(server, "engine 1") == 2, "no other came")
    server.wait_for(lambda: compiled() == 3, "the new engine has not compiled it")
    infer(stubs[0], images_of(20, 20, 1))
    for stub in stubs:
        with pytest.raises(grpc.RpcError, match="no more are taken"):
            infer(stub, images_of(16, 16, 1))
        assert infer(stub, images_of(20, 20, 1)).shape == (1, 6)


def test_background_is_refused_for_a_model_of_one_size(start_server: StartServer) -> None:
    noop = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1], "unmatched": "background"}
    server = start_server({"models": [noop], "exit_on_model_failure": False}, wait=False)
    reason = "unmatched: expected reject, as the model's only size is 224x224, got background"
    server.wait_for(lambda: reason in server.stderr, "it did not fail")
