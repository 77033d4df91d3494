"""Ready means compiled: no later request moves our count of compilations, or XLA's own."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from scripts.digits_data import digit_images
from tests.integration.conftest import COMPILES, StartServer

from xlaserve.programs.watch.compile_watch import KNOWN
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc
from xlaserve_proto import vision_pb2 as vision_pb
from xlaserve_proto import vision_pb2_grpc as vision_grpc

MODES = ("xla", "graph", "eager", "autocluster")
BUCKETS = (1, 2, 4, 8)
SIDE = 32
REQUESTS = 600
IN_FLIGHT = (1, 8, 24)
SEED = 20_260
PATIENCE_S = 120
PIXELS = {"UINT8": "u1", "INT32": "<i4", "FP32": "<f4"}
TOLERANCE = 1e-5
"""Tolerance of probabilities: a batch's bucket and mode may change the order in which floats are added."""


def xla_flags(folder: Path) -> dict[str, str]:
    return {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}


def xla_compilations(folder: Path) -> int:
    """Returns how many programs XLA itself says that it has compiled, except the one that the watch is tried with."""
    return sum(KNOWN.function not in file.name for file in folder.glob("*.before_optimizations.txt"))


class Scans:
    """Held-out scans, both encoded and as the pixels that the server makes of them."""

    def __init__(self) -> None:
        self.encoded = [scan.png for scan in digit_images("held_out", side=SIDE)[:50]]
        self.pixels = np.stack([np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in self.encoded])

    def request(self, chosen: list[int], datatype: str, mode: str) -> pb.ModelInferRequest:
        """Asks for the scans `chosen`: encoded ones where `datatype` is BYTES, else pixels."""
        request = pb.ModelInferRequest(model_name="digits")
        request.parameters["mode"].string_param = mode
        if datatype == "BYTES":
            tensor = request.inputs.add(name="image", datatype=datatype, shape=[len(chosen)])
            tensor.contents.bytes_contents.extend(self.encoded[index] for index in chosen)
        else:
            request.inputs.add(name="pixels", datatype=datatype, shape=[len(chosen), SIDE, SIDE, 3])
            request.raw_input_contents.append(self.pixels[chosen].astype(PIXELS[datatype]).tobytes())
        return request


def traffic() -> Iterator[tuple[list[int], str, str, int]]:
    """Gives for each request its scans, datatype and mode, and how many requests may be under way with it."""
    rng = random.Random(SEED)
    for number in range(REQUESTS):
        if number % 50 == 0:
            window = rng.choice(IN_FLIGHT)
        chosen = rng.choices(range(50), k=rng.randint(1, 3 * BUCKETS[-1]))
        (mode,) = rng.choices(MODES, weights=(3, 3, 1, 3))  # eager is slow
        yield chosen, rng.choice(["BYTES", "BYTES", *PIXELS]), mode, window


def scores(response: pb.ModelInferResponse) -> np.ndarray:
    (tensor,) = response.outputs
    if response.raw_output_contents:
        return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(tensor.shape)
    return np.array(tensor.contents.fp32_contents, np.float32).reshape(tensor.shape)


def test_nothing_is_compiled_once_the_server_is_ready(start_server: StartServer, tmp_path: Path) -> None:
    model = {"name": "digits", "source": "builtin:digits", "modes": MODES, "buckets": BUCKETS}
    server = start_server({"models": [model], **COMPILES}, env=xla_flags(tmp_path))
    programs = 3 * len(BUCKETS)
    assert server.metric("xlaserve_compilations_total") == programs, "eager mode compiles nothing"
    by_xla = 2 * len(BUCKETS)
    assert xla_compilations(tmp_path) == by_xla, "graph and eager mode have no part in XLA, a bucket is one cluster"

    scans = Scans()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        expected = scores(stub.ModelInfer(scans.request(list(range(50)), "UINT8", "xla"), timeout=PATIENCE_S))
        under_way: deque[tuple[Any, list[int]]] = deque()

        def finish() -> None:
            call, chosen = under_way.popleft()
            answer = scores(call.result(timeout=PATIENCE_S))
            np.testing.assert_allclose(answer, expected[chosen], rtol=0, atol=TOLERANCE)

        for chosen, datatype, mode, window in traffic():
            call = stub.ModelInfer.future(scans.request(chosen, datatype, mode), timeout=PATIENCE_S)
            under_way.append((call, chosen))
            while len(under_way) >= window:
                finish()
        while under_way:
            finish()

        assert server.metric("xlaserve_requests_total", status="OK") == REQUESTS + 1
        assert server.metric("xlaserve_padded_rows_total") > 0
        ran = [
            server.metric("xlaserve_bucket_batches_total", mode=mode, bucket=f"{batch}x{SIDE}x{SIDE}")
            for mode in MODES
            for batch in BUCKETS
        ]
        assert sum(batches > 0 for batches in ran) > len(MODES), "traffic that exercises one bucket proves little"
        assert server.metric("xlaserve_compilations_total") == programs
        assert xla_compilations(tmp_path) == by_xla

        # Both counts do move when something is compiled.
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="digits"), timeout=PATIENCE_S)
        assert server.metric("xlaserve_compilations_total") == 2 * programs
        assert xla_compilations(tmp_path) == 2 * by_xla


CLUSTERED = """
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Bucket, Mode
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram


def forward(pixels):
    values = tf.cast(pixels, tf.float32)
    return (tf.reduce_sum(tf.sin(values) * tf.cos(values) + 1, axis=(1, 2)),)


def count():
    return len(list(Path(sys.argv[1]).glob("*.before_optimizations.txt")))


program = TensorFlowProgram(forward)
buckets = [Bucket(batch, 4, 4) for batch in range(1, 14)]
graphs = [program.compile(Mode.GRAPH, bucket).executable for bucket in buckets]
print(count())
clustered = [program.compile(Mode.AUTOCLUSTER, bucket).executable for bucket in buckets]
print(count())
for bucket, graph, cluster in zip(buckets, graphs, clustered):
    pixels = np.full((*bucket, 3), bucket.batch, np.uint8)
    for _ in range(5):
        np.testing.assert_allclose(graph(pixels)[0], cluster(pixels)[0], rtol=1e-5)
print(count())
"""


def test_every_bucket_of_a_clustered_graph_is_compiled_ahead(tmp_path: Path) -> None:
    flags = {"TF_XLA_FLAGS": "--tf_xla_cpu_global_jit", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", CLUSTERED, str(tmp_path)]
    env = {**os.environ, **xla_flags(tmp_path), **flags}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["0", "13", "13"]


UNBUCKETED = """
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

double = tf.function(lambda pixels: 2 * pixels, jit_compile=True)
for batch in (1, 1, 2, 1, 3):
    double(np.zeros((batch, 4), np.float32))
    print(len(list(Path(sys.argv[1]).glob("*.before_optimizations.txt"))))
"""


@pytest.mark.slow
def test_the_dump_sees_each_new_shape_of_a_function_without_buckets(tmp_path: Path) -> None:
    env = {**os.environ, **xla_flags(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", UNBUCKETED, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["1", "1", "2", "2", "3"]


RECOMPILING = """
import os
from pathlib import Path

from xlaserve.models import catalog

cause = Path(os.environ["CAUSE"])
load = catalog.load

def load_and_prepare(settings):
    model = load(settings)

    # Not before the server has: it has to listen to TensorFlow from the start.
    import tensorflow as tf
    from xlaserve.engine.program import FixedShape

    call = FixedShape.__call__
    resize = tf.function(lambda pixels, size: tf.image.resize(pixels, size), jit_compile=True)

    def call_and_compile(self, images):
        if cause.exists():
            what = cause.read_text()
            cause.unlink()
            if what == "shape":
                # A concrete function takes a tensor of any shape; what guards it is gone around.
                self.run.function(tf.zeros((3, *images.shape[1:]), tf.uint8))
            else:
                resize(tf.zeros((1, 4, 4, 3)), tf.constant([9, 7]))
        return call(self, images)

    FixedShape.__call__ = call_and_compile
    return model

catalog.load = load_and_prepare
"""


def test_compilations_while_serving_are_counted_and_logged_with_a_cause(
    start_server: StartServer, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECOMPILING)
    cause = tmp_path / "cause"
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "CAUSE": str(cause)}
    model = {"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1, 2]}
    server = start_server({"models": [model], "log_format": "json", **COMPILES}, env=env)

    def have_compiled(phase: str, count: int) -> bool:
        return server.metric("xlaserve_xla_compilations_total", phase=phase) == count

    server.wait_for(lambda: have_compiled("expected", 2), "XLA's own count is not that of the programs")
    assert server.metric("xlaserve_compile_watch") == 1
    scans = Scans()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        for count, what in enumerate(("shape", "constant"), 1):
            draft = cause.with_suffix(".draft")
            draft.write_text(what)
            draft.replace(cause)
            stub.ModelInfer(scans.request([0], "UINT8", "xla"), timeout=PATIENCE_S)
            server.wait_for(partial(have_compiled, "serving", count), f"no compilation by another {what}")

        unexpected = vision_grpc.VisionStub(channel).ListModels(vision_pb.ListModelsRequest()).unexpected_compilations
        assert [each.result for each in unexpected] == ["f32[3,10]", "f32[1,9,7,3]"]
        assert list(unexpected[1].constants) == ["size = 9 7 (needed by resize/ResizeBilinear)"]
        assert abs(unexpected[0].ended_at.ToMicroseconds() / 1e6 - time.time()) < PATIENCE_S

        # What is loaded later is expected.
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="digits"), timeout=PATIENCE_S)
        server.wait_for(lambda: have_compiled("expected", 4), "a load was not counted")
        assert have_compiled("serving", 2)

    errors = [line for line in map(json.loads, server.stderr.splitlines()) if line["level"] == "error"]
    assert len(errors) == 2
    by_shape, by_constant = errors
    assert by_shape["arguments"][0] == f"u8[3,{SIDE},{SIDE},3]"
    assert by_constant["message"].startswith("XLA compiled while serving, for ")
    assert by_constant["result"] == "f32[1,9,7,3]"
    assert by_constant["constants"] == ["size = 9 7 (needed by resize/ResizeBilinear)"]


SILENCED = """
from xlaserve.programs.watch import stderr_tap

stderr_tap.VMODULE = "some_other_file=1"
"""


def test_a_server_that_is_not_told_what_xla_compiles_says_that_it_is_blind(
    start_server: StartServer, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SILENCED)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    model = {"name": "digits", "source": "builtin:digits", "modes": ["graph"], "buckets": [1]}
    server = start_server({"models": [model]}, env=env)
    assert "WARN  XLA's events are not understood" in server.stderr
    assert "xlaserve_compile_watch 0.0" in server.scrape()
