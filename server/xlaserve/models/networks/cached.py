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
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Final, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from xlaserve.config import Mode, ModelSettings, model_files
from xlaserve.engine.program import Outputs
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.cached_program import CachedProgram
from xlaserve.models.networks.model_identity import identity
from xlaserve.models.networks.network import Network
from xlaserve.models.task import Task, Tensors
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.records import Record, RecordFolder
from xlaserve.programs.tf import xla_executable_cache
from xlaserve.programs.tf.device import Device

log = logging.getLogger(__name__)

NETWORK: Final = "network"
_APART: Final = {"program", "reference"}
"""Fields of a network that are not part of its description."""
_TASKS: Final = {kind.__name__: kind for kind in get_args(Task)}


def network(cache: CompileCache, device: Device, settings: ModelSettings, build: Callable[[], Network]) -> Network:
    """Returns the network of `build`, which is only called where the cache lacks it.

    Nothing is kept where the model's files were changed meanwhile. Raises what `build` raises.
    """
    xla_executable_cache.sweep()  # executables that models which are not kept have left
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
        program.described_lowerings, program.inputs = described.lowerings, described.inputs
        return replace(described, reference=reference)
    built = build()
    if not is_unchanged():
        log.warning("model %s: its files were changed while it was loaded; nothing of it is kept", settings.title)
        return built
    program.built, program.inputs = built, built.inputs
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
    preparation = network.preparation
    return {
        **facts,
        "task": _task_facts(network.task),
        "image": asdict(network.image),
        "others": [None if image is None else asdict(image) for image in network.others],
        "preparation": [preparation.resize.model_dump(mode="json"), *preparation[1:]],
    }


def _task_facts(task: Task) -> dict[str, Any]:
    facts = {"kind": type(task).__name__, **asdict(task)}
    return {**facts, "readings": [*map(_task_facts, task.readings)]} if isinstance(task, Tensors) else facts


def _task(facts: Mapping[str, Any]) -> Any:
    """Returns the task of `_task_facts`. Raises any exception where these are of none."""
    kind: TypeAdapter[Any] = TypeAdapter(_TASKS[facts["kind"]])
    task = kind.validate_python({name: value for name, value in facts.items() if name not in ("kind", "readings")})
    return replace(task, readings=tuple(map(_task, facts["readings"]))) if isinstance(task, Tensors) else task


def _described(description: Mapping[str, Any], program: CachedProgram) -> Network:
    """Returns the network of a `_description`, with `program`. Raises any exception where it is no description."""
    types = get_type_hints(Network)
    values = {
        name: TypeAdapter(types[name]).validate_python(description[name]) for name in description.keys() - {"task"}
    }
    return Network(program=program, task=_task(description["task"]), **values)


def _reference(folder: RecordFolder, program: CachedProgram, *rows: NDArray[Any]) -> Outputs:
    """Returns the outputs of `Network.reference` for `rows`; builds the network only where the cache lacks them."""
    sha256 = hashlib.sha256()
    for each in rows:
        sha256.update(np.ascontiguousarray(each).data)
    name = f"reference-{sha256.hexdigest()[:16]}"
    if (kept := folder.read(name, _outputs)) is not None:
        return kept
    assert program.built.reference is not None  # every source of TensorFlow's has one
    outputs = program.built.reference(*rows)
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
