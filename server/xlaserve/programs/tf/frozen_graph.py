"""Graphs as serving freezes them: their variables made constants, which TensorFlow then folds and fuses.

Only constants can be folded: batch normalization into the weights of the convolution before it, for one, which leaves
half of MobileNetV2's operations. And only constants keep the layout that oneDNN's kernels prefer between two runs.

A frozen graph runs in a session of its own and for every batch size: a `tf.function` would hold twice as many copies of
the weights, and a graph for each bucket would copy them once more and be no faster. The session says for itself whether
TensorFlow may form clusters for XLA, which is otherwise a matter of the whole process.

Parts of a model that XLA would compile within graph mode are left to TensorFlow's own kernels. Keras uses XLA for each
convolution with groups, which on a CPU takes tens of times longer, and compiles again for each shape.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import context
from tensorflow.python.framework import convert_to_constants, ops

from xlaserve.engine.memory import available_memory_bytes
from xlaserve.engine.program import Outputs
from xlaserve.errors import OutOfDeviceMemory
from xlaserve.programs.tf.definitions import nodes, widen, widened
from xlaserve.programs.tf.stablehlo import MUST_COMPILE

MAX_BYTES: Final = 2**31 - 2**26
"""Bytes of weights: a graph is a protocol buffer, which ends at 2 GiB."""
PEAK_COPIES: Final = 14
"""Copies of the weights that freezing and folding take for a moment: measured, ResNet50 and ConvNeXtXLarge."""
CLUSTER_RUNS: Final = 2
"""TensorFlow compiles a cluster when it is first run, and for each further shape at the second run of that
(`kDefaultCompilationThreshold` in compiler/jit/device_compilation_profiler.cc)."""
MAX_CLUSTERED: Final = 10
"""Shapes; beyond them TensorFlow takes a cluster for one not worth compiling (`kCompileThreshold`, there as well)."""

_WRITES: Final = re.compile(r"Assign|Resource(\w*Apply|Scatter|StridedSliceAssign|CountUpTo)|Rng(ReadAnd)?Skip")
"""Beginning of the names of operations that change a variable."""
EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
"""XLA's code for a lack of memory in errors that TensorFlow raises as another kind, internal ones for example."""

_XLA_ALONE: Final = "Xla"
"""Beginning of the names of operations that have no other implementation."""

_NOT_INLINED: Final = "_noinline"
"""The attribute of functions that are not inlined, such as those that XLA is to compile."""


class UnfreezableError(Exception):
    """A graph can't be frozen; the message says why."""


class FrozenFunction(NamedTuple):
    """A concrete function of tensors, frozen."""

    definition: Any
    """A GraphDef."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """Names of its input and output tensors."""

    @property
    def has_xla(self) -> bool:
        """Whether XLA has to run some of it."""
        return any(node.op.startswith(_XLA_ALONE) for node in nodes(self.definition))


def freeze(function: Any) -> FrozenFunction:
    """Freezes a concrete function. TensorFlow's own kernels run what it holds, unless it `has_xla`.

    Raises UnfreezableError.
    """
    outputs = tuple(output.name for output in function.outputs)
    frozen = FrozenFunction(_freeze(function), arguments(function), outputs)
    if not frozen.has_xla:
        for part in (*nodes(frozen.definition), *frozen.definition.library.function):
            part.attr.pop(MUST_COMPILE, None)
            part.attr.pop(_NOT_INLINED, None)
    return frozen


def arguments(function: Any) -> tuple[str, ...]:
    """Returns the names of the tensors that a concrete function takes from its caller."""
    return tuple(each.name for each in own_inputs(function))


class FrozenGraph:
    """Runs a frozen graph. Several threads may call it.

    With `has_clusters` TensorFlow compiles parts of it with XLA, at the CLUSTER_RUNS-th run of a batch size at the
    latest, for MAX_CLUSTERED batch sizes; on a CPU only where TF_XLA_FLAGS held
    --tf_xla_cpu_global_jit when TensorFlow was first used.
    """

    def __init__(self, frozen: FrozenFunction, *, has_clusters: bool = False) -> None:
        graph = tf.Graph()
        # A graph does not say where its function was made: on which of several devices its replica belongs.
        with graph.as_default(), tf.device(context.context().device_name or None):
            tf.graph_util.import_graph_def(frozen.definition, name="")
        self._session = tf.compat.v1.Session(graph=graph, config=_session_config(has_clusters))
        self._run = self._session.make_callable(frozen.outputs, feed_list=frozen.inputs)

    def dismantle(self) -> None:
        """Undoes the cycles in Python's half of the graph; it can't run any more."""
        ops.dismantle_graph(self._session.graph)

    def __call__(self, *rows: NDArray[Any]) -> Outputs:
        """Runs `rows`; blocks. The outputs own their memory. Raises OutOfDeviceMemory, or TensorFlow's errors."""
        with memory_named():
            return tuple(map(np.array, self._run(*rows)))


@contextmanager
def memory_named() -> Iterator[None]:
    """Raises OutOfDeviceMemory for the errors that TensorFlow and XLA raise for lack of memory."""
    try:
        yield
    except tf.errors.OpError as error:
        if isinstance(error, tf.errors.ResourceExhaustedError) or EXHAUSTED in str(error):
            raise OutOfDeviceMemory("the device's memory did not hold a batch") from error
        raise


def _freeze(function: Any) -> Any:
    """Returns the graph of a concrete function with the values of its variables in their place, functions inlined.

    Raises UnfreezableError.
    """
    if assigns_variables(function):
        raise UnfreezableError("it assigns variables")
    size_bytes = sum(variable.dtype.size * variable.shape.num_elements() for variable in function.variables)
    if size_bytes > MAX_BYTES:
        raise UnfreezableError(f"it has {size_bytes / 2**30:.1f} GiB of weights, and a graph holds less than 2")
    needed = PEAK_COPIES * size_bytes
    if needed > available_memory_bytes():
        trim_heap()  # freed memory of this process counts as taken until then
    if needed > (free := available_memory_bytes()):
        raise UnfreezableError(f"freezing takes {needed / 2**30:.1f} GiB for a moment, and {free / 2**30:.1f} are free")
    try:
        # As in convert_variables_to_constants_v2, without making two more functions of the result: that takes ten
        # times as long, and it drops functions of the same name, which other graphs may still call.
        data = convert_to_constants._FunctionConverterDataInEager(
            func=function, lower_control_flow=True, aggressive_inlining=False
        )
        graph, converted = convert_to_constants._replace_variables_by_constants(data)
    except (ValueError, NotImplementedError, tf.errors.OpError) as error:
        raise UnfreezableError(str(error)) from error
    if len(converted) != len(function.captured_inputs):
        raise UnfreezableError("it refers to something that is neither a variable nor a constant")
    return graph


def own_inputs(function: Any) -> list[tf.Tensor]:
    """Returns the tensors that a concrete function takes from its caller: its inputs without what it captured."""
    own: list[tf.Tensor] = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
    return own


def assigns_variables(function: Any) -> bool:
    """Returns whether a concrete function changes variables as it runs."""
    return any(_WRITES.match(node.op) for node in nodes(function.graph.as_graph_def()))


def has_xla(function: Any) -> bool:
    """Returns whether TensorFlow would compile parts of a concrete function with XLA as it runs it."""
    return any(
        node.op.startswith(_XLA_ALONE) or (MUST_COMPILE in node.attr and node.attr[MUST_COMPILE].b)
        for node in nodes(function.graph.as_graph_def())
    )


def portable(function: Any) -> Any:
    """Returns the frozen graph of a concrete function for another runtime: TensorFlow's own kernels, no devices.

    Computations in less than float32 become float32, for the runtime to narrow as it is configured to. Functions for
    XLA to compile are inlined, as others are. Raises UnfreezableError.
    """
    frozen = freeze(function)
    if frozen.has_xla:
        raise UnfreezableError("it has operations of XLA's own")
    definition = frozen.definition
    _widen(definition)
    graph = _imported(definition)
    if not definition.library.function:
        return graph
    named = SimpleNamespace(graph=graph, inputs=function.inputs, outputs=function.outputs)
    return _imported(convert_to_constants._run_inline_graph_optimization(named, True, aggressive_inlining=False))


def _imported(definition: Any) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    return graph


def _widen(definition: Any) -> None:
    """Has a graph compute in float32 wherever it computes in less."""
    for node in nodes(definition):
        for attribute in node.attr.values():
            widen(attribute)
    for function in definition.library.function:
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            argument.type = widened(argument.type)


def _session_config(has_clusters: bool) -> Any:
    """Returns a session's configuration: the threads, devices and memory that TensorFlow was configured with."""
    levels = tf.compat.v1.OptimizerOptions
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(context.context().config)
    # Explicit, not left to a default: graph mode must not turn into XLA.
    config.graph_options.optimizer_options.global_jit_level = levels.ON_2 if has_clusters else levels.OFF
    # The graph never changes: two copies of the weights less.
    config.experimental.optimize_for_static_graph = True
    config.experimental.disable_output_partition_graphs = True
    return config


def trim_heap() -> None:
    """Gives memory back to the system: glibc keeps Grappler's working memory, several times a model's weights."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
