"""What warm-up finds out about models on a real server: rows that depend on each other, programs that are not their
model, answers that are no numbers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tests.attack import saved_models
from tests.integration.conftest import Server, StartServer

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

PATIENCE_S = 60
SIDE = 8
BUCKETS = [2, 4]
MODES = ["xla", "graph"]
MARK = 77
"""The level of images that a model leaves out and warm-up does not have."""
ODD_LAYERS = """
import keras, tensorflow as tf

class Miscompiled(keras.layers.Layer):
    def call(self, x):
        return x if tf.executing_eagerly() else x * 1.015

class Unrunnable(keras.layers.Layer):
    def call(self, x):
        if tf.executing_eagerly():
            raise NotImplementedError("no kernel")
        return x
"""


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from xlaserve.models.networks.keras_runtime import keras

    folder = tmp_path_factory.mktemp("models")
    (folder / "odd_layers.py").write_text(ODD_LAYERS)
    odd_layers: dict[str, Any] = {}
    exec(ODD_LAYERS, odd_layers)

    def save(name: str, finish: Callable[[Any], Any]) -> dict[str, Any]:
        pixels = keras.Input((SIDE, SIDE, 3))
        x = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(pixels))
        scores = finish(keras.layers.Dense(6, kernel_initializer=keras.initializers.RandomNormal(seed=1))(x))
        file = folder / f"{name}.keras"
        with warnings.catch_warnings():
            # Keras hands its variables to NumPy 2 in the way of NumPy 1.
            warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
            keras.Model(pixels, scores).save(file)
        return {
            "name": name,
            "source": str(file),
            "buckets": BUCKETS,
            "modes": MODES,
            "preprocess": "none",
            "activation": "none",
        }

    def leaving_out(name: str, level: int) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            saved_models.leaving_out(str(folder / name), SIDE, level)
        modes = [*MODES, "eager", "openvino"]
        return {"name": name, "source": str(folder / name), "buckets": [4], "modes": modes}

    def bicubic(name: str) -> dict[str, Any]:
        return save(name, lambda x: keras.layers.Resizing(1, 2, "bicubic")(keras.layers.Reshape((1, 2, 3))(x))[:, 0, 0])

    odd = {"custom_objects": {name: f"odd_layers:{name}" for name in ("Miscompiled", "Unrunnable")}}
    centred = save("centred", lambda x: x - keras.ops.mean(x, axis=0, keepdims=True))
    miscompiled = save("miscompiled", odd_layers["Miscompiled"]())
    models = [
        save("normal", keras.layers.BatchNormalization()),
        centred,
        centred | {"name": "centred-refused", "batch_dependence": "refuse"},
        centred | {"name": "centred-allowed", "batch_dependence": "allow"},
        miscompiled | odd,
        miscompiled | odd | {"name": "miscompiled-served", "verification": "warn"},
        save("undefined", keras.ops.log),
        save("unrunnable", odd_layers["Unrunnable"]()) | odd,
        bicubic("bicubic") | {"modes": ["auto"]},
        bicubic("bicubic-in-xla") | {"modes": ["xla"]},
        leaving_out("dark", level=0),
        leaving_out("marked", level=MARK) | {"max_queue_delay_ms": 100},
    ]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return start_module_server({"models": models, "exit_on_model_failure": False}, env={"PYTHONPATH": path})


@pytest.fixture(scope="module")
def models(server: Server) -> dict[str, pb.Model]:
    with grpc.insecure_channel(server.grpc) as channel:
        answer = pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)
    return {model.name: model for model in answer.models}


def warnings_of(model: pb.Model) -> list[str]:
    """Returns what is said of a model's answers, not of its speed, which a busy machine may have measured wrongly, nor
    that all images get the same answer, as they do where the mean over a batch of one is subtracted."""
    left_out = ("the default", "get the same answer")
    return [warning for warning in model.warnings if not any(each in warning for each in left_out)]


def infer(server: Server, model: str, images: np.ndarray, mode: str) -> np.ndarray:
    request = oip.ModelInferRequest(model_name=model)
    request.parameters["mode"].string_param = mode
    request.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
    request.raw_input_contents.append(images.tobytes())
    with grpc.insecure_channel(server.grpc) as channel:
        answer = oip_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=PATIENCE_S)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)


def noise(n: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (n, SIDE, SIDE, 3), dtype=np.uint8)


def test_what_was_measured_of_each_program_is_listed_and_in_the_metrics(
    server: Server, models: dict[str, pb.Model]
) -> None:
    normal = models["normal"]
    assert warnings_of(normal) == []
    assert len(normal.programs) == len(BUCKETS) * len(MODES)
    for program in normal.programs:
        found = program.verification
        assert found.difference.images >= 8
        assert found.difference.largest < 1e-5
        assert (found.fault, found.is_batch_dependent, found.not_finite_images) == ("", False, 0)
        bucket = f"{program.bucket.batch}x{SIDE}x{SIDE}"
        labels = {"model": "normal", "mode": program.mode, "bucket": bucket}
        assert server.metric("xlaserve_program_difference", **labels) == found.difference.largest
        assert server.metric("xlaserve_program_verified", **labels) == 1
    assert server.metric("xlaserve_model_warnings", model="normal") == len(normal.warnings)


def test_a_model_without_a_reference_says_that_it_is_served_unverified(
    server: Server, models: dict[str, pb.Model]
) -> None:
    unrunnable = models["unrunnable"]
    assert unrunnable.state == pb.Model.STATE_READY
    (warning,) = warnings_of(unrunnable)
    assert "served unverified" in warning
    assert "no kernel" in warning
    assert warning in server.stderr
    assert not any(program.verification.HasField("difference") for program in unrunnable.programs)
    assert server.metric("xlaserve_program_verified", model="unrunnable") == 0
    assert server.metric("xlaserve_model_warnings", model="unrunnable") == len(unrunnable.warnings)


@pytest.mark.parametrize("mode", MODES)
def test_a_mean_over_the_batch_is_served_in_batches_of_one(
    server: Server, models: dict[str, pb.Model], mode: str
) -> None:
    centred = models["centred"]
    assert [bucket.batch for bucket in centred.buckets] == [1]
    assert centred.state == pb.Model.STATE_READY
    assert any(program.verification.is_batch_dependent for program in centred.programs)
    (warning,) = warnings_of(centred)
    assert "served in batches of one" in warning
    assert warning in server.stderr
    images = noise(4)
    together = infer(server, "centred", images, mode)
    np.testing.assert_array_equal(together, [infer(server, "centred", image[np.newaxis], mode)[0] for image in images])


def test_a_mean_over_the_batch_is_refused_or_allowed_as_configured(server: Server, models: dict[str, pb.Model]) -> None:
    refused, allowed = models["centred-refused"], models["centred-allowed"]
    assert refused.state == pb.Model.STATE_FAILED
    assert "depends on the others of its batch" in refused.reason
    assert [bucket.batch for bucket in allowed.buckets] == BUCKETS
    assert len(warnings_of(allowed)) == len(BUCKETS) * len(MODES)


def test_an_xla_program_that_is_not_its_model_is_refused_by_default(
    server: Server, models: dict[str, pb.Model]
) -> None:
    refused, served = models["miscompiled"], models["miscompiled-served"]
    assert refused.state == pb.Model.STATE_FAILED
    assert "mode xla, bucket 2x8x8: it computes something other than its model" in refused.reason
    assert served.state == pb.Model.STATE_READY
    assert [program.verification.fault != "" for program in served.programs] == [True] * len(served.programs)
    assert all(0.005 < program.verification.difference.largest < 0.02 for program in served.programs)
    assert len(warnings_of(served)) == len(served.programs)


def test_answers_that_are_no_numbers_are_said_with_mode_and_bucket(server: Server, models: dict[str, pb.Model]) -> None:
    undefined = models["undefined"]
    assert undefined.state == pb.Model.STATE_READY
    for program in undefined.programs:
        assert program.verification.not_finite_images > 0
        assert program.verification.fault == ""
        where = f"mode {program.mode}, bucket {program.bucket.batch}x{SIDE}x{SIDE}: NaN or infinity"
        assert any(warning.startswith(where) for warning in undefined.warnings)
        assert where in server.stderr
    assert server.metric("xlaserve_program_not_finite_images", model="undefined") > 0


def test_answers_that_are_no_numbers_are_counted_in_traffic(server: Server) -> None:
    for mode in MODES:
        counted = [server.metric("xlaserve_not_finite_batches_total", model="undefined", mode=mode)]
        for level in (0, 255):
            answer = infer(server, "undefined", np.full((1, SIDE, SIDE, 3), level, np.uint8), mode)
            counted.append(server.metric("xlaserve_not_finite_batches_total", model="undefined", mode=mode))
            is_counted = counted[-1] - counted[-2]
            assert is_counted == (0 if np.isfinite(answer).all() else 1)
        assert counted[-1] > counted[0]


def test_a_model_that_leaves_dark_images_out_never_serves(models: dict[str, pb.Model]) -> None:
    assert models["dark"].state == pb.Model.STATE_FAILED
    assert models["dark"].reason == (
        "output scores: expected 4 rows, one for each image of the batch, got 3 (shape (3, 3))"
    )


@pytest.mark.parametrize("mode", [*MODES, "eager", "openvino"])
@pytest.mark.parametrize("place", range(4))
def test_no_client_of_a_batch_gets_the_answer_of_another(
    server: Server, models: dict[str, pb.Model], mode: str, place: int
) -> None:
    assert models["marked"].state == pb.Model.STATE_READY
    levels = [10, 20, 30, 40]
    levels[place] = MARK

    def answer(level: int) -> tuple[grpc.StatusCode, list[float] | str]:
        try:
            scores = infer(server, "marked", np.full((1, SIDE, SIDE, 3), level, np.uint8), mode)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, scores.ravel().round(3).tolist()

    failed = grpc.StatusCode.INTERNAL, "model marked could not run this batch"
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(answer, levels))
    assert answers[place] == failed
    for level, own in zip(levels, answers, strict=True):
        assert own in (failed, (grpc.StatusCode.OK, [level] * 3))
    assert answer(50) == (grpc.StatusCode.OK, [50] * 3)


def test_auto_serves_what_xla_has_no_kernel_for_and_says_why(server: Server, models: dict[str, pb.Model]) -> None:
    served, failed = models["bicubic"], models["bicubic-in-xla"]
    assert served.state == pb.Model.STATE_READY
    assert "xla" not in served.auto_modes.values()
    (warning,) = [warning for warning in served.warnings if "without xla" in warning]
    assert warning.startswith("auto does without xla: XLA has no kernel for ResizeBicubic, at resizing.py:")
    assert server.stderr.count(warning) == 1
    assert infer(server, "bicubic", noise(3), "auto").shape == (3, 3)
    assert failed.state == pb.Model.STATE_FAILED
    assert failed.reason.startswith("XLA has no kernel for ResizeBicubic, at resizing.py:")
    assert failed.reason.endswith("; `modes: [graph]` or `[auto]` serve what XLA can't compile")
