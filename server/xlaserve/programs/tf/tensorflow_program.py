"""TensorFlow models as executables: one function, traced and compiled once, for each mode and bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final, assert_never

import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import func_graph

from xlaserve.config import Bucket, Mode, Precision
from xlaserve.engine.causes import cause
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, shapes, zeros
from xlaserve.engine.program import Compilation, Executable, FixedShape, Outputs
from xlaserve.errors import ModelFailed, OutOfDeviceMemory
from xlaserve.programs.openvino.calibration import CalibrationFolder
from xlaserve.programs.openvino.openvino_program import CompiledModel, ConvertedGraph
from xlaserve.programs.tf.definitions import has_narrow
from xlaserve.programs.tf.first_run import run_first
from xlaserve.programs.tf.frozen_graph import (
    CLUSTER_RUNS,
    MAX_CLUSTERED,
    FrozenFunction,
    FrozenGraph,
    UnfreezableError,
    assigns_variables,
    freeze,
    has_xla,
)
from xlaserve.programs.tf.function import Function, concrete, specs
from xlaserve.programs.tf.lowered_function import Forward, Lower, Lowered
from xlaserve.programs.tf.openvino_graph import check_openvino, converted, in_openvino

ASSIGNS_VARIABLES: Final = (
    "it assigns variables as it runs: its answers may depend on all that it ran before, other clients' requests, "
    "padding and warm-up among them"
)
NOT_WITHOUT_XLA: Final = "unmatched: expected reject, as XLA would compile the model for each size, got background"
_SizeInMode = tuple[Mode, int, int]
"""A mode, and the height and width of images."""


class TensorFlowProgram:
    """A `Program` whose computation is `forward`, preprocessing included, of `inputs`.

    XLA runs what `lower` makes of it once it is traced; OpenVINO computes in `openvino_precision`, in int8 as
    `calibration` has it.
    """

    platform = "tensorflow"

    def __init__(
        self,
        forward: Forward,
        lower: Lower | None = None,
        openvino_precision: Precision = Precision.FLOAT32,
        calibration: CalibrationFolder | None = None,
        *,
        inputs: Inputs = RGB_IMAGE,
    ) -> None:
        self.inputs = inputs
        self._forward = forward
        self._lower = lower
        self._openvino_precision = openvino_precision
        self._calibration = calibration
        self._any_batch: dict[tuple[int, int], Forward] = {}
        self._lowered: dict[tuple[int, int], Lowered] = {}
        self._unlowered: dict[tuple[int, int], str] = {}
        self._tracing = threading.Lock()
        self._graphs: dict[_SizeInMode, Executable] = {}
        self._unfreezable: dict[_SizeInMode, str] = {}
        self._clustered: dict[_SizeInMode, list[FrozenGraph]] = {}
        self._converted: dict[tuple[int, int], ConvertedGraph] = {}
        self._compiled: list[Function] = []
        self._variables: list[tf.Variable] = []
        self.assigns_variables = False
        """Whether a traced function changes variables as it runs."""
        self.bare: Forward | None = None
        """The computation without preprocessing, of float32 `[n, height, width, channels]`; None where it is sealed."""

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Makes the executable for `mode` and `bucket` and runs it. Raises what TensorFlow raises.

        Where XLA fails with lowerings, it is made once more without.
        """
        make = partial(self.compile_once, mode, bucket)
        return self.with_fallback(bucket, make) if mode is Mode.XLA else make()

    def with_fallback(self, bucket: Bucket, make: Callable[[], Compilation]) -> Compilation:
        """Returns the compilation that `make` makes for XLA; where that fails with lowerings, makes one without them.

        The compilation's `unlowered` makes one without lowerings for a program that answers wrong. Images of the
        bucket's size are not lowered from then on.
        """
        was_lowered = self.unlowered(bucket) is None
        try:
            compilation = make()
        except OutOfDeviceMemory:
            raise
        except Exception as error:
            if not (was_lowered and self._gives_up_lowerings(bucket, error)):
                raise
            return make()

        def without_lowerings(error: Exception) -> Compilation:
            self._gives_up_lowerings(bucket, error)
            return make()

        has_lowerings = was_lowered and self._replaced(bucket) is not None
        return replace(compilation, unlowered=without_lowerings) if has_lowerings else compilation

    def _gives_up_lowerings(self, bucket: Bucket, error: Exception) -> bool:
        """Has XLA run images of the bucket's size without lowerings; returns whether there were any."""
        lowered = self._replaced(bucket)
        if lowered is None:
            return False
        if lowered.failed is None:  # else another thread has given them up
            size = f"{bucket.height}x{bucket.width}"
            reason = f"a program failed with {lowered.blamed(error)}: {cause(error)}"
            self.leave_unlowered(bucket, f"XLA runs {size} without lowerings, as {reason}")
        return True

    def _replaced(self, bucket: Bucket) -> Lowered | None:
        """Returns the function that XLA runs where that has lowerings or they have failed; None where none apply."""
        lowered = self.lowered(Mode.XLA, bucket)
        applies_none = lowered.failed is None and lowered.forward is self._any_batch[bucket.height, bucket.width]
        return None if applies_none else lowered

    def leave_unlowered(self, bucket: Bucket, reason: str) -> None:
        """Has XLA run images of the bucket's size without lowerings from now on; `warnings` gives the first reason."""
        size = (bucket.height, bucket.width)
        with self._tracing:
            self._unlowered.setdefault(size, reason)
            self._lowered.pop(size, None)

    def unlowered(self, bucket: Bucket) -> str | None:
        """Returns why images of the bucket's size are not lowered, where that has failed."""
        return self._unlowered.get((bucket.height, bucket.width))

    def compile_once(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Makes the executable of the function that `trace` now returns. Raises TensorFlow's errors."""
        began = time.perf_counter()
        prepared = self._prepare(mode, bucket)
        if mode is Mode.EAGER:
            executable = FixedShape(prepared, bucket, self.inputs)
            executable(*zeros(self.inputs, bucket))
            return Compilation(executable, trace_s=0.0, compile_s=0.0, warnings=self._warnings(mode, bucket))
        runs = CLUSTER_RUNS if mode is Mode.AUTOCLUSTER else 1
        compilation = run_first(prepared, self.inputs, bucket, began, runs=runs)
        return replace(compilation, warnings=(*compilation.warnings, *self._warnings(mode, bucket)))

    def reference(self, *rows: NDArray[Any]) -> Outputs:
        """Runs `rows` operation by operation, without XLA and TensorFloat-32.

        Both are turned off meanwhile, by switches of the whole process.
        """
        had_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        were_eager = tf.config.functions_run_eagerly()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        # Keras gives XLA each convolution with groups, as a function of its own. What serves is traced already, and
        # does not ask.
        tf.config.run_functions_eagerly(True)
        try:
            return Function(self._forward)(*rows)
        finally:
            tf.config.run_functions_eagerly(were_eager)
            tf.config.experimental.enable_tensor_float_32_execution(had_tf32)

    def trace(self, mode: Mode, bucket: Bucket) -> Forward:
        """Returns the function that `mode` runs for `bucket`."""
        return self.lowered(mode, bucket).in_parts(bucket)

    def lowerings(self, bucket: Bucket) -> str:
        """Returns the lowerings for XLA, and how often each is applied: `depthwise 17`. Empty where there are none."""
        return self.lowered(Mode.XLA, bucket).text if self._lower is not None else ""

    def is_narrow(self, bucket: Bucket) -> bool:
        """Returns whether the model computes in bfloat16 or float16 anywhere, for images of the size of `bucket`."""
        with self._tracing:
            return has_narrow(self._traced(bucket.height, bucket.width))

    def lowered(self, mode: Mode, bucket: Bucket) -> Lowered:
        """Returns the function that `mode` now runs for the bucket's size: another thread may leave it unlowered."""
        size = (bucket.height, bucket.width)
        with self._tracing:
            traced = self._traced(*size)
            if mode is not Mode.XLA or self._lower is None:
                return Lowered(traced, "")
            if size not in self._lowered:
                failed = self._unlowered.get(size)
                self._lowered[size] = self._lower(traced) if failed is None else Lowered(traced, "", failed=failed)
            return self._lowered[size]

    def _traced(self, height: int, width: int) -> Forward:
        # Python walks the model once for all modes and batch sizes, which takes as long as compiling it; a bucket then
        # wraps the graph of that, and fixes its shape.
        if (height, width) not in self._any_batch:
            function = concrete(self._forward, specs(self.inputs, None, height, width), jit_compile=False)
            self._any_batch[height, width] = function
            self.assigns_variables |= assigns_variables(function)
        return self._any_batch[height, width]

    def any_size(self) -> Executable:
        """Makes what runs images of any size in graph mode, and compiles nothing.

        Its weights stay variables where nothing else keeps XLA out of it: it is for the time until buckets have
        compiled, and not worth a copy of them. Raises ModelFailed where nothing keeps XLA out of it.
        """
        function = concrete(self._forward, specs(self.inputs, None), jit_compile=False)
        if not has_xla(function):
            return Function(function)
        try:
            frozen = freeze(function)
        except UnfreezableError as error:
            raise ModelFailed(f"{NOT_WITHOUT_XLA}: {error}") from error
        if frozen.has_xla:
            raise ModelFailed(f"{NOT_WITHOUT_XLA}: it has operations of XLA's own")
        return FrozenGraph(frozen)

    def seal(self) -> None:
        """Drops the network and Python's half of its graphs. Keeps the variables, which functions only refer to."""
        functions = {*self._any_batch.values(), *(lowered.forward for lowered in self._lowered.values())}
        graphs = [function.graph for function in functions]  # type: ignore[attr-defined]
        self._variables += [variable for graph in graphs for variable in graph.variables]
        for function in self._compiled:
            function.release_graph()
        running = [each.function for each in self._graphs.values() if isinstance(each, Function)]
        for traced in functions:
            if traced not in running:
                func_graph.dismantle_func_graph(traced.graph)  # type: ignore[attr-defined]
        self._compiled.clear()
        self._converted.clear()
        self._any_batch.clear()
        self._lowered.clear()
        self._forward, self._lower, self.bare = _sealed, None, None

    def dismantle(self) -> None:
        """Undoes the cycles in Python's half of each graph, which are half of a model's; none can run any more."""
        self.seal()
        for executable in (*self._graphs.values(), *chain.from_iterable(self._clustered.values())):
            if isinstance(executable, FrozenGraph):
                executable.dismantle()

    def _prepare(self, mode: Mode, bucket: Bucket) -> Executable:
        """Returns the executable of a bucket, which XLA compiles, where it does, at the first run."""
        match mode:
            case Mode.XLA:
                return self._jit(mode, bucket)
            case Mode.GRAPH:
                return self._graph(mode, bucket)
            case Mode.AUTOCLUSTER:
                return self._clusters(mode, bucket)
            case Mode.OPENVINO:
                return self.in_openvino(bucket)
            case Mode.EAGER:
                return Function(self._forward)
            case Mode.AUTO:
                raise ValueError("mode: expected one that is compiled, got auto, which chooses among them")
            case _:
                assert_never(mode)

    def _warnings(self, mode: Mode, bucket: Bucket) -> tuple[str, ...]:
        warnings = []
        if self.assigns_variables:
            warnings.append(ASSIGNS_VARIABLES)
        if reason := self._unfreezable.get((mode, bucket.height, bucket.width)):
            warnings.append(f"graph mode runs slower than it could, with its weights as variables: {reason}")
        return tuple(warnings)

    def _jit(self, mode: Mode, bucket: Bucket) -> Executable:
        lowered = self.lowered(mode, bucket)
        function = concrete(lowered.in_parts(bucket), specs(self.inputs, *bucket), jit_compile=True)
        compiled = Function(function, lowered.warnings)
        self._compiled.append(compiled)
        return compiled

    def _graph(self, mode: Mode, bucket: Bucket) -> Executable:
        size = (mode, bucket.height, bucket.width)
        if size not in self._graphs:
            try:
                self._graphs[size] = FrozenGraph(self.frozen(bucket))
            except UnfreezableError as error:
                self._unfreezable[size] = str(error)
                self._graphs[size] = Function(self.trace(mode, bucket))
        return self._graphs[size]

    def _clusters(self, mode: Mode, bucket: Bucket) -> Executable:
        """Returns a graph that has not yet clustered as many shapes as it may."""
        taken = self._clustered.setdefault((mode, bucket.height, bucket.width), [])
        used = len(taken) % MAX_CLUSTERED
        try:
            taken.append(taken[-1] if used else FrozenGraph(self.frozen(bucket), has_clusters=True))
        except UnfreezableError as error:
            raise ModelFailed(f"modes: {mode} runs frozen graphs alone, and this can be none: {error}") from error
        return taken[-1]

    def in_openvino(self, bucket: Bucket, *, is_profiled: bool = False) -> CompiledModel:
        """Makes the executable of a bucket in OpenVINO; with `is_profiled` it measures the time of each layer.

        Raises ModelFailed.
        """
        return in_openvino(
            self.converted(bucket), self._openvino_precision, shapes(self.inputs, bucket), is_profiled=is_profiled
        )

    def frozen(self, bucket: Bucket) -> FrozenFunction:
        """Returns the frozen graph that graph mode runs for images of the size of `bucket`. Raises UnfreezableError."""
        return freeze(self.trace(Mode.GRAPH, bucket))

    def converted(self, bucket: Bucket) -> ConvertedGraph:
        """Returns the graph that OpenVINO compiles for images of the size of `bucket`. Raises ModelFailed."""
        check_openvino()
        size = (bucket.height, bucket.width)
        if size not in self._converted:
            if self._calibration is not None:
                self._calibration.find(size)  # said before the work
            graph = converted(self.trace(Mode.OPENVINO, bucket))
            self._converted[size] = graph if self._calibration is None else self._calibration.load(size, graph)
        return self._converted[size]


def _sealed(*inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
    raise RuntimeError("a program that was sealed compiles nothing more")
