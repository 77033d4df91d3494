"""Networks from SavedModel folders."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.saved_model import loader_impl, revived_types

from xlaserve.config import Mode, ModelSettings
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.models import lowering
from xlaserve.models.networks import reading
from xlaserve.models.networks.assemble import assemble, probe
from xlaserve.models.networks.heads import Head, TensorShape
from xlaserve.models.networks.image_tensor import Call
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.network_inputs import NetworkInputs, network_inputs
from xlaserve.models.networks.preparation import KERAS, OF_GRAPH
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.models.sources import file_content, functions
from xlaserve.models.sources.functions import Found

DEFAULT_SIGNATURE: Final = "serving_default"
SERVING: Final = "serve"
"""The tag of graphs for serving."""
OPTIMIZER: Final = "optimizer"
"""Keras 2's name of the type of its optimizers in a SavedModel."""

_log = logging.getLogger(__name__)


KERAS_MARKS: Final = ("keras_api", "_inbound_nodes", "_misc_assets")
"""Names that Keras 2, Keras 3 and the archives that Keras 3 exports give to parts of a model in a SavedModel."""


class Optimizer(tf.Module):  # type: ignore[misc]
    """Replaces an optimizer that was saved with a model, as TensorFlow can't load it; its values are not loaded."""

    def add_slot(self, var: tf.Variable, slot_name: str, initializer: str = "zeros") -> tf.Variable:
        """Returns a variable in the place of one that is as large as `var`."""
        return tf.Variable(tf.zeros((), var.dtype), trainable=False)

    def _create_or_restore_slot_variable(self, slot_variable_position: Any, slot_name: str, variable: object) -> None:
        """Leaves the values in the file, and has TensorFlow not warn of each."""
        slot_variable_position.checkpoint.expect_partial = True


def is_saved_model(folder: Path) -> bool:
    """Returns whether `folder` holds a SavedModel."""
    return bool(tf.saved_model.contains_saved_model(str(folder)))


def saved_model(folder: Path, settings: ModelSettings, weights: str | None = None) -> Network:
    """Loads a signature of a SavedModel or, where it has none or the settings name one, a function of it.

    `weights` is the name of what it was made of, by default its own. The function runs as it was exported: in the mode
    eager too, as a graph. Raises ModelFailed.
    """
    return of_function(load(folder, settings), settings, weights=weights or folder.name)


def of_function(found: Found, settings: ModelSettings, *, weights: str) -> Network:
    """Returns the network of a function that was found in a graph. Raises ModelFailed."""
    made = network(found, settings, weights=weights)
    if found.resize is None:
        return replace(made, preparation=KERAS) if found.is_keras else made
    how = f", which the graph does with {found.resize}," if found.resize else ""
    _log.info("model %s: its graph decodes images; the server decodes and resizes%s in its place", settings.title, how)
    return replace(made, preparation=OF_GRAPH) if found.resize else made


def load(folder: Path, settings: ModelSettings) -> Found:
    """Returns the function of a SavedModel that the settings choose; of any batch size, where it can run so.

    Raises ModelFailed.
    """
    _know_optimizers()
    try:
        loaded = tf.saved_model.load(str(folder), tags=_tags(folder))
    except NotImplementedError as error:
        raise ModelFailed(
            f"source: {folder.name} is of TensorFlow 1, and only its sessions load it: {cause(error)}; write its graph"
            " there with tf.graph_util.convert_variables_to_constants, and serve that .pb file"
        ) from error
    except (OSError, tf.errors.OpError) as error:
        if "Failed to find any matching files" in str(error) and not file_content.has_variables(folder):
            raise file_content.without_variables(folder) from error
        raise
    if settings.function is not None or not loaded.signatures:
        if settings.signature is not None:
            known = ", ".join(sorted(loaded.signatures)) or "none"
            raise ModelFailed(
                f"signature: expected one of {known} and no function, got {settings.signature}; leave signature out"
            )
        name, function = functions.choose(loaded, settings.function)
    else:
        name = _signature(loaded.signatures, settings.signature)
        function = loaded.signatures[name]
    is_keras = any(hasattr(loaded, mark) for mark in KERAS_MARKS)
    try:
        return functions.found(loaded, function, name)._replace(is_keras=is_keras)
    except functions.TextInputError as error:
        signatures = [one for one, other in loaded.signatures.items() if functions.takes_pixels(other)]
        others = [f"signature: {one}" for one in sorted(signatures)]
        others += [f"function: {one}" for one in functions.of_pixels(loaded)]
        if not others or settings.function is not None or settings.signature is not None:
            raise
        raise ModelFailed(f"source: expected pixels, but {name} takes text; write {' or '.join(others)}") from error


def _tags(folder: Path) -> list[str] | None:
    """Returns the tags of the graph for serving, where there are several graphs."""
    graphs: list[set[str]] = [
        set(graph.meta_info_def.tags) for graph in loader_impl.parse_saved_model(str(folder)).meta_graphs
    ]
    if len(graphs) < 2:
        return None
    serving = [tags for tags in graphs if SERVING in tags] or graphs
    return min(map(sorted, serving), key=len)


def _signature(signatures: Iterable[str], wanted: str | None) -> str:
    names = sorted(signatures)
    name = wanted or (names[0] if len(names) == 1 else DEFAULT_SIGNATURE)
    if name not in names:
        known = ", ".join(names) or "none"
        raise ModelFailed(
            f"signature: expected one of {known}, got {wanted or f'nothing named and no {DEFAULT_SIGNATURE}'};"
            f" write signature: {names[0]}"
        )
    return name


def _know_optimizers() -> None:
    """Has TensorFlow load SavedModels of Keras 2 that hold an optimizer and its slots: without Keras 2 it can't."""
    if OPTIMIZER not in revived_types.registered_identifiers():
        version = revived_types.VersionedTypeRegistration(
            lambda proto: Optimizer(), version=1, min_producer_version=1, min_consumer_version=1
        )
        revived_types.register_revived_type(OPTIMIZER, lambda one: isinstance(one, Optimizer), [version])


def network(found: Found, settings: ModelSettings, *, weights: str, head: Head | None = None) -> Network:
    """Returns the network of an exported function; `head` is for outputs that the settings need not describe.

    Raises ModelFailed.
    """
    inputs = network_inputs(found.inputs, settings)
    return arranged(
        inputs.last(found.call),
        inputs,
        found.outputs,
        settings,
        weights=weights,
        is_first=inputs.gives_first,
        head=head,
    )


def arranged(
    call: Call,
    inputs: NetworkInputs,
    outputs: Mapping[str, TensorShape],
    settings: ModelSettings,
    *,
    weights: str,
    is_first: reading.IsFirst = lambda _: False,
    head: Head | None = None,
) -> Network:
    """Returns the network of a function that takes the channels of images last; `is_first` is whether its maps have
    theirs first, `head` is chosen by outputs and settings where it is None. Raises ModelFailed."""
    preprocessing: Preprocess = "none" if settings.preprocess == "auto" else settings.preprocess
    return assemble(
        call,
        head or reading.choose(outputs, settings, lambda: probe(call, inputs, preprocessing, settings), is_first),
        inputs=inputs,
        preprocessing=preprocessing,
        weights=weights,
        lower=lowering.for_settings(settings),
        openvino_precision=settings.precision_in(Mode.OPENVINO),
        calibration=settings.calibration,
    )
