"""Frozen graphs in OpenVINO: converted once for each size of images, compiled for each batch size, for a CPU.

A compiled model has a stream, which is a thread or several, for each lane, and each call a request of its own. It runs
on whichever stream is free: on the thread that calls, OpenVINO would choose the stream by counting threads, and two
lanes could share one for good.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Precision
from xlaserve.engine.causes import cause, telling_line
from xlaserve.engine.program import Outputs
from xlaserve.errors import ModelFailed

T = TypeVar("T")

TYPES: Final = {Precision.FLOAT32: "f32", Precision.BFLOAT16: "bf16", Precision.FLOAT16: "f16"}
"""OpenVINO's names of precisions. A model in int8 is another model, whose other layers compute in float32."""
NOT_INSTALLED: Final = "mode openvino needs openvino; install xlaserve[openvino]"
_UNKNOWN: Final = re.compile(r"(?:No conversion rule found for operations|Conversion is failed for): *([^\n]+)")
"""OpenVINO's messages that list operations without a translation, or with one that fails."""
_PLACES: Final = re.compile(r"^(?:Exception from |Check '.*' failed at |FrontEnd API failed with ).*\n?", re.MULTILINE)
"""Beginning of lines in OpenVINO's messages that name a place in its code, and not the cause."""
_BODIES: Final[Mapping[str, Sequence[tuple[int, ...]]]] = {"If": ((0,), (1,)), "Loop": ((),), "TensorIterator": ((),)}
"""Operations that run other graphs, and OpenVINO's arguments that name each of these graphs."""

Buffer = bytes | memoryview
Shapes = Sequence[tuple[int, ...]]
"""The whole shape of each input."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads that OpenVINO may use."""

    lanes: int
    total: int
    """Threads of all lanes together."""


class UntranslatableGraphError(ModelFailed):
    """A graph holds `operations` that OpenVINO does not know, or not as they are in it, separated by commas."""

    def __init__(self, operations: str) -> None:
        super().__init__(f"OpenVINO has no translation of {operations}")
        self.operations = operations

    def __reduce__(self) -> tuple[type[UntranslatableGraphError], tuple[str]]:
        return type(self), (self.operations,)


class Layer(NamedTuple):
    """The mean time of one layer of a compiled model."""

    name: str
    operation: str
    kernel: str
    """OpenVINO's kernel and its precision: `brgconv_avx512_bf16`."""
    seconds: float


def convert(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> ConvertedGraph:
    """Converts a graph of TensorFlow's without variables; `inputs` and `outputs` are names of its tensors.

    Raises ModelFailed where OpenVINO is not installed, or can't convert an operation.
    """
    # Not `convert_model`, which also sets the level of all loggers, for good where it fails.
    frontend = load().frontend.FrontEndManager().load_by_framework("tf")
    from openvino.frontend.tensorflow.graph_iterator import GraphIteratorTFGraph  # noqa: PLC0415 - an extra

    nodes = GraphIteratorTFGraph(graph, share_weights=False)  # nothing else keeps it until it is converted
    try:
        read = frontend.load(nodes)
        if len(inputs) > 1:  # it has an order of its own
            read.override_all_inputs([read.get_place_by_tensor_name(name) for name in inputs])
        read.override_all_outputs([read.get_place_by_tensor_name(name) for name in outputs])
        model = frontend.convert(read)
    except Exception as error:  # its kinds of error are not documented
        if found := _UNKNOWN.findall(str(error)):
            raise UntranslatableGraphError(", ".join(names.strip().rstrip(".") for names in found)) from error
        raise ModelFailed(f"OpenVINO can't convert it: {_said(error)}") from error
    _replace_batched_gathers(model)
    return ConvertedGraph(model)


class ConvertedGraph:
    """A graph of OpenVINO's, for any batch size: `model` is OpenVINO's, in int8 where `is_int8`."""

    def __init__(self, model: Any, *, is_int8: bool = False) -> None:
        self.model = model
        self.is_int8 = is_int8

    @classmethod
    def from_bytes(cls, operations: Buffer, weights: Buffer, *, is_int8: bool = False) -> ConvertedGraph:
        """Returns the graph that `to_bytes` has written. Raises OpenVINO's errors, and ModelFailed without OpenVINO."""
        # From memory: what is mapped would change with the files, under requests. And from OpenVINO's own, or it would
        # copy the weights while it holds the interpreter's lock.
        own = load().Tensor(load().Type.u8, load().Shape([len(weights)]))
        own.data[:] = np.frombuffer(weights, np.uint8)
        return cls(core().read_model(str(operations, "utf-8", "replace"), own), is_int8=is_int8)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Returns the graph as OpenVINO saves it: its operations, as XML, and its weights. Raises OSError."""
        with tempfile.TemporaryDirectory() as folder:  # OpenVINO writes files alone
            file = Path(folder) / "model.xml"
            try:
                load().save_model(self.model, file, compress_to_fp16=False)
            except RuntimeError as error:  # "iostream error", without a place or a reason
                reason = "OpenVINO can't write it into the folder for temporary files (TMPDIR)"
                raise OSError(f"{reason}: {_said(error)}") from error
            return file.read_bytes(), file.with_suffix(".bin").read_bytes()

    @property
    def digest(self) -> str:
        """A hash of the computation, weights included, without names: those differ from process to process."""
        return _digest(self.model).hex()

    def compile(
        self, shapes: Shapes, precision: Precision, threads: Threads, *, is_profiled: bool = False
    ) -> CompiledModel:
        """Compiles it for inputs of these shapes; with `is_profiled` it measures the time of each layer."""
        settings = {
            "INFERENCE_PRECISION_HINT": TYPES[Precision.FLOAT32 if self.is_int8 else precision],
            "PERFORMANCE_HINT": "LATENCY" if threads.lanes == 1 else "THROUGHPUT",
            "NUM_STREAMS": threads.lanes,
            "INFERENCE_NUM_THREADS": threads.total,
            # Several models and the server's own threads share the cores: the system knows which one is free.
            "ENABLE_CPU_PINNING": False,
            "PERF_COUNT": is_profiled,
        }
        try:
            model = self.model.clone()
            model.reshape({index: list(shape) for index, shape in enumerate(shapes)})
            began = time.perf_counter()
            compiled = at_full_priority(lambda: core().compile_model(model, "CPU", settings))
            return CompiledModel(compiled, time.perf_counter() - began, Precision.INT8 if self.is_int8 else precision)
        except RuntimeError as error:
            raise ModelFailed(f"OpenVINO can't compile it: {_said(error)}") from error


class CompiledModel:
    """Runs rows of the shapes that it was compiled for. Several threads may call it."""

    def __init__(self, compiled: Any, compile_s: float, wanted: Precision) -> None:
        self.compile_s = compile_s
        """Seconds that compiling took."""
        self._wanted = wanted
        self._compiled = compiled
        self._idle: deque[Any] = deque()

    @property
    def precision(self) -> Precision:
        """The precision of its computation: float32 where the processor lacks the one that was wanted."""
        if self._wanted is Precision.INT8:
            return Precision.INT8  # in instructions for float32 at worst
        name = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return next(precision for precision, own in TYPES.items() if own == name)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings to users about its precision."""
        precision = self.precision
        if precision is self._wanted:
            return ()
        return (f"mode openvino computes in {precision}: this processor has no {self._wanted}",)

    def __call__(self, *rows: NDArray[Any]) -> Outputs:
        """Runs `rows`; blocks. The outputs own their memory."""
        request = self._take()
        try:
            # Copied: a request that shared their memory would keep them, and the message that they came in, until it
            # runs again.
            for tensor, each in zip(request.input_tensors, rows, strict=True):
                tensor.data[:] = each
            request.start_async()
            request.wait()
            return tuple(np.array(tensor.data) for tensor in request.output_tensors)
        finally:
            self._idle.append(request)

    def layers(self, rows: Sequence[NDArray[Any]], runs: int) -> list[Layer]:
        """Runs `rows` and returns the time of each layer, of a model that was compiled to be profiled.

        Seconds are means of `runs` runs, which follow as many that are not counted, as the first ones are slower.
        """
        request = self._take()

        def means_s() -> list[float]:
            """Runs it, and returns the means since it was compiled, which are all that OpenVINO tells."""
            for _ in range(runs):
                request.infer([*rows], share_inputs=True, share_outputs=True)
            return [info.real_time.total_seconds() for info in request.get_profiling_info()]

        # The mean of a second half is twice that of all less that of the first half.
        took_s = [max(0.0, 2 * both - first) for first, both in zip(means_s(), means_s(), strict=True)]
        return [
            Layer(info.node_name, info.node_type, info.exec_type, mean_s)
            for info, mean_s in zip(request.get_profiling_info(), took_s, strict=True)
            if mean_s
        ]

    def _take(self) -> Any:
        try:
            return self._idle.pop()  # the last one used: what it wrote may still be in the processor's caches
        except IndexError:
            return self._compiled.create_infer_request()


def _digest(graph: Any) -> bytes:
    seen: dict[Any, bytes] = {}
    places = {parameter.get_name(): place for place, parameter in enumerate(graph.get_parameters())}
    for operation in graph.get_ordered_ops():
        # Inputs come first, so that a result's hash is that of all that leads to it.
        inputs = [_source(one) for one in operation.inputs()]
        facts = (
            operation.get_type_name(),
            sorted((name, str(value)) for name, value in operation.get_attributes().items()),
            [(str(output.get_element_type()), str(output.get_partial_shape())) for output in operation.outputs()],
            [(seen[name].hex(), index) for name, index in inputs],
            places.get(operation.get_name()),
            [(_digest(body.graph).hex(), body.wiring) for body in _bodies(operation)],
        )
        sha256 = hashlib.sha256(repr(facts).encode())
        if operation.get_type_name() == "Constant":
            sha256.update(np.ascontiguousarray(operation.data).reshape(-1).view(np.uint8).data)
        seen[operation.get_name()] = sha256.digest()
    return hashlib.sha256(b"".join(seen[result.get_name()] for result in graph.get_results())).digest()


class _Body(NamedTuple):
    """A graph that an operation runs, as a loop does."""

    graph: Any
    wiring: list[object]
    """The connections between its inputs and outputs and those of the operation, as plain data."""


def _bodies(operation: Any) -> list[_Body]:
    kind = operation.get_type_name()
    special = operation.get_special_body_ports() if kind == "Loop" else []
    bodies = []
    for index in _BODIES.get(kind, ()):
        described = *operation.get_input_descriptions(*index), *operation.get_output_descriptions(*index)
        bodies.append(_Body(operation.get_function(*index), [special, *map(_numbers, described)]))
    return bodies


def _numbers(description: Any) -> tuple[str, list[tuple[str, int]]]:
    """Returns how OpenVINO describes a connection of a body: its kind and its fields."""
    fields = [(name, getattr(description, name)) for name in dir(description)]
    return type(description).__name__, [(name, value) for name, value in fields if isinstance(value, int)]


def _replace_batched_gathers(graph: Any) -> None:
    """Has GatherND compute what Gather does within each image of a batch.

    2026.4.1 ends the process by SIGSEGV where it runs such a Gather on a batch of one.
    """
    from openvino import opset13, utils  # noqa: PLC0415 - an extra

    for operation in graph.get_ordered_ops():
        for body in _bodies(operation):
            _replace_batched_gathers(body.graph)
        if operation.get_type_name() != "Gather" or not (batch_dims := operation.get_attributes()["batch_dims"]):
            continue
        values, places, axis = (one.get_source_output() for one in operation.inputs())
        if int(axis.get_node().data) != batch_dims:
            raise ModelFailed("OpenVINO may crash on how it gathers: expected axis and batch_dims to be the same")
        indices = opset13.unsqueeze(places, opset13.constant(-1))
        utils.replace_node(operation, opset13.gather_nd(values, indices, batch_dims))


def _said(error: Exception) -> str:
    return telling_line(_PLACES.sub("", str(error))) or cause(error)


def _source(value: Any) -> tuple[str, int]:
    """Returns which operation an input's value comes from, by its unique name, and which of its outputs it is."""
    output = value.get_source_output()
    return output.get_node().get_name(), output.get_index()


def load() -> Any:
    """Imports OpenVINO, and makes sure that its telemetry is never imported.

    Raises ModelFailed.
    """
    # OpenVINO would import this where it is installed: it starts processes that send usage data to Intel and Google.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # as if it were not
    try:
        import openvino  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModelFailed(NOT_INSTALLED, lacks_mode=True) from error
    return openvino


def fold_constants(model: Any) -> None:
    """Computes what does not depend on inputs, such as the axes that a global pooling of ONNX takes from a shape."""
    from openvino.passes import ConstantFolding, Manager  # noqa: PLC0415 - an extra

    manager = Manager()
    manager.register_pass(ConstantFolding())
    manager.run_passes(model)


def version() -> str:
    """Returns OpenVINO's version. Raises ModelFailed."""
    return str(load().__version__)


def at_full_priority(work: Callable[[], T]) -> T:
    """Runs `work` on a thread that does not yield to the traffic; returns its result, and raises its errors.

    For compiling in OpenVINO, as the threads that will run the model keep the priority of the compiling thread; and for
    converting, as OpenVINO holds the interpreter's lock all the while, and the event loop waits for it.
    """
    return _own_thread().submit(work).result()


@cache
def _own_thread() -> Executor:
    """Returns a thread with the priority of its first caller: the load of a model, as no thread yields before."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="openvino")
    pool.submit(int).result()  # starts the thread
    return pool


@cache
def core() -> Any:
    """Returns OpenVINO's core, which reads and compiles models. Raises ModelFailed."""
    return load().Core()
