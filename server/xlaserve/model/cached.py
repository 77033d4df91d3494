"""Models from the compile cache: what was built, traced, compiled and timed before, without Keras.

A model's folder holds what its source gave (`network`), its weights (`weights-<digest>`), a program for each bucket
(`xla-<bucket>`: StableHLO and XLA's executable) and what each costs (`cost-<lanes>x<threads>-<mode>-<bucket>`). Only
programs of the mode `xla` are kept; for others the model is built as ever.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import numpy as np
import tensorflow as tf
from pydantic import TypeAdapter

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine import stablehlo
from xlaserve.engine.buckets import Cost
from xlaserve.engine.cache.cache import CompileCache
from xlaserve.engine.cache.environment import digest
from xlaserve.engine.cache.records import Folder, Record
from xlaserve.engine.device import Device
from xlaserve.engine.executable import CHANNELS, FixedShape, Function, TensorFlowProgram
from xlaserve.engine.program import Compilation, Executable, Images, Outputs
from xlaserve.model import catalog
from xlaserve.model.network import Network
from xlaserve.model.task import Task

log = logging.getLogger(__name__)

NETWORK: Final = "network"
MODULE: Final = "module"
_IRRELEVANT: Final = {
    *("name", "version", "fit", "modes", "default_mode", "buckets", "auto_buckets", "unmatched"),
    *("max_background_resolutions", "max_queue_delay_ms", "max_queue_images"),
}
"""Settings that change nothing in what is computed. A setting that is not named here makes another model."""
_APART: Final = {"program", "reference"}
"""What of a network is no description of it."""
_TASKS: Final = {kind.__name__: kind for kind in get_args(Task)}


def identity(settings: ModelSettings) -> dict[str, Any] | None:
    """Returns what makes a model another one: settings, and the contents of files that they name.

    None where that can't be told: the code of custom objects, and what a handle of Kaggle stands for, may change.
    Raises OSError where a file can't be read.
    """
    if settings.custom_objects or settings.source.startswith(catalog.KAGGLE):
        return None
    facts = settings.model_dump(mode="json", exclude=_IRRELEVANT)
    # Of labels too: where the outputs don't show how many classes there are, labels do.
    for path in [Path(named) for named in (settings.source, settings.weights, settings.labels) if named]:
        if path.is_file():
            facts[str(path)] = digest([path])
        elif path.is_dir():
            facts[str(path)] = digest(file for file in path.rglob("*") if file.is_file())
    return facts


def network(cache: CompileCache, device: Device, settings: ModelSettings, build: Callable[[], Network]) -> Network:
    """Returns the network that `build` builds, which is only called where the cache does not do."""
    try:
        model = identity(settings)
    except OSError:  # `build` says what is wrong with the file
        model = None
    if model is None:
        return build()
    folder = cache.folder(device, model)
    program = CachedProgram(cache, folder, device, build)
    reference = partial(_reference, folder, program)
    if (record := folder.read(NETWORK)) is not None:
        return Network(program=program, reference=reference, **_described(record.header))
    folder.write(NETWORK, _description(program.built), {})
    return replace(program.built, program=program, reference=reference)


def _description(network: Network) -> dict[str, Any]:
    """Returns all that is known of a network but its program, of JSON's types."""
    facts = {each.name: getattr(network, each.name) for each in fields(network) if each.name not in _APART}
    return {**facts, "task": {"kind": type(network.task).__name__, **asdict(network.task)}}


def _described(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `_description` was made of."""
    types = get_type_hints(Network)
    values = {
        name: TypeAdapter(types[name]).validate_python(description[name]) for name in description.keys() - {"task"}
    }
    facts = dict(description["task"])
    kind: TypeAdapter[Task] = TypeAdapter(_TASKS[facts.pop("kind")])
    return {**values, "task": kind.validate_python(facts)}


def _reference(folder: Folder, program: CachedProgram, images: Images) -> Outputs:
    """Returns what `Network.reference` answers to `images`, without building the network where it was asked before."""
    name = f"reference-{hashlib.sha256(images.data).hexdigest()[:16]}"
    if (record := folder.read(name)) is not None:
        return tuple(
            np.frombuffer(record.blobs[str(index)], dtype).reshape(shape)
            for index, (dtype, shape) in enumerate(record.header["outputs"])
        )
    assert program.built.reference is not None  # every source of TensorFlow's has one
    outputs = program.built.reference(images)
    blobs = {
        str(index): np.ascontiguousarray(output).reshape(-1).view(np.uint8).data for index, output in enumerate(outputs)
    }
    folder.write(name, {"outputs": [(output.dtype.str, output.shape) for output in outputs]}, blobs)
    return outputs


class CachedProgram:
    """A `Program` that reads what was compiled before, and keeps what it compiles."""

    platform = TensorFlowProgram.platform

    def __init__(self, cache: CompileCache, folder: Folder, device: Device, build: Callable[[], Network]) -> None:
        self._cache = cache
        self._executables = cache.executables
        self._folder = folder
        self._device = device
        self._build = build
        self._lock = threading.Lock()
        self._weights: dict[str, tuple[tf.Tensor, ...]] = {}

    @cached_property
    def built(self) -> Network:
        """The network as its source builds it."""
        return self._build()

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Makes the executable for `mode` and `bucket` of what was kept, or anew. Raises what TensorFlow raises."""
        name = f"cost-{self._device.lanes}x{self._device.threads_per_lane}-{mode}-{bucket}"
        record = self._folder.read(name)
        cost = None if record is None else Cost(**record.header)
        compilation = self._compile_xla(bucket, cost) if mode is Mode.XLA else self._program.compile(mode, bucket)
        return replace(compilation, cost=cost, keep_cost=partial(self._keep_cost, name))

    def any_size(self) -> Executable:
        """Makes what runs images of any size, as it is not kept, of the network as its source builds it."""
        return self._program.any_size()

    @property
    def _program(self) -> TensorFlowProgram:
        with self._lock:  # built once
            program = self.built.program
        assert isinstance(program, TensorFlowProgram)
        return program

    def _compile_xla(self, bucket: Bucket, cost: Cost | None) -> Compilation:
        name = f"{Mode.XLA}-{bucket}"
        record = self._folder.read(name)
        if record is not None:
            try:
                if (compilation := self._load(name, record, bucket, cost)) is not None:
                    return compilation
            except Exception as error:
                log.debug("compile cache: %s", name, exc_info=error)
                self._folder.discard(name, f"{type(error).__name__} when it was loaded")
        if not self._cache.is_filling:
            log.info("compile cache: %s is not kept", name)
            return self._program.compile(Mode.XLA, bucket)
        began = time.perf_counter()
        try:
            traced = stablehlo.export(self._program.trace(bucket), (*bucket, CHANNELS))
        except Exception as error:
            log.warning("compile cache: %s can't be kept: %s", name, type(error).__name__)
            log.debug("compile cache: %s", name, exc_info=error)
            return self._program.compile(Mode.XLA, bucket)
        compilation, executables = self._run(traced, bucket, began, cost)
        self._keep(name, traced, executables)
        return compilation

    def _load(self, name: str, record: Record, bucket: Bucket, cost: Cost | None) -> Compilation | None:
        began = time.perf_counter()
        header = record.header
        if (weights := self._read_weights(header["weights"])) is None:
            return None
        blobs = dict(record.blobs)
        outputs = tuple(stablehlo.Output(dtype, tuple(shape)) for dtype, shape in header["outputs"])
        traced = stablehlo.TracedFunction(bytes(blobs.pop(MODULE)), weights, outputs)
        self._executables.put(blobs)
        compilation, compiled = self._run(traced, bucket, began, cost)
        from_cache = compiled.keys() <= blobs.keys()
        if not from_cache:
            self._keep(name, traced, compiled)
        return replace(compilation, from_cache=from_cache)

    def _run(
        self, traced: stablehlo.TracedFunction, bucket: Bucket, began: float, cost: Cost | None
    ) -> tuple[Compilation, dict[str, bytes]]:
        """Compiles or loads a function by running it, and returns the executables that TensorFlow then has."""
        shape = (*bucket, CHANNELS)
        executable = FixedShape(Function(stablehlo.load(traced, shape, self._device.kind)), shape)
        blank = np.zeros(shape, np.uint8)
        loaded = time.perf_counter()
        executable(blank)
        compiled = time.perf_counter()
        if cost is None:
            executable(blank)
        run_s = time.perf_counter() - compiled if cost is None else cost.alone_s
        compile_s = max(0.0, compiled - loaded - run_s)
        return Compilation(executable, loaded - began, compile_s), self._executables.take(traced.name)

    def _keep(self, name: str, traced: stablehlo.TracedFunction, executables: Mapping[str, bytes]) -> None:
        header = {
            "weights": self._keep_weights(traced.arguments),
            "outputs": [(output.dtype, output.shape) for output in traced.outputs],
        }
        self._folder.write(name, header, {MODULE: traced.module, **executables})

    def _keep_weights(self, weights: tuple[tf.Tensor, ...]) -> str:
        arrays = [weight.numpy() for weight in weights]
        contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        sha256 = hashlib.sha256()
        for content in contents:
            sha256.update(content)
        name = f"weights-{sha256.hexdigest()[:24]}"
        with self._lock:
            if name not in self._weights:
                header = {
                    "arrays": [(weight.dtype.name, array.shape) for weight, array in zip(weights, arrays, strict=True)]
                }
                self._folder.write(name, header, {str(index): content for index, content in enumerate(contents)})
                self._weights[name] = weights
        return name

    def _read_weights(self, name: str) -> tuple[tf.Tensor, ...] | None:
        with self._lock:
            if name not in self._weights:
                if (record := self._folder.read(name)) is None:
                    return None
                self._weights[name] = tuple(
                    tf.constant(
                        np.frombuffer(record.blobs[str(index)], tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
                    )
                    for index, (dtype, shape) in enumerate(record.header["arrays"])
                )
            return self._weights[name]

    def _keep_cost(self, name: str, cost: Cost) -> None:
        if self._cache.is_filling:
            self._folder.write(name, cost._asdict(), {})
