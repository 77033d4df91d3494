"""Traced functions as StableHLO: a model's computation without Python, which the compile cache can keep.

StableHLO is XLA's portable input (https://openxla.org/stablehlo), serialized with a version. TensorFlow runs it as the
operation XlaCallModule, which XLA compiles like any function, but without the seconds that TensorFlow's own operations
take to be turned into HLO. The function's name is ours: TensorFlow's end in a counter of everything that was traced
before, and XLA's executables are kept by the function's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import tensorflow as tf
from tensorflow.python.eager import context

from xlaserve.programs.tf.xla_executable_cache import PREFIX

VERSION: Final = 9
"""Version of XlaCallModule's calling convention: the lowest that takes a module for one platform, as it is."""
PLATFORMS: Final = {"cpu": "CPU", "gpu": "CUDA"}
MUST_COMPILE: Final = "_XlaMustCompile"
"""The mark of a function, and of a call, that TensorFlow gives to XLA."""


@dataclass(frozen=True)
class TracedFunction:
    """A function of `inputs` of one shape each and of `arguments`, the model's weights."""

    module: bytes
    """Serialized StableHLO."""
    arguments: tuple[tf.Tensor, ...]
    outputs: tuple[tf.TensorSpec, ...]
    inputs: tuple[tf.DType, ...] = (tf.uint8,)

    @property
    def name(self) -> str:
        """A name made from the content, so that it is the same in every process."""
        return f"{PREFIX}{hashlib.sha256(self.module).hexdigest()[:32]}"


def export(function: Callable[..., Sequence[tf.Tensor]], inputs: Sequence[tf.TensorSpec]) -> TracedFunction:
    """Traces `function` for `inputs`.

    Raises ValueError, with TensorFlow's reason, for what XLA can't compile.
    """
    traced = tf.function(function, autograph=False, jit_compile=True)
    concrete = traced.get_concrete_function(*inputs)
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    # A variable's value shares its memory.
    arguments = (
        variables[id(captured)].read_value() if captured.dtype == tf.resource else captured
        for captured, _ in concrete.graph.captures
    )
    return TracedFunction(
        traced.experimental_get_compiler_ir(*inputs)(stage="stablehlo_serialized"),
        tuple(arguments),
        tuple(tf.TensorSpec(output.shape, output.dtype) for output in concrete.outputs),
        tuple(each.dtype for each in inputs),
    )


def load(traced: TracedFunction, device: Literal["cpu", "gpu"]) -> Callable[..., tuple[tf.Tensor, ...]]:
    """Returns the function, which XLA compiles at its first call."""
    # Outside of a graph, this is how a function is registered with TensorFlow.
    tf.import_graph_def(_library(traced, PLATFORMS[device]), name="")
    name, arguments, outputs = traced.name.encode(), traced.arguments, len(traced.outputs)
    call = context.context().call_function
    # By its name: a graph around it would be made, and walked through at each call, for nothing.
    return lambda *inputs: tuple(call(name, [*inputs, *arguments], outputs))


def _library(traced: TracedFunction, platform: str) -> Any:
    """Returns a graph without nodes whose library holds the function, its module as its only operation."""
    library = tf.compat.v1.GraphDef()
    library.versions.producer = tf.version.GRAPH_DEF_VERSION
    function = library.library.function.add()
    function.signature.name = traced.name
    function.attr[MUST_COMPILE].b = True
    module = function.node_def.add(name="module", op="XlaCallModule")
    module.attr["module"].s = traced.module
    module.attr["version"].i = VERSION
    module.attr["platforms"].list.s.append(platform.encode())
    for attribute in ("dim_args_spec", "function_list", "disabled_checks"):
        module.attr[attribute].list.SetInParent()
    for index, dtype in enumerate((*traced.inputs, *(argument.dtype for argument in traced.arguments))):
        name = f"argument_{index}"
        function.signature.input_arg.add(name=name, type=dtype.as_datatype_enum)
        module.input.append(name)
        module.attr["Tin"].list.type.append(dtype.as_datatype_enum)
    for index, output in enumerate(traced.outputs):
        name, dtype = f"output_{index}", output.dtype.as_datatype_enum
        function.signature.output_arg.add(name=name, type=dtype)
        function.ret[name] = f"module:output:{index}"
        module.attr["Tout"].list.type.append(dtype)
        module.attr["Sout"].list.shape.append(output.shape.as_proto())
    return library
