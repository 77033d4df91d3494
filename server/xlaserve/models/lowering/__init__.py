"""Other ways to compute what XLA's CPU backend is slow at: the same weights, the same result up to rounding.

A traced function is built again, whatever it was traced from, with some of its operations replaced. The original stays
as it is, for the other modes and for a GPU, whose libraries have fast kernels for all of this.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

import tensorflow as tf

from xlaserve.config import Lowering, ModelSettings
from xlaserve.models.lowering import (
    depthwise,
    grouped,
    micro_batches,
    normalization,
    pointwise,
    pooling,
    resize,
    small,
    stem,
    winograd,
)
from xlaserve.models.lowering.replay import READ, Node, Substitute, replay, widened_cast
from xlaserve.programs.tf.definitions import has_narrow
from xlaserve.programs.tf.frozen_graph import assigns_variables, own_inputs
from xlaserve.programs.tf.lowered_function import Lower, Lowered

SUBSTITUTES: Final[Mapping[Lowering, Substitute]] = {
    Lowering.FLOAT32: widened_cast,
    Lowering.DEPTHWISE: depthwise.substitute,
    Lowering.GROUPED: grouped.substitute,
    Lowering.STEM: stem.substitute,
    Lowering.POINTWISE: pointwise.substitute,
    Lowering.SMALL: small.substitute,
    Lowering.WINOGRAD: winograd.substitute,
    Lowering.NORMALIZATION: normalization.substitute,
    Lowering.POOLING: pooling.substitute,
    Lowering.RESIZE: resize.substitute,
}
"""Substitutes in the order in which they are tried: the first that returns a tensor replaces the operation."""

FLOATS: Final = (tf.float32, tf.bfloat16, tf.float16)

_log = logging.getLogger(__name__)


def for_settings(settings: ModelSettings) -> Lower | None:
    """Returns the lowering of a model with `settings`; None where XLA runs it without lowerings or not at all."""
    if not any(mode.traits.is_jit for mode in settings.compiled_modes) or tf.config.get_visible_devices("GPU"):
        return None
    names = {*Lowering} - {*settings.disable_lowerings}
    has_one_thread = tf.config.threading.get_intra_op_parallelism_threads() == 1
    if settings.batch_dependence == "allow" or not has_one_thread:
        names.discard(Lowering.MICRO_BATCHES)
    return (lambda function: lower(function, names)) if names else None


def lower(function: Any, names: Collection[Lowering]) -> Lowered:
    """Returns a concrete function of tensors with the lowerings `names`.

    It stays as it is where they have nothing to replace, where it assigns variables, and where it can't be built again.
    """
    counts: Counter[Lowering] = Counter()
    scopes: dict[str, str] = {}
    values: dict[int, tf.Tensor] = {}
    substitutes = {name: substitute for name, substitute in SUBSTITUTES.items() if name in names}

    def substitute(node: Node) -> tf.Tensor | None:
        if node.kind == READ:
            return value(node) if is_divisible and not node.is_stored_narrow else None
        if node.operation.outputs[0].dtype not in FLOATS:
            return None
        for name, each in substitutes.items():
            if (substituted := each(node)) is not None:
                counts[name] += 1
                scopes[f"{node.name}/"] = name
                return substituted
        return None

    def value(node: Node) -> tf.Tensor | None:
        # The same tensor each time that a variable is read, which is one argument then.
        (handle,) = node.inputs
        if id(handle.tensor) not in values and node.results:
            (values[id(handle.tensor)],) = node.results
        return values.get(id(handle.tensor))

    def lowered(*inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return replay(function, substitute, inputs, is_wide=is_wide)

    is_wide = Lowering.FLOAT32 in names and has_narrow(function)
    is_divisible = Lowering.MICRO_BATCHES in names and micro_batches.are_possible(function)
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in own_inputs(function)]
    if not assigns_variables(function):
        try:
            made = tf.function(lowered, autograph=False).get_concrete_function(*specs)
        except Exception as error:  # a graph may hold anything
            _log.info("not lowered: %s", error)
            if is_wide:  # widening may be the cause
                return lower(function, {*names} - {Lowering.FLOAT32})
        else:
            text = ", ".join(f"{name} {counts[name]}" for name in SUBSTITUTES if counts[name])
            if is_divisible and not any(captured.dtype == tf.resource for captured in made.captured_inputs):
                return Lowered(made, text, scopes, micro_batches.divided)
            if counts:
                return Lowered(made, text, scopes)
    return Lowered(function, "")
