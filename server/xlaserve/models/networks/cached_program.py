"""Programs from the compile cache, and programs that are compiled and kept in it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, NamedTuple

import tensorflow as tf

from xlaserve.config import Bucket, Mode, Precision
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.causes import cause
from xlaserve.engine.inputs import RGB_IMAGE, shapes
from xlaserve.engine.program import Compilation, Executable
from xlaserve.models.networks.kept_graphs import KINDS, Contents, Prepare
from xlaserve.models.networks.kept_weights import KeptWeights
from xlaserve.models.networks.network import Network
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.records import Record, RecordError, RecordFolder
from xlaserve.programs.tf import stablehlo, xla_executable_cache
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.first_run import run_first
from xlaserve.programs.tf.frozen_graph import FrozenGraph, UnfreezableError
from xlaserve.programs.tf.function import Function, specs
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

log = logging.getLogger(__name__)

MODULE: Final = "module"
LOWERINGS: Final = "lowerings"
"""Key of the lowerings of a program; programs that an earlier version of xlaserve has kept lack it."""


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
    folder: RecordFolder
    device: Device
    build: Callable[[], Network]
    model: str
    openvino_precision: Precision = Precision.FLOAT32

    platform = TensorFlowProgram.platform

    def __post_init__(self) -> None:
        self.inputs = RGB_IMAGE
        """Its inputs, as the cache describes the network."""
        self.described_lowerings = ""
        """The lowerings of the first size that was compiled, as the cache describes the network: `depthwise 17`."""
        self.not_kept: set[Mode] = set()
        """Modes of which a program was seen that can't be kept."""
        self._loaded_lowerings: dict[tuple[int, int], str] = {}
        """The lowerings of programs that were loaded, by height and width."""
        self._lock = threading.Lock()
        self._weights = KeptWeights(self.folder)
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
        xla_executable_cache.sweep()
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
    def _dtypes(self) -> tuple[tf.DType, ...]:
        return tuple(tf.as_dtype(each.dtype) for each in self.inputs)

    @property
    def _program(self) -> TensorFlowProgram:
        with self._lock:  # built once
            program = self.built.program
        assert isinstance(program, TensorFlowProgram)
        return program

    def _compile_jit(self, mode: Mode, bucket: Bucket, cost: Cost | None) -> Compilation:
        name = self._program_name(mode, bucket)
        if name not in self._forgotten:
            compilation = self.folder.read(name, lambda record: self._load(name, record, bucket, cost))
            if compilation is not None:
                return compilation
        if (unlowered := self._unlowered(bucket)) is not None:
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
        prepared = graph.prepare(shapes(self.inputs, bucket))
        if isinstance(prepared, FrozenGraph):
            self._running.add(prepared)
        compilation = run_first(prepared, self.inputs, bucket, began, run_s=cost and cost.alone_s)
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
        traced = stablehlo.export(lowered.in_parts(bucket), specs(self.inputs, *bucket))
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
        if (weights := self._weights.read(header["weights"])) is None:
            return None
        blobs = dict(record.blobs)
        outputs = tuple(tf.TensorSpec(shape, dtype) for dtype, shape in header["outputs"])
        traced = stablehlo.TracedFunction(bytes(blobs.pop(MODULE)), weights, outputs, self._dtypes)
        xla_executable_cache.put(blobs)
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
            compilation = run_first(function, self.inputs, bucket, began, run_s=cost and cost.alone_s)
        finally:
            executables = xla_executable_cache.take(traced.name)  # one that can't be loaded fails the next try as well
        return compilation, executables

    def _keep(
        self, name: str, traced: stablehlo.TracedFunction, executables: Mapping[str, bytes], lowerings: str | None
    ) -> None:
        header = {
            "weights": self._weights.keep(traced.arguments),
            "outputs": [(output.dtype.name, output.shape.as_list()) for output in traced.outputs],
            LOWERINGS: lowerings,
        }
        self.folder.write(name, header, {MODULE: traced.module, **executables})

    def _keep_cost(self, name: str, cost: Cost) -> None:
        if self.cache.is_filling:
            self.folder.write(name, cost._asdict(), {})

    def _keep_difference(self, name: str, difference: float) -> None:
        # Of programs made beside traffic, too: their graph may have been kept before.
        self.folder.write(name, {"difference": difference}, {})


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
