"""Frozen graphs in OpenVINO: converted once for each size of images, compiled for each batch size, for a CPU.

A compiled model has a stream, which is a thread or several, for each lane, and each call a request of its own. It runs
on whichever stream is free: on the thread that calls, OpenVINO would choose the stream by counting threads, and two
lanes could share one for good.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from xlaserve.config import Precision
from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import ModelFailed, cause, telling_line

TYPES: Final = {Precision.FLOAT32: "f32", Precision.BFLOAT16: "bf16", Precision.FLOAT16: "f16"}
"""What OpenVINO calls them."""
NOT_INSTALLED: Final = "mode openvino needs openvino; install xlaserve[openvino]"
_UNKNOWN: Final = re.compile(r"(?:No conversion rule found for operations|Conversion is failed for): *([^\n]+)")
"""How OpenVINO lists operations that it does not know, and those that it knows otherwise than they are here."""
_PLACES: Final = re.compile(r"^(?:Exception from |Check '.*' failed at |FrontEnd API failed with ).*\n?", re.MULTILINE)
"""How lines of OpenVINO's messages begin that say where in its code, and not what."""


@dataclass(frozen=True, slots=True)
class Threads:
    """What OpenVINO may use of the processor."""

    lanes: int
    total: int
    """Threads of all lanes together."""


class UntranslatableError(ModelFailed):
    """A graph holds `operations` that OpenVINO does not know, or not as they are in it, separated by commas."""

    def __init__(self, operations: str) -> None:
        super().__init__(f"OpenVINO has no translation of {operations}")
        self.operations = operations

    def __reduce__(self) -> tuple[type[UntranslatableError], tuple[str]]:
        return type(self), (self.operations,)


class Layer(NamedTuple):
    """What a part of a compiled model takes."""

    name: str
    operation: str
    kernel: str
    """What computes it, and in what: `brgconv_avx512_bf16`."""
    seconds: float


class ConvertedGraph:
    """A graph without variables, as OpenVINO reads it.

    `graph` is TensorFlow's, `outputs` are names of its tensors. Raises ModelFailed where OpenVINO is not installed, or
    can't convert an operation.
    """

    def __init__(self, graph: Any, outputs: Sequence[str]) -> None:
        # Not `convert_model`, which also sets the level of all loggers, for good where it fails.
        frontend = _openvino().frontend.FrontEndManager().load_by_framework("tf")
        from openvino.frontend.tensorflow.graph_iterator import GraphIteratorTFGraph  # noqa: PLC0415 - an extra

        nodes = GraphIteratorTFGraph(graph, share_weights=False)  # nothing else keeps it until it is converted
        try:
            read = frontend.load(nodes)
            read.override_all_outputs([read.get_place_by_tensor_name(name) for name in outputs])
            self._model = frontend.convert(read)
        except Exception as error:  # its kinds of error are not documented
            if found := _UNKNOWN.findall(str(error)):
                raise UntranslatableError(", ".join(names.strip().rstrip(".") for names in found)) from error
            raise ModelFailed(f"OpenVINO can't convert it: {_said(error)}") from error

    def compile(
        self, shape: tuple[int, ...], precision: Precision, threads: Threads, *, is_profiled: bool = False
    ) -> CompiledModel:
        """Compiles it for images of one shape; `is_profiled` has it note what each layer takes."""
        settings = {
            "INFERENCE_PRECISION_HINT": TYPES[precision],
            "PERFORMANCE_HINT": "LATENCY" if threads.lanes == 1 else "THROUGHPUT",
            "NUM_STREAMS": threads.lanes,
            "INFERENCE_NUM_THREADS": threads.total,
            # Several models and the server's own threads share the cores: the system knows which one is free.
            "ENABLE_CPU_PINNING": False,
            "PERF_COUNT": is_profiled,
        }
        try:
            model = self._model.clone()
            model.reshape(list(shape))
            began = time.perf_counter()
            compiled = _core().compile_model(model, "CPU", settings)
            return CompiledModel(compiled, time.perf_counter() - began)
        except RuntimeError as error:
            raise ModelFailed(f"OpenVINO can't compile it: {_said(error)}") from error


class CompiledModel:
    """Runs images of the shape that it was compiled for. Several threads may call it."""

    def __init__(self, compiled: Any, compile_s: float) -> None:
        self.compile_s = compile_s
        """What compiling took."""
        self._compiled = compiled
        self._idle: deque[Any] = deque()

    @property
    def precision(self) -> Precision:
        """What it computes in: float32 where the processor has nothing else that was asked for."""
        name = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return next(precision for precision, own in TYPES.items() if own == name)

    def __call__(self, images: Images) -> Outputs:
        """Runs `images`; blocks. What it returns owns its memory."""
        request = self._take()
        try:
            # Copied: a request that shared their memory would keep them, and the message that they came in, until it
            # runs again.
            request.get_input_tensor().data[:] = images
            request.start_async()
            request.wait()
            return tuple(np.array(tensor.data) for tensor in request.output_tensors)
        finally:
            self._idle.append(request)

    def layers(self, images: Images, runs: int) -> list[Layer]:
        """Runs `images` and returns what each layer took, of a model that was compiled to be profiled.

        Seconds are means of `runs` runs, which follow as many that are not counted, as the first ones are slower.
        """
        request = self._take()

        def means_s() -> list[float]:
            """Runs it, and returns the means since it was compiled, which are all that OpenVINO tells."""
            for _ in range(runs):
                request.infer([images], share_inputs=True, share_outputs=True)
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


def _said(error: Exception) -> str:
    return telling_line(_PLACES.sub("", str(error))) or cause(error)


def _openvino() -> Any:
    # It would load this where it is installed, which starts processes that send what is done to Intel and Google.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # as if it were not
    try:
        import openvino  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModelFailed(NOT_INSTALLED, lacks_mode=True) from error
    return openvino


def version() -> str:
    """Returns OpenVINO's version. Raises ModelFailed."""
    return str(_openvino().__version__)


@cache
def _core() -> Any:
    return _openvino().Core()
