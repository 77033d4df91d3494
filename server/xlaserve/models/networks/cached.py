"""Models from the compile cache: what was built, traced, compiled and timed before, without Keras.

A model's folder holds what its source gave (`network`), its weights (`weights-<digest>`), a program for each bucket
(`<mode>-<bucket>`: StableHLO and XLA's executable), what each costs (`cost-<lanes>x<threads>-<mode>-<bucket>`) and, for
those that answer far from the reference, how far (`difference-<mode>-<bucket>`). Where lowerings have failed it holds
why (`unlowered-<height>x<width>`), and they are not tried again. Of modes that have one graph for all
buckets of a size it holds that (`<mode>-<height>x<width>`); for what is left, which is kept nowhere, the model is built
as usual.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import numpy as np
import tensorflow as tf
from pydantic import TypeAdapter

from xlaserve.config import Bucket, Mode, ModelSettings, Precision, model_files
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.causes import cause
from xlaserve.engine.program import Compilation, Executable, Images, Outputs
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.networks.kept_graphs import KINDS, Contents, Prepare
from xlaserve.models.networks.network import Network
from xlaserve.models.task import Task
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.environment import digest
from xlaserve.programs.cache.records import Folder, Record, RecordError
from xlaserve.programs.tf import persistent_cache, stablehlo
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.first_run import run_first
from xlaserve.programs.tf.frozen_graph import FrozenGraph, UnfreezableError
from xlaserve.programs.tf.function import Function
from xlaserve.programs.tf.lowered_function import CHANNELS
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

log = logging.getLogger(__name__)

NETWORK: Final = "network"
WEIGHTS: Final = "weights"
MODULE: Final = "module"
LOWERINGS: Final = "lowerings"
"""Key of the lowerings of a program; programs that an earlier version of xlaserve has kept lack it."""
_IRRELEVANT: Final = {
    "name",
    "version",
    "versions",
    "version_labels",
    "routing",
    "fit",
    "decode",
    "modes",
    "default_mode",
    "buckets",
    "auto_buckets",
    "unmatched",
    "max_background_resolutions",
    "max_queue_delay_ms",
    "max_queue_images",
    "verification",
    "batch_dependence",
}
"""Settings that do not change the computation. Every other setting makes another model."""
_APART: Final = {"program", "reference"}
"""Fields of a network that are not part of its description."""
_TASKS: Final = {kind.__name__: kind for kind in get_args(Task)}


def identity(settings: ModelSettings) -> dict[str, Any] | None:
    """Returns the facts that identify a model: its settings, and digests of the files that they name.

    None where its settings do not identify it. Raises OSError where a file can't be read.
    """
    if not catalog.can_be_kept(settings):
        return None
    facts = settings.model_dump(mode="json", exclude=_IRRELEVANT)
    # The description of a network says what is lowered for XLA, where a mode is XLA's.
    facts["has_jit"] = any(mode.traits.is_jit for mode in settings.compiled_modes)
    # Batches of a model whose images may depend on each other are not divided.
    facts["is_whole"] = settings.batch_dependence == "allow"
    # Of labels too: where the outputs don't show how many classes there are, labels do.
    for path in model_files.named_paths(settings):
        facts[str(path)] = digest(path, model_files.files_at(path))
    return facts


def network(cache: CompileCache, device: Device, settings: ModelSettings, build: Callable[[], Network]) -> Network:
    """Returns the network of `build`, which is only called where the cache lacks it.

    Nothing is kept where the model's files were changed meanwhile. Raises what `build` raises.
    """
    persistent_cache.sweep()  # executables that models which are not kept have left
    began_ns, files = time.time_ns(), model_files.state(settings)  # before they are read
    try:
        model = identity(settings)
        folder = None if model is None else cache.folder(device, model)
    except OSError:  # `build` says what is wrong with the file
        folder = None
    if folder is None:
        return build()

    def is_unchanged() -> bool:
        is_known = all(stamp.shows_changes_after(began_ns) for _, stamp in files)
        if is_known and model_files.state(settings) == files:
            return True  # reading large weights again would take seconds
        try:
            return identity(settings) == model
        except OSError:
            return False

    def build_rest() -> Network:
        """Builds a model in use whose cache lacks a part. Raises ModelFailed where its files have changed meanwhile."""
        built = build()
        if not is_unchanged():
            raise ModelFailed("source: the model's files were changed while it was loaded; load it again")
        return built

    precision = settings.precision_in(Mode.OPENVINO)
    program = CachedProgram(cache, folder, device, build_rest, settings.name, precision)
    reference = partial(_reference, folder, program)
    if (described := folder.read(NETWORK, lambda record: _described(record.header, program))) is not None:
        program.described_lowerings = described.lowerings
        return replace(described, reference=reference)
    built = build()
    if not is_unchanged():
        log.warning("model %s: its files were changed while it was loaded; nothing of it is kept", settings.title)
        return built
    program.built = built
    folder.write(NETWORK, _description(built), {})
    return replace(built, program=program, reference=reference)


def has(cache: CompileCache, device: Device, settings: ModelSettings) -> bool:
    """Returns whether the cache has been filled with a model, for some buckets at least."""
    try:
        model = identity(settings)
    except OSError:
        return False
    return model is not None and cache.folder(device, model).has(NETWORK)


def _description(network: Network) -> dict[str, Any]:
    """Returns all that is known of a network, except its program, as JSON types."""
    facts = {each.name: getattr(network, each.name) for each in fields(network) if each.name not in _APART}
    return {**facts, "task": {"kind": type(network.task).__name__, **asdict(network.task)}}


def _described(description: Mapping[str, Any], program: CachedProgram) -> Network:
    """Returns the network of a `_description`, with `program`. Raises any exception where it is no description."""
    types = get_type_hints(Network)
    values = {
        name: TypeAdapter(types[name]).validate_python(description[name]) for name in description.keys() - {"task"}
    }
    facts = dict(description["task"])
    kind: TypeAdapter[Task] = TypeAdapter(_TASKS[facts.pop("kind")])
    return Network(program=program, task=kind.validate_python(facts), **values)


def _reference(folder: Folder, program: CachedProgram, images: Images) -> Outputs:
    """Returns the outputs of `Network.reference` for `images`; builds the network only where the cache lacks them."""
    name = f"reference-{hashlib.sha256(images.data).hexdigest()[:16]}"
    if (kept := folder.read(name, _outputs)) is not None:
        return kept
    assert program.built.reference is not None  # every source of TensorFlow's has one
    outputs = program.built.reference(images)
    blobs = {
        str(index): np.ascontiguousarray(output).reshape(-1).view(np.uint8).data for index, output in enumerate(outputs)
    }
    folder.write(name, {"outputs": [(output.dtype.str, output.shape) for output in outputs]}, blobs)
    return outputs


def _outputs(record: Record) -> Outputs:
    return tuple(
        np.frombuffer(record.blobs[str(index)], dtype).reshape(shape)
        for index, (dtype, shape) in enumerate(record.header["outputs"])
    )


def _cost(record: Record) -> Cost:
    cost = Cost(**record.header)
    if not all(0 < second < math.inf for second in cost):
        raise RecordError("it holds no costs")
    return cost


def _difference(record: Record) -> float:
    difference = float(record.header["difference"])
    if not 0 <= difference < math.inf:
        raise RecordError("it holds no difference")
    return difference


def _unlowered_name(bucket: Bucket) -> str:
    return f"unlowered-{bucket.height}x{bucket.width}"


def _weights(name: str, record: Record) -> tuple[tf.Tensor, ...]:
    kinds = record.header["arrays"]
    contents = [record.blobs[str(index)] for index in range(len(kinds))]
    if _weights_name(kinds, contents) != name:
        raise RecordError("its name is not that of its contents")
    return tuple(
        tf.constant(np.frombuffer(content, tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))
        for content, (dtype, shape) in zip(contents, kinds, strict=True)
    )


def _weights_name(kinds: object, contents: Sequence[memoryview]) -> str:
    """Returns a name for weights that others don't share; `kinds`, of JSON's types, are their types and shapes."""
    sha256 = hashlib.sha256(json.dumps(kinds).encode())
    for content in contents:
        sha256.update(content)
    return f"{WEIGHTS}-{sha256.hexdigest()[:24]}"


class _KeptGraph(NamedTuple):
    """A graph that is in the cache."""

    prepare: Prepare
    from_cache: bool
    """Whether the cache had it before this load."""


@dataclass(eq=False)
class CachedProgram:
    """A `Program` that reads compiled programs from the cache, and writes those that it compiles into it.

    A program that can't be kept is compiled as usual: a failure to keep one never fails the model.
    """

    cache: CompileCache
    folder: Folder
    device: Device
    build: Callable[[], Network]
    model: str
    openvino_precision: Precision = Precision.FLOAT32

    platform = TensorFlowProgram.platform

    def __post_init__(self) -> None:
        self.described_lowerings = ""
        """The lowerings of the first size that was compiled, as the cache describes the network: `depthwise 17`."""
        self.not_kept: set[Mode] = set()
        """Modes of which a program was seen that can't be kept."""
        self._loaded_lowerings: dict[tuple[int, int], str] = {}
        """The lowerings of programs that were loaded, by height and width."""
        self._lock = threading.Lock()
        self._weights: dict[str, tuple[tf.Tensor, ...]] = {}
        self._graphs: dict[str, _KeptGraph | None] = {}
        self._running: set[FrozenGraph] = set()
        self._forgotten: set[str] = set()

    @cached_property
    def built(self) -> Network:
        """The network as its source builds it."""
        return self.build()

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Makes the executable for `mode` and `bucket`, from the cache if it can. Raises what TensorFlow raises."""
        name = f"cost-{self.device.lanes}x{self.device.threads_per_lane}-{mode}-{bucket}"
        cost = self.folder.read(name, _cost)
        if mode.traits.is_jit:
            compilation = self._compile_jit(mode, bucket, cost)
        elif mode in KINDS:
            compilation = self._compile_graph(mode, bucket, cost)
        else:
            compilation = self._program.compile(mode, bucket)
        persistent_cache.sweep()
        difference = f"difference-{self._program_name(mode, bucket)}"
        recorded = replace(
            compilation,
            cost=cost,
            keep_cost=partial(self._keep_cost, name),
            difference=self.folder.read(difference, _difference),
            keep_difference=partial(self._keep_difference, difference),
        )
        if (unlowered := compilation.unlowered) is None:
            return recorded

        def without_lowerings(error: Exception) -> Compilation:
            # Its cost is another one.
            own = unlowered(error)
            return replace(recorded, executable=own.executable, cost=None, warnings=own.warnings, unlowered=None)

        return replace(recorded, unlowered=without_lowerings)

    def seal(self) -> None:
        """Drops the network and the weights, which are the executables' now."""
        if "built" in self.__dict__:
            self._program.seal()
            self.built = replace(self.built, reference=None)
        self._weights.clear()
        self._graphs.clear()

    def dismantle(self) -> None:
        """Undoes the cycles in Python's half of each graph; none can run any more."""
        self.seal()
        if "built" in self.__dict__:
            self._program.dismantle()
        for graph in self._running:
            graph.dismantle()

    def lowerings(self, bucket: Bucket) -> str:
        """Returns the lowerings of programs for the bucket's size, `depthwise 17`; empty where those have failed."""
        is_built = "built" in self.__dict__
        if self._unlowered(bucket) is not None or (is_built and self._program.unlowered(bucket) is not None):
            return ""
        if (loaded := self._loaded_lowerings.get((bucket.height, bucket.width))) is not None:
            return loaded
        return self._program.lowerings(bucket) if is_built else self.described_lowerings

    def any_size(self) -> Executable:
        """Makes an executable for images of any size. It is not cached, so that the source has to build the network."""
        return self._program.any_size()

    @property
    def _program(self) -> TensorFlowProgram:
        with self._lock:  # built once
            program = self.built.program
        assert isinstance(program, TensorFlowProgram)
        return program

    def _compile_jit(self, mode: Mode, bucket: Bucket, cost: Cost | None) -> Compilation:
        name = self._program_name(mode, bucket)
        unlowered = self._unlowered(bucket)
        if name not in self._forgotten:
            compilation = self.folder.read(name, lambda record: self._load(name, record, bucket, cost))
            if compilation is not None:
                return compilation
        if unlowered is not None:
            self._program.leave_unlowered(bucket, unlowered)
        if not self.cache.is_filling:
            log.info("compile cache: %s is not kept", name)
            return self._program.compile(mode, bucket)
        return self._program.with_fallback(bucket, partial(self._make, mode, bucket, cost))

    def _make(self, mode: Mode, bucket: Bucket, cost: Cost | None) -> Compilation:
        """Compiles and keeps a program; one that can't be kept is compiled as usual."""
        program = self._program  # its errors are the model's own
        unlowered = program.unlowered(bucket)
        compilation = None
        if mode not in self.not_kept:
            try:
                compilation = self._compile_and_keep(program, mode, bucket, cost)
            except Exception as error:
                compilation = program.compile_once(mode, bucket)
                if program.unlowered(bucket) != unlowered:  # another thread has found lowerings to be the cause
                    return self._make(mode, bucket, cost)
                self._give_up(mode, self._program_name(mode, bucket), error)
        if compilation is None:
            compilation = program.compile_once(mode, bucket)
        if unlowered is not None and self._unlowered(bucket) is None:
            self.folder.write(_unlowered_name(bucket), {"reason": unlowered}, {})
        return compilation

    def _unlowered(self, bucket: Bucket) -> str | None:
        """Returns why images of the bucket's size are not lowered, where an earlier start has found that out."""
        return self.folder.read(_unlowered_name(bucket), lambda record: str(record.header["reason"]))

    def _compile_graph(self, mode: Mode, bucket: Bucket, cost: Cost | None) -> Compilation:
        began = time.perf_counter()
        name = f"{mode}-{bucket.height}x{bucket.width}"
        if name not in self._graphs:
            self._graphs[name] = self._graph(mode, bucket, name)
        if (graph := self._graphs[name]) is None:
            return self._program.compile(mode, bucket)
        prepared = graph.prepare(bucket)
        if isinstance(prepared, FrozenGraph):
            self._running.add(prepared)
        compilation = run_first(prepared, bucket, began, run_s=cost and cost.alone_s)
        return replace(compilation, from_cache=graph.from_cache, forget=partial(self._forget, name))

    def _graph(self, mode: Mode, bucket: Bucket, name: str) -> _KeptGraph | None:
        """Reads the graph that all buckets of a size share, or makes and keeps it; None where it can't be frozen."""
        kind = KINDS[mode]
        kind.check()
        graph = None if name in self._forgotten else self.folder.read(name, kind.read)
        from_cache = graph is not None
        if graph is None:
            program = self._program  # its errors are the model's own
            try:
                graph = kind.make(program, bucket)
            except UnfreezableError as error:
                self._give_up(mode, name, error)
                return None
            self._keep_graph(mode, name, partial(kind.write, graph))
        return _KeptGraph(kind.start(graph, self.openvino_precision), from_cache)

    def _keep_graph(self, mode: Mode, name: str, write: Callable[[], Contents]) -> None:
        if not self.cache.is_filling:
            log.info("compile cache: %s is not kept", name)
            return
        try:
            self.folder.write(name, *write())
        except Exception as error:
            self._give_up(mode, name, error)

    def _compile_and_keep(
        self, program: TensorFlowProgram, mode: Mode, bucket: Bucket, cost: Cost | None
    ) -> Compilation:
        began = time.perf_counter()
        lowered = program.lowered(mode, bucket)
        if program.assigns_variables:
            raise ValueError("it assigns variables")
        traced = stablehlo.export(lowered.in_parts(bucket), (*bucket, CHANNELS))
        compilation, executables = self._run(traced, bucket, began, cost)
        self._keep(self._program_name(mode, bucket), traced, executables, lowered.text)
        return replace(compilation, warnings=lowered.warnings)

    def _program_name(self, mode: Mode, bucket: Bucket) -> str:
        # Lanes of one thread may have a batch divided; on a GPU none is.
        is_whole = self.device.kind == "cpu" and self.device.threads_per_lane > 1
        return f"{mode}-{bucket}-whole" if is_whole else f"{mode}-{bucket}"

    def _give_up(self, mode: Mode, name: str, error: Exception) -> None:
        """Says, once for all buckets, that the model's programs in a mode can't be kept."""
        with self._lock:
            is_first = mode not in self.not_kept
            self.not_kept.add(mode)
        if is_first:
            log.warning(
                "model %s: compile_cache can't keep its programs, each start compiles them: %s",
                self.model,
                f"{type(error).__name__}: {cause(error)}",
            )
        log.debug("compile cache: %s", name, exc_info=error)

    def _load(self, name: str, record: Record, bucket: Bucket, cost: Cost | None) -> Compilation | None:
        began = time.perf_counter()
        header = record.header
        if (weights := self._read_weights(header["weights"])) is None:
            return None
        blobs = dict(record.blobs)
        outputs = tuple(tf.TensorSpec(shape, dtype) for dtype, shape in header["outputs"])
        traced = stablehlo.TracedFunction(bytes(blobs.pop(MODULE)), weights, outputs)
        persistent_cache.put(blobs)
        compilation, compiled = self._run(traced, bucket, began, cost)
        from_cache = compiled.keys() <= blobs.keys()
        lowerings = header.get(LOWERINGS)
        if not from_cache:
            self._keep(name, traced, compiled, lowerings)
        # Another program of its size may have failed with lowerings, and this one not.
        warning = None if lowerings else self._unlowered(bucket)
        if lowerings is not None:
            self._loaded_lowerings[bucket.height, bucket.width] = lowerings
        return replace(
            compilation,
            warnings=() if warning is None else (warning,),
            from_cache=from_cache,
            forget=partial(self._forget, name),
        )

    def _forget(self, name: str) -> None:
        self._graphs.pop(name, None)
        self._forgotten.add(name)  # a read-only cache still has the record
        self.folder.discard(name, "its answers are not the model's")

    def _run(
        self, traced: stablehlo.TracedFunction, bucket: Bucket, began: float, cost: Cost | None
    ) -> tuple[Compilation, dict[str, bytes]]:
        """Compiles or loads a function by running it, and returns the executables that TensorFlow then has."""
        try:
            function = Function(stablehlo.load(traced, self.device.kind))
            compilation = run_first(function, bucket, began, run_s=cost and cost.alone_s)
        finally:
            executables = persistent_cache.take(traced.name)  # one that can't be loaded fails the next try as well
        return compilation, executables

    def _keep(
        self, name: str, traced: stablehlo.TracedFunction, executables: Mapping[str, bytes], lowerings: str | None
    ) -> None:
        header = {
            "weights": self._keep_weights(traced.arguments),
            "outputs": [(output.dtype.name, output.shape.as_list()) for output in traced.outputs],
            LOWERINGS: lowerings,
        }
        self.folder.write(name, header, {MODULE: traced.module, **executables})

    def _keep_weights(self, weights: tuple[tf.Tensor, ...]) -> str:
        arrays = [weight.numpy() for weight in weights]
        contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        kinds = [(weight.dtype.name, array.shape) for weight, array in zip(weights, arrays, strict=True)]
        name = _weights_name(kinds, contents)
        with self._lock:
            if name not in self._weights:
                blobs = {str(index): content for index, content in enumerate(contents)}
                self.folder.write(name, {"arrays": kinds}, blobs)
                self._weights[name] = weights
        return name

    def _read_weights(self, name: str) -> tuple[tf.Tensor, ...] | None:
        with self._lock:
            if name not in self._weights:
                if (weights := self.folder.read(name, partial(_weights, name))) is None:
                    return None
                self._weights[name] = weights
            return self._weights[name]

    def _keep_cost(self, name: str, cost: Cost) -> None:
        if self.cache.is_filling:
            self.folder.write(name, cost._asdict(), {})

    def _keep_difference(self, name: str, difference: float) -> None:
        # Of programs made beside traffic, too: their graph may have been kept before.
        self.folder.write(name, {"difference": difference}, {})
