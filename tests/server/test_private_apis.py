"""What xlaserve reaches into that nobody promises to keep: each such thing by its name, and what breaks without it.

Private names and undocumented behaviour of TensorFlow, Keras, KerasCV, JAX, Pillow and grpcio. Versions beyond those
that these tests passed with are kept out by upper bounds in pyproject.toml: raise a bound, and this file says what to
mend.
"""

from __future__ import annotations

import _ssl
import argparse
import ast
import asyncio
import gc
import inspect
import io
import json
import os
import re
import ssl
import subprocess
import sys
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httptools
import numpy as np
import pytest
import tensorflow as tf
import trustme
import uvicorn
from PIL import Image
from tensorflow.python.eager import context
from tensorflow.python.framework import convert_to_constants, func_graph, ops
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.tf.frozen_graph import CLUSTER_RUNS, MAX_CLUSTERED
from xlaserve.programs.watch.xla_log import Reader

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 120
BOUNDED: Final = {
    "grpcio",
    "uvicorn",
    "pillow",
    "tensorflow-cpu",
    "tensorflow",
    "keras",
    "keras-cv",
    "keras-hub",
    "jax",
    "ray",
}
OURS: Final = {"self", "cls", "os._exit", "argparse._ActionsContainer", "argparse._ArgumentGroup"}
NAMED_TUPLES: Final = {"_asdict", "_field_defaults", "_fields", "_replace"}
PRIVATE_NAMES: Final = {
    "convert_to_constants._FunctionConverterDataInEager",
    "convert_to_constants._replace_variables_by_constants",
    "convert_to_constants._run_inline_graph_optimization",
    "tensor._keras_history",
    "model._flatten_layers",
    "called._cached_graph",
    "graph._functions",
    "graph._add_function_recursive",
    "operation.graph._get_function",
    "argparse._SubParsersAction",
    "argparse.HelpFormatter(parser.prog)._expand_help",
    "each._actions",
    "parser._actions",
    "action._choices_actions",
    "parser._action_groups",
    "group._group_actions",
    "cygrpc._ServicerContext",
    "_ssl._test_decode_cert",
}
PRIVATE_MODULES: Final = {
    "tensorflow.python.eager",
    "tensorflow.python.framework",
    "tensorflow.python.ops",
    "tensorflow.python.saved_model",
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops",
    "tensorflow.compiler.tf2xla.python",
    "tensorflow.tsl.profiler.protobuf",
    "grpc._cython",
}
"""All that the sources may use; each has its test below."""
UVICORNS_METHODS: Final = {
    *("connection_made", "connection_lost", "eof_received", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("on_response_complete", "timeout_keep_alive_handler", "shutdown"),
    *("_start_asgi_task", "_unset_keepalive_if_required"),
}
UVICORNS_ATTRIBUTES: Final = {
    *("connections", "cycle", "flow", "headers", "loop", "parser", "pipeline", "scope", "server_state", "transport"),
    "url",
}
CYCLES: Final = {
    *("body", "disconnected", "keep_alive", "message_event", "response_complete", "response_started"),
    "waiting_for_100_continue",
}
"""Names of uvicorn's connection, and of its request, that `wire/http/connection.py` overrides, calls or reads."""


@contextmanager
def needed(name: str, *, by: str, breaks: str) -> Iterator[None]:
    """Adds to any error raised inside what it means for xlaserve."""
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"{name} is not what it was ({type(error).__name__}: {error}).\nUsed by {by}; without it: {breaks}."
        )


def sources() -> Iterator[tuple[Path, ast.AST]]:
    for folder in ("server", "client", "fleet", "loadtest", "bench", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            if "_pb2" not in file.name:
                yield file, ast.parse(file.read_text())


def test_nothing_private_is_used_that_has_no_test_here() -> None:
    names, modules = set(), set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                if re.match(r"tensorflow\.|keras\.src|PIL\._|grpc\._", node.module):
                    modules.add(node.module)
            elif isinstance(node, ast.Attribute) and re.match(r"_[a-z]|_[A-Z]", node.attr):
                owner = ast.unparse(node.value)
                if owner not in OURS and owner != "super()" and node.attr not in NAMED_TUPLES:
                    names.add(ast.unparse(node))
    assert names - OURS == PRIVATE_NAMES, "name it here, with a test of what it does and who needs it"
    assert modules == PRIVATE_MODULES


def test_packages_whose_private_apis_are_used_have_upper_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["cpu"],
        *project["optional-dependencies"]["gpu"],
        *project["optional-dependencies"]["jax"],
        *project["optional-dependencies"]["loadtest"],
        *project["optional-dependencies"]["ray"],
        *project["optional-dependencies"]["hub"],
        *project["optional-dependencies"]["hub-cpu"],
    ]
    bounds = {}
    for requirement in wanted:
        found = re.fullmatch(r"([\w-]+)(?:\[[\w-]+\])?>=([\d.]+)(?:,<([\d.]+))?", requirement)
        assert found, requirement
        name, lowest, bound = found.groups()
        assert numbers(lowest) <= numbers(pinned[name]), requirement
        if bound:
            assert numbers(pinned[name]) < numbers(bound), requirement
            bounds[name] = bound
    assert bounds.keys() >= BOUNDED


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_argparse_shows_what_was_added_to_a_parser() -> None:
    with needed(
        "argparse's _actions and _action_groups",
        by="xlaserve_client/cli_parser.py and scripts/generate_docs.py",
        breaks="shells complete no files, and the reference of the commands is empty",
    ):
        parser = argparse.ArgumentParser()
        flag = parser.add_argument_group("group").add_argument("--flag", default=3, help="%(default)s")
        commands = parser.add_subparsers()
        command = commands.add_parser("command", help="about it")
        assert isinstance(commands, argparse._SubParsersAction)
        assert commands.choices["command"] is command
        assert [(choice.dest, choice.help) for choice in commands._choices_actions] == [("command", "about it")]
        assert parser._actions[-2:] == [flag, commands]
        assert parser._action_groups[-1]._group_actions == [flag]
        assert argparse.HelpFormatter("prog")._expand_help(flag) == "3"


# TensorFlow, in this process.


def traced() -> Any:
    """A concrete function of pixels and one variable."""
    weight = tf.Variable(3.0)
    spec = tf.TensorSpec((None, 2, 2, 3), tf.uint8, name="pixels")
    function = tf.function(lambda pixels: (tf.cast(pixels, tf.float32) * weight,), autograph=False)
    concrete = function.get_concrete_function(spec)
    concrete.owner = (weight, function)
    return concrete


def test_tensorflows_context_knows_its_device_and_its_configuration() -> None:
    with needed(
        "tensorflow.python.eager.context.context()",
        by="programs/tf/frozen_graph.py",
        breaks="frozen graphs have threads, memory and GPUs of their own, and replicas run on the wrong GPU",
    ):
        with tf.device("/CPU:0"):
            assert context.context().device_name.endswith("CPU:0")
        config = tf.compat.v1.ConfigProto()
        config.CopyFrom(context.context().config)
        levels = tf.compat.v1.OptimizerOptions
        for level in (levels.ON_2, levels.OFF):
            config.graph_options.optimizer_options.global_jit_level = level
        config.experimental.optimize_for_static_graph = True
        config.experimental.disable_output_partition_graphs = True


def test_variables_become_constants_in_a_graph() -> None:
    with needed(
        "convert_to_constants._FunctionConverterDataInEager and ._replace_variables_by_constants",
        by="programs/tf/frozen_graph.py",
        breaks="no model runs in graph mode or autocluster",
    ):
        function = traced()
        data = convert_to_constants._FunctionConverterDataInEager(
            func=function, lower_control_flow=True, aggressive_inlining=False
        )
        definition, converted = convert_to_constants._replace_variables_by_constants(data)
        assert len(converted) == len(function.captured_inputs) == 1
        assert "Const" in {node.op for node in definition.node}
        assert not {node.op for node in definition.node} & {"ReadVariableOp", "VarHandleOp"}
        graph = tf.Graph()
        with graph.as_default():
            tf.graph_util.import_graph_def(definition, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            run = session.make_callable([function.outputs[0].name], feed_list=[function.inputs[0].name])
            assert run(np.full((1, 2, 2, 3), 5, np.uint8))[0].max() == 15.0


def test_functions_are_inlined_into_a_graph() -> None:
    with needed(
        "convert_to_constants._run_inline_graph_optimization",
        by="programs/tf/frozen_graph.py",
        breaks="OpenVINO runs no model that XLA would compile a part of, such as convolutions with groups",
    ):
        graph = tf.Graph()
        with graph.as_default():
            given = tf.compat.v1.placeholder(tf.float32, (), "given")
            result = tf.function(lambda x: 2.0 * x, autograph=False)(given)
        assert any("PartitionedCall" in operation.type for operation in graph.get_operations())
        named = SimpleNamespace(graph=graph, inputs=[given], outputs=[result])
        definition = convert_to_constants._run_inline_graph_optimization(named, True, aggressive_inlining=False)
        assert not any("PartitionedCall" in node.op for node in definition.node)
        assert {given.op.name, result.op.name} <= {node.name for node in definition.node}


def test_a_function_runs_without_the_python_half_of_graphs_it_calls() -> None:
    with needed(
        "FuncGraph._functions and AtomicFunction._cached_graph",
        by="programs/tf/function.py and programs/tf/tensorflow_program.py",
        breaks="the garbage collector walks through the graphs of each model that serves, and all wait meanwhile",
    ):
        inner = traced()
        graph = weakref.ref(inner.graph)
        spec = tf.TensorSpec((1, 2, 2, 3), tf.uint8)
        outer = tf.function(inner, autograph=False, jit_compile=True).get_concrete_function(spec)
        variables = inner.graph.variables
        (called,) = outer.graph._functions.values()
        ops.dismantle_graph(outer.graph)
        assert called._cached_graph is inner.graph
        called._cached_graph = None
        func_graph.dismantle_func_graph(inner.graph)
        del inner
        gc.collect()
        assert graph() is None
        (output,) = outer(tf.fill((1, 2, 2, 3), tf.constant(5, tf.uint8)))
        assert output.numpy().max() == 15.0
        assert len(variables) == 1


def test_a_function_graph_gives_what_it_captured() -> None:
    with needed(
        "FuncGraph.captures, .variables and a variable's .handle",
        by="programs/tf/stablehlo.py",
        breaks="programs are exported to the compile cache with the wrong weights, or none",
    ):
        function = traced()
        ((outside, inside),) = function.graph.captures
        (variable,) = function.graph.variables
        assert outside is variable.handle
        assert outside.dtype == tf.resource
        assert any(inside is symbol for symbol in function.graph.inputs)


def test_a_concrete_function_is_called_with_what_it_captured() -> None:
    with needed(
        "ConcreteFunction's inference_fn.call_flat and captured_inputs",
        by="programs/tf/function.py",
        breaks="no program that is not from the compile cache runs",
    ):
        weights = tf.constant([2.0, 3.0])
        function = tf.function(lambda values: (values * weights, values), autograph=False).get_concrete_function(
            tf.TensorSpec(2, tf.float32)
        )
        assert function.captured_inputs[0] is weights
        product, same = function.inference_fn.call_flat(tf.ones(2), *function.captured_inputs)
        assert (product.numpy().tolist(), same.numpy().tolist()) == ([2.0, 3.0], [1.0, 1.0])


def test_a_function_that_was_registered_is_called_by_its_name() -> None:
    with needed(
        "context.context().call_function, and import_graph_def, which registers functions outside of a graph",
        by="programs/tf/stablehlo.py",
        breaks="no program of the compile cache runs",
    ):
        function = tf.function(lambda values: (values + 1.0, values)).get_concrete_function(tf.TensorSpec(2))
        library = tf.compat.v1.GraphDef()
        library.library.function.add().CopyFrom(function.function_def)
        library.library.function[0].signature.name = "registered"
        tf.import_graph_def(library, name="")
        more, same = context.context().call_function(b"registered", [tf.ones(2)], 2)
        assert (more.numpy().tolist(), same.numpy().tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_a_module_of_stablehlo_is_an_operation() -> None:
    from xlaserve.programs.tf.stablehlo import export, load

    with needed(
        "XlaCallModule, its attributes and its calling convention 9, and get_compiler_ir's stablehlo_serialized",
        by="programs/tf/stablehlo.py",
        breaks="nothing can be written to the compile cache, or what is there can't be run",
    ):
        weight = tf.Variable(3.0)
        shape = (2, 1, 1, 3)
        spec = tf.TensorSpec(shape, tf.uint8)
        exported = export(lambda pixels: (tf.cast(pixels, tf.float32) * weight,), [spec])
        (values,) = load(exported, "cpu")(tf.ones(shape, tf.uint8))
        assert values.numpy().tolist() == np.full(shape, 3.0).tolist()


def test_an_export_of_jax_runs_with_its_weights_as_arguments() -> None:
    import jax
    from jax import export

    from xlaserve.models.sources.jax_export import exported_model
    from xlaserve.models.sources.jax_file import ImageFunction

    kernel = np.random.default_rng(0).normal(size=(3, 2048)).astype(np.float32)
    with needed(
        "tf2xla.python.xla.call_module, Exported's fields, MLIR's bindings in jax.extend.mlir, and "
        "tensorflow.python.ops.resource_variable_ops.ResourceVariable",
        by="models/sources/jax_file.py, jax_export.py, stablehlo_weights.py and stablehlo_graph.py",
        breaks="exports of JAX can't be served or are not lowered, or each program holds their weights",
    ):
        image = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), 2, 2, 3), np.float32)
        exported = export.export(jax.jit(lambda images: images.sum((1, 2)) @ kernel), platforms=["cpu", "cuda"])(image)
        function = ImageFunction(exported_model(exported, "net.jax", ()), has_channels_first=False)
        (weight,) = function.weights
        np.testing.assert_array_equal(weight, kernel)
        pixels = np.ones((1, 2, 2, 3), np.float32)
        (values,) = tf.function(function.run, autograph=False, jit_compile=True)(pixels).values()
        np.testing.assert_allclose(values, 4 * kernel.sum(0)[None], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", ["stablehlo", "stablehlo_serialized", "hlo", "optimized_hlo"])
def test_a_functions_program_can_be_had(stage: str) -> None:
    with needed(
        f"tf.function(...).experimental_get_compiler_ir(...)(stage={stage!r})",
        by="programs/tf/stablehlo.py, programs/tf/function.py and inspection/compile_and_explain.py",
        breaks="no compile cache, no `xlaserve explain`",
    ):
        function = tf.function(lambda values: values + 1.0, jit_compile=True)
        assert function.experimental_get_compiler_ir(tf.TensorSpec(3, tf.float32))(stage=stage)


def test_xlas_barrier_is_an_operation() -> None:
    with needed(
        "tensorflow.compiler.tf2xla.ops.gen_xla_ops.xla_optimization_barrier",
        by="models/lowering/materialize.py",
        breaks="lowered layers can't be traced: no convolutional model of Keras runs in XLA on a CPU",
    ):
        from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier

        function = tf.function(lambda values: xla_optimization_barrier([values + 1.0])[0], jit_compile=True)
        assert function(tf.ones(2)).numpy().tolist() == [2.0, 2.0]
        text = function.experimental_get_compiler_ir(tf.TensorSpec(2, tf.float32))(stage="stablehlo")
        assert "optimization_barrier" in str(text)


def test_the_mark_that_has_xla_compile_a_function_keeps_its_name() -> None:
    from xlaserve.programs.tf.stablehlo import MUST_COMPILE

    with needed(
        "the attribute _XlaMustCompile",
        by="programs/tf/frozen_graph.py and programs/tf/stablehlo.py",
        breaks="graph mode runs XLA unseen, and programs from the compile cache run without it",
    ):
        inner = tf.function(lambda values: values + 1.0, jit_compile=True)
        outer = tf.function(lambda values: inner(values) + 1.0, autograph=False)
        definition = outer.get_concrete_function(tf.TensorSpec(2, tf.float32)).graph.as_graph_def()
        marked = [part for part in (*definition.node, *definition.library.function) if MUST_COMPILE in part.attr]
        assert any(part.attr[MUST_COMPILE].b for part in marked)


def test_a_recording_can_be_parsed() -> None:
    with needed(
        "tensorflow.tsl.profiler.protobuf.xplane_pb2",
        by="programs/tf/trace.py",
        breaks="`xlaserve explain` can't say what instructions took",
    ):
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        assert {"planes"} <= set(xplane_pb2.XSpace.DESCRIPTOR.fields_by_name)
        assert {"lines", "event_metadata", "stat_metadata"} <= set(xplane_pb2.XPlane.DESCRIPTOR.fields_by_name)


def test_switches_of_the_device_are_where_they_were() -> None:
    with needed(
        "tf.config.experimental",
        by="programs/tf/device.py and programs/tf/tensorflow_program.py",
        breaks="no server starts on a GPU",
    ):
        experimental = tf.config.experimental
        was_on = experimental.tensor_float_32_execution_enabled()
        experimental.enable_tensor_float_32_execution(was_on)
        assert callable(experimental.get_device_details)
        assert callable(experimental.set_memory_growth)


# TensorFlow and XLA, in a process with the flags that a server sets.

PROBE = """
import json, os, sys
from pathlib import Path

from xlaserve.programs.tf import device
from xlaserve.programs.tf import flags, xla_executable_cache
from xlaserve.programs.watch import stderr_tap
from xlaserve.programs.watch import xla_log
from xlaserve.programs.tf.xla_executable_cache import FOLDER

folder = Path(sys.argv[1])
device._set_flags()
xla_executable_cache.set_environment()
flags.add(flags.XLA, f"--xla_gpu_per_fusion_autotune_cache_dir={folder}")
os.environ.update(TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE=xla_log.VMODULE)

import numpy as np
import tensorflow as tf

from xlaserve.programs.tf.frozen_graph import CLUSTER_RUNS, MAX_CLUSTERED, FrozenGraph, freeze

# A constant, for the watch, and what is kept of a function, for the compile cache.
def probed(images, size):
    return tf.image.resize(images, size)
tf.function(probed, autograph=False, jit_compile=True)(tf.zeros((1, 4, 4, 3)), tf.constant([9, 7]))
kept = list(xla_executable_cache.take("probed"))

# Clusters: as many shapes as there may be, each run as often as it takes, and then again.
def clustered(pixels):
    values = tf.cast(pixels, tf.float32)
    return (tf.reduce_sum(tf.sin(values) * tf.cos(values) + 1, axis=(1, 2)),)
spec = tf.TensorSpec((None, 4, 4, 3), tf.uint8)
graph = FrozenGraph(freeze(tf.function(clustered, autograph=False).get_concrete_function(spec)), has_clusters=True)
def run_all():
    for batch in range(1, MAX_CLUSTERED + 1):
        graph(np.zeros((batch, 4, 4, 3), np.uint8))
def count():
    return len(tf.io.gfile.glob(f"{FOLDER}/*.pb"))
before = count()
for _ in range(CLUSTER_RUNS):
    run_all()
driven = count()
run_all()
print(json.dumps({"kept": kept, "clusters": driven - before, "later": count() - driven}))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("executables")
    environment = {key: value for key, value in os.environ.items() if key not in ("TF_XLA_FLAGS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return SimpleNamespace(status=done.returncode, stdout=done.stdout, log=done.stderr)


def test_tensorflow_and_xla_take_the_flags_that_a_server_sets(probe: SimpleNamespace) -> None:
    with needed(
        "a flag in XLA_FLAGS or TF_XLA_FLAGS",
        by="programs/tf/device.py, cache and programs/watch/stderr_tap.py",
        breaks="an unknown flag ends the process when XLA is first used: no server starts",
    ):
        assert probe.status == 0, probe.log[-2000:]


def test_tensorflows_log_tells_of_a_compilation_what_the_watch_needs(probe: SimpleNamespace) -> None:
    with needed(
        "TF_CPP_VMODULE, and the wording of device_compiler, device_executable_persistor, xla_compiler, const_analysis",
        by="programs/watch/xla_log.py, programs/watch/stderr_tap.py",
        breaks="what XLA compiles while serving goes unseen (a server then says that its watch is blind)",
    ):
        reader = Reader()
        found = [each for line in probe.log.splitlines() if (each := reader.read(line)) is not None]
        (resize,) = [each for each in found if "probed" in each.function]
        assert (resize.arguments, resize.result) == (("f32[1,4,4,3]",), "f32[1,9,7,3]")
        assert resize.constants == ("size = 9 7 (needed by resize/ResizeBilinear)",)
        assert resize.seconds > 0


def test_tensorflow_keeps_executables_by_the_functions_name(probe: SimpleNamespace) -> None:
    with needed(
        "--tf_xla_persistent_cache_directory, what is in its files, and the file system ram://",
        by="programs/tf/xla_executable_cache.py",
        breaks="nothing is found to be kept: each start compiles again",
    ):
        assert len(json.loads(probe.stdout)["kept"]) == 1


def test_clusters_are_compiled_within_warm_ups_runs_and_shapes(probe: SimpleNamespace) -> None:
    with needed(
        f"kDefaultCompilationThreshold ({CLUSTER_RUNS}) and kCompileThreshold ({MAX_CLUSTERED})",
        by="programs/tf/frozen_graph.py",
        breaks="the mode autocluster compiles while a request waits, or never",
    ):
        counted = json.loads(probe.stdout)
        assert (counted["clusters"], counted["later"]) == (MAX_CLUSTERED, 0)


# Keras.


def small() -> Any:
    pixels = keras.Input((8, 8, 3), name="pixels")
    inner = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, name="inside")], name="inner")
    return keras.Model(pixels, keras.layers.Flatten(name="last")(inner(pixels)))


def test_an_output_knows_the_layer_that_made_it() -> None:
    with needed(
        "KerasTensor._keras_history.operation",
        by="models/networks/precision.py",
        breaks="the last layer computes in half the bits, or no model can be narrowed",
    ):
        model = small()
        assert model.outputs[0]._keras_history.operation is model.get_layer("last")


def test_a_model_gives_layers_within_layers() -> None:
    with needed(
        "Model._flatten_layers",
        by="models/networks/precision.py, models/sources/random_weights.py",
        breaks="layers within layers stay in float32, and random weights give every image the same answer",
    ):
        assert {"inner", "inside", "last"} <= {layer.name for layer in small()._flatten_layers()}


def test_a_layers_policy_can_be_changed_once_it_is_built() -> None:
    with needed(
        "the setter of Layer.dtype_policy",
        by="models/networks/precision.py",
        breaks="precision has no effect, or breaks layers",
    ):
        layer = small().get_layer("inner").layers[-1]
        layer.dtype_policy = "mixed_bfloat16"
        assert (layer.compute_dtype, layer.variable_dtype) == ("bfloat16", "float32")
        assert layer(tf.zeros((1, 8, 8, 3))).dtype == tf.bfloat16


def test_a_model_knows_whether_its_input_was_a_mapping() -> None:
    with needed(
        "Functional._inputs_struct", by="models/sources/keras_models.py", breaks="models whose input has a name fail"
    ):
        pixels = keras.Input((8, 8, 3), name="pixels")
        outputs = keras.layers.Flatten()(pixels)
        assert list(keras.Model({"pixels": pixels}, outputs)._inputs_struct) == ["pixels"]
        assert not isinstance(keras.Model(pixels, outputs)._inputs_struct, dict)


def test_the_functions_that_a_graph_calls_can_be_had_and_given_to_another() -> None:
    with needed(
        "FuncGraph._get_function, AtomicFunction.graph, Graph._add_function_recursive and FuncGraph.watch_variable",
        by="models/lowering/replay.py and models/lowering/__init__.py",
        breaks="nothing is lowered: depthwise convolutions take XLA on a CPU tens of times longer",
    ):
        inner = tf.function(lambda values: values + 1.0)
        outer = tf.function(lambda values: inner(values) * 2.0).get_concrete_function(tf.TensorSpec(3))
        (call,) = (each for each in outer.graph.get_operations() if each.type == "PartitionedCall")
        called = call.graph._get_function(call.get_attr("f").name)
        assert "AddV2" in {each.type for each in called.graph.get_operations()}

        variable = tf.Variable(2.0)

        @tf.function
        def again(values: tf.Tensor) -> tf.Tensor:
            graph: Any = tf.compat.v1.get_default_graph()
            graph.watch_variable(variable)
            graph._add_function_recursive(called)
            attributes = dict(call.node_def.attr.items())
            return graph.create_op(call.type, [values], [tf.float32], attrs=attributes).outputs[0]

        assert again(tf.zeros(3)).numpy().tolist() == [1.0, 1.0, 1.0]
        assert list(again.get_concrete_function(tf.TensorSpec(3)).graph.variables) == [variable]


def test_an_operation_runs_by_its_name_and_attributes_in_a_graph() -> None:
    with needed(
        "tensorflow.python.eager.execute.quick_execute",
        by="models/lowering/replay.py",
        breaks="batch normalization and 3 x 3 convolutions are not lowered",
    ):
        from tensorflow.python.eager import context, execute

        with tf.Graph().as_default():
            operation = tf.squeeze(tf.compat.v1.placeholder(tf.float32, (1, 2, 1)), axis=[0]).op
        attributes: list[Any] = []
        for name in operation.node_def.attr:
            attributes += [name, operation.get_attr(name)]
        (result,) = execute.quick_execute(operation.type, 1, [tf.ones((1, 2, 1))], tuple(attributes), context.context())
        assert result.shape == (2, 1)


def test_a_shape_is_known_as_far_as_that_of_the_tensor_it_comes_from() -> None:
    with needed(
        "tensorflow.python.framework.tensor_util.constant_value_as_shape",
        by="models/lowering/resize.py",
        breaks="bilinear resizing to the size of another tensor is not lowered",
    ):
        from tensorflow.python.framework import tensor_util

        with tf.Graph().as_default():
            images = tf.compat.v1.placeholder(tf.float32, (None, 4, 5, 3))
            assert tensor_util.constant_value_as_shape(tf.shape(images)[1:3]).as_list() == [4, 5]


def test_a_type_that_saved_models_hold_can_be_registered() -> None:
    with needed(
        "tensorflow.python.saved_model.revived_types",
        by="models/sources/saved_model.py",
        breaks="SavedModels of Keras 2 that hold an optimizer can't be loaded",
    ):
        from tensorflow.python.saved_model import revived_types

        version = revived_types.VersionedTypeRegistration(
            lambda proto: None, version=1, min_producer_version=1, min_consumer_version=1
        )
        revived_types.register_revived_type("xlaserve_of_a_test", lambda one: False, [version])
        assert "xlaserve_of_a_test" in revived_types.registered_identifiers()


def test_small_tensors_become_constants_of_a_function_and_others_arguments() -> None:
    from xlaserve.models.lowering.materialize import ARGUMENT_NUMBERS

    with needed(
        "tensorflow.python.framework.func_graph._EAGER_CONST_THRESHOLD of 128",
        by="models/lowering/materialize.py",
        breaks="XLA computes again what layer normalization reads",
    ):
        ones = tf.ones(ARGUMENT_NUMBERS)
        function = tf.function(lambda values: values / ones[0]).get_concrete_function(tf.TensorSpec(3))
        assert len(function.captured_inputs) == 1


def test_initial_weights_come_of_pythons_generator() -> None:
    from xlaserve.models.sources.random_weights import seeded

    with needed(
        "Keras drawing the seeds of its initializers from Python's random",
        by="models/sources/random_weights.py",
        breaks="models with random weights give other answers at each start, and replicas disagree",
    ):
        kernels = []
        for _ in range(2):
            with seeded():
                layer = keras.layers.Dense(4)
                layer.build((None, 3))
                kernels.append(layer.kernel.numpy())
        np.testing.assert_array_equal(*kernels)


def test_kerascvs_detectors_decode_with_a_layer_that_can_be_replaced() -> None:
    from xlaserve.models.sources.keras_detectors import is_detector

    with needed(
        "RetinaNet.prediction_decoder, YOLOV8Detector.prediction_decoder and .decode_predictions",
        by="models/sources/keras_detectors.py",
        breaks="KerasCV's detectors are served as something else, or suppress on the host",
    ):
        import keras_cv

        for kind in (keras_cv.models.RetinaNet, keras_cv.models.YOLOV8Detector):
            assert hasattr(kind, "decode_predictions")
            assert isinstance(vars(kind)["prediction_decoder"], property)
            assert vars(kind)["prediction_decoder"].fset
            assert is_detector(kind)


def test_kerashubs_tasks_state_their_preprocessing_and_box_decoding() -> None:
    from xlaserve.models.networks.preprocess import Scaling
    from xlaserve.models.sources import keras_library
    from xlaserve.models.sources.keras_detectors import is_detector

    with needed(
        "ImageConverter.scale and .offset, Task.preprocessor, ObjectDetector.prediction_decoder",
        by="models/sources/keras_library.py and keras_detectors.py",
        breaks="KerasHub's presets see pixels that they were not trained with, or its detectors suppress on the host",
    ):
        import keras_hub

        converter = keras_hub.layers.ResNetImageConverter(scale=[1.0, 2.0, 3.0], offset=0.5)
        preprocessor = keras_hub.models.ResNetImageClassifierPreprocessor(image_converter=converter)
        task = SimpleNamespace(preprocessor=preprocessor)
        assert keras_library.own_preprocess(task) == Scaling((1.0, 2.0, 3.0), (0.5, 0.5, 0.5))
        for kind in (keras_hub.models.RetinaNetObjectDetector, keras_hub.models.DFineObjectDetector):
            assert is_detector(kind)
            assert vars(kind)["prediction_decoder"].fset


# Pillow.


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 8), (200, 10, 10)).save(file, "JPEG", **options)
    return file.getvalue()


def test_jpegs_ask_one_method_for_their_resolution() -> None:
    from PIL.JpegImagePlugin import JpegImageFile

    class Spy(JpegImageFile):
        calls = 0

        def _read_dpi_from_exif(self) -> None:
            Spy.calls += 1

    with needed(
        "JpegImageFile._read_dpi_from_exif",
        by="jpeg.py",
        breaks="Pillow's TIFF parser reads what clients send, and writes warnings about it into the log",
    ):
        exif = Image.Exif()
        exif[0x0112] = 6
        with Spy(io.BytesIO(jpeg(exif=exif))) as image:
            assert Spy.calls == 1
            assert image.info["exif"].startswith(b"Exif\0\0")


def test_jpegs_are_open_once_the_first_scans_header_is_read() -> None:
    from PIL.JpegImagePlugin import JpegImageFile

    read = []

    class Spy(JpegImageFile):
        def _open(self) -> None:
            super()._open()
            assert self.fp is not None
            read.append(self.fp.tell())

    with needed(
        "JpegImageFile._open",
        by="jpeg.py",
        breaks="JPEGs of several scans hold too little memory, and `decode: fast` reduces none",
    ):
        data = jpeg()
        with Spy(io.BytesIO(data)):
            (end,) = read
            assert data[end - 14 : end].startswith(b"\xff\xda\x00\x0c\x03")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_plugins_open_files_without_image_open(kind: str) -> None:
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    plugins: dict[str, Callable[[io.BytesIO], Image.Image]]
    plugins = {"JPEG": JpegImageFile, "PNG": PngImageFile, "WEBP": WebPImageFile}
    plugin = plugins[kind]
    with needed(
        f"{plugin.__name__}(file), its size before load(), and its EXIF in info",
        by="image.py",
        breaks="images can't be decoded, or are allocated before their size was checked",
    ):
        file = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (16, 8), (200, 10, 10)).save(file, kind, exif=exif)
        reads = []

        class Reader(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                reads.append(size)
                return super().read(size)

        with plugin(Reader(file.getvalue())) as image:
            assert image.size == (16, 8)
            image.load()
            assert isinstance(image.info.get("exif"), bytes)
        assert reads, "what bounds the reads of a file made of tiny segments is never asked"


def test_grey_of_16_bits_is_a_mode_of_its_own() -> None:
    with needed("the mode I;16", by="image.py", breaks="images of 16 bits are clipped: all white"):
        file = io.BytesIO()
        Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(file, "PNG")
        with Image.open(io.BytesIO(file.getvalue())) as image:
            assert image.mode == "I;16"
            assert np.asarray(image).max() == 0x8000


# grpcio. What a real server makes of it is in tests/integration.


def test_a_deserializer_may_return_none() -> None:
    import asyncio

    import grpc

    async def ask() -> Any:
        async def answer(request: Any, context: Any) -> bytes:
            assert context.time_remaining() > 0
            return b"none" if request is None else b"some"

        method = grpc.unary_unary_rpc_method_handler(answer, lambda data: None, lambda response: response)
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", {"Ask": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/a.Service/Ask")
                return await ask(b"\xff", timeout=20)
        finally:
            await server.stop(None)

    with needed(
        "handlers whose deserializer returns None",
        by="wire/grpc/handlers.py",
        breaks="bytes that are no message become UNKNOWN with the name of a Python class, and a traceback in the log",
    ):
        assert asyncio.run(ask()) == b"none"


def test_grpcio_accepts_calls_in_compiled_tasks() -> None:
    import grpc

    async def tasks() -> list[bool]:
        before = asyncio.all_tasks()
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return [inspect.iscoroutine(task.get_coro()) for task in asyncio.all_tasks() - before]
        finally:
            await server.stop(None)

    with needed(
        "the task that accepts calls",
        by="wire/grpc/grpc_server.py",
        breaks="after a call whose path is no UTF-8 nobody is served for as long as its connection stays open",
    ):
        assert set(asyncio.run(tasks())) == {False}


async def refused(timeout_s: float = 20) -> tuple[Any, str, bool]:
    """Status and message of a stream that the server ends by itself, and whether the task that answers it has ended."""
    import grpc

    from xlaserve.admission.calls import current_call
    from xlaserve.wire.grpc.ending import Ending

    answering: asyncio.Future[asyncio.Task[Any]] = asyncio.get_running_loop().create_future()

    class Waiting(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            answering.set_result(current_call())
            return grpc.stream_stream_rpc_method_handler(self.answer)

        async def answer(self, messages: Any, context: object) -> None:
            await asyncio.Event().wait()

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Waiting(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.stream_stream("/service/method")
        call = method(timeout=timeout_s)
        Ending()([await answering], "gave way")
        # The server's first call, and the latest: grpcio refers to both.
        status, message = await call.code(), await call.details()
        has_ended = answering.result().done()
    await server.stop(None)
    return status, message, has_ended


def test_grpcio_refuses_a_call_through_the_state_that_its_task_refers_to() -> None:
    import grpc

    with needed(
        "RPCState, _ServicerContext and that the task which looks a call's handler up refers to its state",
        by="wire/grpc/ending.py",
        breaks="clients that were too slow are not told that their calls have ended",
    ):
        assert asyncio.run(refused()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "gave way", True)


@pytest.mark.parametrize("missing", ["RPCState", "_ServicerContext", "referents"])
def test_a_calls_task_ends_where_grpcio_offers_no_way_to_refuse_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    from xlaserve.wire.grpc import ending

    if missing == "referents":
        monkeypatch.setattr(ending, "_held_by", lambda task: iter(()))
    else:
        names = {"RPCState", "_ServicerContext"} - {missing}
        monkeypatch.setattr(ending, "cygrpc", SimpleNamespace(**{name: getattr(cygrpc, name) for name in names}))
    _, message, has_ended = asyncio.run(refused(timeout_s=1))
    assert message != "gave way"
    assert has_ended


def test_grpcio_cancels_calls_whose_tasks_are_cancelled() -> None:
    import asyncio

    import grpc

    from xlaserve.admission.calls import current_call
    from xlaserve.wire.grpc.ending import reset

    async def ask() -> tuple[grpc.StatusCode, grpc.StatusCode]:
        answering: asyncio.Future[asyncio.Task[Any]] = asyncio.get_running_loop().create_future()

        async def answer(data: bytes, context: object) -> bytes:
            if data:
                return data
            answering.set_result(current_call())
            await asyncio.Event().wait()
            return b""

        handler: Any = grpc.unary_unary_rpc_method_handler(answer)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", {"method": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: Any = channel.unary_unary("/service/method")
            assert await method(b"first", timeout=20) == b"first"
            call = method(b"", timeout=20)
            reset([await answering])
            statuses = await method(b"next", timeout=20).code(), await call.code()
        await server.stop(None)
        return statuses

    with needed(
        "the task of a call, its reference to the one that answers it, and what becomes of a call without references",
        by="wire/grpc/ending.py",
        breaks="calls whose answers are not read stay for as long as their clients do, and their memory with them",
    ):
        assert asyncio.run(ask()) == (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)


def test_uvicorns_connection_and_request_are_what_ours_adds_bounds_to() -> None:
    tree = ast.parse((ROOT / "server/xlaserve/wire/http/connection.py").read_text())
    (ours,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Connection")
    own = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)} - UVICORNS_METHODS
    used, set_ = set(), set()
    for node in ast.walk(ours):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            used.add(node.attr)
            if isinstance(node.ctx, ast.Store):
                set_.add(node.attr)
    of_uvicorn = used - own - (set_ - UVICORNS_ATTRIBUTES) - {"__init__"}
    assert of_uvicorn <= UVICORNS_METHODS | UVICORNS_ATTRIBUTES, "name it here"

    async def received() -> HttpToolsProtocol:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        config = uvicorn.Config(answer, ws="none", lifespan="off", reset_contextvars=True, log_config=None)
        config.load()
        connection = HttpToolsProtocol(config, ServerState(), {})
        connection.connection_made(asyncio.Transport())
        connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nab")
        return connection

    with needed(
        "uvicorn's connection", by="wire/http/connection.py", breaks="bounds on slow, silent and hostile clients"
    ):
        for name in UVICORNS_METHODS:
            assert callable(getattr(HttpToolsProtocol, name)), name
        connection = asyncio.run(received())
        for name in UVICORNS_ATTRIBUTES:
            getattr(connection, name)
        for name in CYCLES:
            getattr(connection.cycle, name)
        assert connection.cycle.body == b"ab"
        assert connection.cycle.message_event.is_set()
        assert connection.flow.read_paused is False
        assert {"connections", "tasks", "default_headers"} <= vars(connection.server_state).keys()
        assert STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
        assert 0 < HIGH_WATER_LIMIT <= 2**17


def test_httptools_takes_what_is_behind_an_upgrade_for_another_protocol() -> None:
    head = b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\n"
    with needed(
        "HttpParserUpgrade with the place behind the head, before any of the body",
        by="wire/http/connection.py",
        breaks="the body behind such a head, which would be lost, or read as the next request",
    ):
        parser = httptools.HttpRequestParser(SimpleNamespace())
        with pytest.raises(httptools.HttpParserUpgrade) as raised:
            parser.feed_data(head + b"abc")
        assert raised.value.args == (len(head),)
        assert parser.should_upgrade()
        parser.set_dangerous_leniencies(lenient_data_after_close=True)


def test_python_decodes_the_certificate_of_a_file(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    trustme.CA().issue_cert("localhost").cert_chain_pems[0].write_to_path(certificate)
    with needed("_ssl._test_decode_cert", by="admission/certificates.py", breaks="names of clients' certificates"):
        assert ssl.cert_time_to_seconds(_ssl._test_decode_cert(str(certificate))["notAfter"]) > time.time()  # type: ignore[attr-defined]
        with pytest.raises(ssl.SSLError):
            _ssl._test_decode_cert(str(tmp_path))  # type: ignore[attr-defined]
