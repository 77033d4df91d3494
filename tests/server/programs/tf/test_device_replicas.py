from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from xlaserve.config import Bucket, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import AnySize, Compilation, Executable, Outputs
from xlaserve.programs.tf.device_replicas import Replicas, ReplicatedProgram

TWO = ("/CPU:0", "/CPU:0")
"""One device in two parts: whose turn it is does not depend on what they are."""


def test_a_batch_runs_on_the_device_that_runs_the_fewest() -> None:
    replicas = Replicas(TWO)
    with replicas.take() as first:
        with replicas.take() as second:
            assert (first, second) == (0, 1)
        with replicas.take() as third:
            assert third == 1


def test_a_device_is_given_back_by_a_batch_that_raises() -> None:
    replicas = Replicas(TWO)
    with pytest.raises(ZeroDivisionError), replicas.take():
        raise ZeroDivisionError
    with replicas.take() as index:
        assert index == 0


def test_no_device_ever_runs_more_than_its_lanes() -> None:
    devices, lanes = 3, 2
    replicas = Replicas(["/CPU:0"] * devices)
    places = threading.Semaphore(devices * lanes)  # as the worker has them
    lock = threading.Lock()
    running: Counter[int] = Counter()
    most: Counter[int] = Counter()
    together = threading.Barrier(devices * lanes, timeout=30)

    def batch(number: int) -> None:
        with places, replicas.take() as index:
            with lock:
                running[index] += 1
                most[index] = max(most[index], running[index])
            if number < devices * lanes:
                together.wait()  # all lanes at once
            with lock:
                running[index] -= 1

    with ThreadPoolExecutor(devices * lanes) as pool:
        list(pool.map(batch, range(300)))
    assert most == Counter({0: lanes, 1: lanes, 2: lanes})


class Numbered:
    """A program that answers with its number."""

    platform = "numpy"

    def __init__(self, number: int) -> None:
        self.number = number
        self.compiled: list[tuple[Mode, Bucket]] = []

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        def executable(images: Images) -> Outputs:
            return (np.full(len(images), self.number, np.float32),)

        self.compiled.append((mode, bucket))
        return Compilation(executable, trace_s=1.0, compile_s=2.0)

    def any_size(self) -> Executable:
        return self.compile(Mode.GRAPH, Bucket(1, 1, 1)).executable


def test_every_device_has_its_own_program_and_the_seconds_are_added_up() -> None:
    programs, replicas, bucket = [Numbered(0), Numbered(1)], Replicas(TWO), Bucket(2, 4, 4)
    compilation = ReplicatedProgram(programs, replicas).compile(Mode.XLA, bucket)
    assert [program.compiled for program in programs] == [[(Mode.XLA, bucket)]] * 2
    assert (compilation.trace_s, compilation.compile_s) == (2.0, 4.0)
    images = np.zeros((*bucket, 3), np.uint8)
    assert compilation.executable(images)[0].tolist() == [0, 0]
    with replicas.take():
        assert compilation.executable(images)[0].tolist() == [1, 1]


def test_sizes_without_buckets_run_on_every_device_too() -> None:
    replicas = Replicas(TWO)
    program = ReplicatedProgram([Numbered(0), Numbered(1)], replicas)
    assert isinstance(program, AnySize)
    executable, images = program.any_size(), np.zeros((3, 5, 7, 3), np.uint8)
    assert executable(images)[0].tolist() == [0, 0, 0]
    with replicas.take():
        assert executable(images)[0].tolist() == [1, 1, 1]


SERVER_ON_TWO_DEVICES = """
import asyncio, collections
import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

from xlaserve.processes import engine
from xlaserve.config import Mode, ModelSettings, Settings
from xlaserve.engine.request import EngineRequest
from xlaserve.programs.tf import device_replicas as replicas
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.frozen_graph import FrozenGraph
from xlaserve.telemetry.metrics import Metrics
from xlaserve.models.sources import digits

DEVICES = ("/CPU:0", "/CPU:1")
Device.replicas = DEVICES
engine.configure = lambda settings, uses_tensorflow: Device("gpu", "half a CPU", 2, 1, (0, 1))

built = []
load = digits.load
digits.load = lambda: built.append(load()) or built[-1]

frozen = []
start = FrozenGraph.__init__
FrozenGraph.__init__ = lambda self, graph: frozen.append(self) or start(self, graph)

ran = collections.Counter()
on = replicas.Replicas.on
def counted(self, index):
    ran[index] += 1
    return on(self, index)
replicas.Replicas.on = counted

MODES = (Mode.XLA, Mode.GRAPH, Mode.EAGER)
settings = Settings(models=(ModelSettings(name="digits", source="builtin:digits", modes=MODES, buckets=(1, 2)),))

async def main():
    server = engine.Engine(settings, Metrics())
    await server.repository.load_all()
    batcher = server.repository.find("digits").batcher
    assert batcher is not None
    on_devices = [{variable.value.device[-5:] for variable in model.weights} for model in built]
    assert on_devices == [{"CPU:0"}, {"CPU:1"}], on_devices
    in_graphs = [{operation.device[-5:] for operation in graph._session.graph.get_operations()} for graph in frozen]
    assert in_graphs == [{"CPU:0"}, {"CPU:1"}], in_graphs
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    ran.clear()
    answers = {}
    for mode in MODES:
        batcher.admission.admit(40, pixels.nbytes)
        jobs = [batcher.run(EngineRequest((pixels[n : n + 1],), mode, float("inf"))) for n in range(40)]
        answers[mode] = np.concatenate([result.batches[0].outputs[0] for result in await asyncio.gather(*jobs)])
        batcher.admission.leave(40, pixels.nbytes)
    expected = built[0].predict_on_batch(pixels.astype(np.float32))
    for mode, scores in answers.items():
        np.testing.assert_allclose(scores, expected, atol=1e-5, err_msg=mode)
    assert ran[0] and ran[1], ran
    await server.repository.drain(timeout_s=5)

asyncio.run(main())
print("served on both")
"""


def test_a_server_has_a_replica_of_model_and_weights_on_each_device() -> None:
    # TensorFlow's devices are fixed once a process has used it; the CPU stands in for two GPUs.
    done = subprocess.run(
        [sys.executable, "-c", SERVER_ON_TWO_DEVICES], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.endswith("served on both\n"), done.stderr[-4000:]
