"""Concrete functions, as TensorFlow loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import DTYPES, OF_TEXT, WITHOUT_FUNCTION
from xlaserve.models.networks import any_batch, heads
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.networks.image_tensor import Call
from xlaserve.models.output_facts import lacks_images
from xlaserve.models.sources import encoded_input
from xlaserve.models.sources.reference_variables import ReferenceVariables
from xlaserve.programs.tf.frozen_graph import own_inputs

CALL: Final = "__call__"


class Found(NamedTuple):
    """A function of one input or several."""

    call: Call
    inputs: Mapping[str, TensorShape]
    outputs: Mapping[str, TensorShape]
    resize: str | None = None
    """The operation, in words, with which its graph resized encoded images, which the server decodes and resizes in its
    place; empty where it did not resize them. None where it takes pixels."""
    is_keras: bool = False
    """Whether Keras wrote it."""


class TextInputError(ModelFailed):
    """A function takes text that can't be replaced by pixels."""


def found(owner: Any, function: Any, name: str) -> Found:
    """Returns a concrete function for use; of any batch size, where it was made for one and can run so.

    An output of a function for one image gets an axis for images where it has none.

    `owner` holds the variables that it refers to weakly, `name` is its name in messages. Raises ModelFailed where it
    takes no input, TextInputError where it takes text other than images whose decoding can be cut off.
    """
    tensors = _tensors(function)
    if not tensors:
        raise ModelFailed(
            f"source: expected a signature of one input or several, but {name} takes none; name another: signature:"
            " NAME, as xlaserve inspect lists them"
        )
    inputs = dict(zip(_names(tensors), map(_shape, tensors), strict=True))
    variables = ReferenceVariables(function)
    if len(tensors) == 1 and tensors[0].dtype == tf.string:
        try:
            of_pixels, resize = encoded_input.cut(function, variables)
        except ValueError as error:
            text = _shape(tensors[0])
            raise TextInputError(f"source: expected pixels, got {text} ({error}): {OF_TEXT}") from error
        return found((owner, variables), of_pixels, name)._replace(resize=resize)
    if variables:
        without = found((owner, variables), variables.replaced(function), name)
        return without._replace(inputs=dict(zip(inputs, without.inputs.values(), strict=True)))
    structure = function.structured_outputs
    named = any_batch.named(structure, structure)
    # The order of a mapping differs from one loading to the next.
    ordered = sorted(named.items()) if isinstance(structure, Mapping) else named.items()
    outputs = {name: _shape(output) for name, output in ordered}
    if len(inputs) == 1:

        def run(*values: tf.Tensor) -> heads.Raw:
            return any_batch.named(structure, function(*values))

    else:
        arguments = _arguments(function)

        def run(*values: tf.Tensor) -> heads.Raw:
            positional, named = arguments(values)
            return any_batch.named(structure, function(*positional, **named))

    lacking: set[str] = set()
    if (free := any_batch.widened(function, run, [*inputs.values()])) is not None:
        inputs = {name: each.of_any_batch for name, each in inputs.items()}
        outputs = {name: output.of_any_batch for name, output in outputs.items()}
        run = free
    else:
        taken = [each.shape for each in inputs.values()]
        lacking = {name for name, output in outputs.items() if lacks_images(output.shape, taken)}
        outputs = {name: output.of_one_image if name in lacking else output for name, output in outputs.items()}

    def call(*values: tf.Tensor) -> heads.Raw:
        assert owner is not None
        raw = run(*values)
        return {name: value[tf.newaxis] if name in lacking else value for name, value in raw.items()}

    return Found(call, inputs, outputs)


def _names(tensors: Sequence[tf.TensorSpec]) -> list[str]:
    """Returns the names of inputs as their author knows them, without the scope and the number of a tensor; as they are
    where these would be alike."""
    whole = [str(spec.name or f"input_{index}").partition(":")[0] for index, spec in enumerate(tensors)]
    last = [name.rpartition("/")[2] for name in whole]
    return last if len({*last}) == len(last) else whole


Arguments = Callable[[Sequence[tf.Tensor]], tuple[Sequence[Any], Mapping[str, Any]]]


def _arguments(function: Any) -> Arguments:
    """Returns what makes the arguments of a concrete function, by position and by name, of its input tensors."""
    signature = function.structured_input_signature
    if not any(isinstance(value, tf.TensorSpec) for value in tf.nest.flatten(signature)):
        return lambda values: (values, {})  # pruned from a graph

    def arguments(values: Sequence[tf.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        left = iter(values)
        filled = [next(left) if isinstance(one, tf.TensorSpec) else one for one in tf.nest.flatten(signature)]
        positional, named = tf.nest.pack_sequence_as(signature, filled)
        return positional, {name: value for name, value in named.items() if name in signature[1]}

    return arguments


def choose(loaded: Any, wanted: str | None) -> tuple[str, Any]:
    """Returns a traced function of a module and its name, for inference: the one that is named, the
    module's own, or the only one. Raises ModelFailed.
    """
    functions = dict(_of_inference(loaded))
    # A function of several may be a step of training, whose other inputs are labels.
    functions = {name: one for name, one in functions.items() if len(_tensors(one)) == 1} or functions
    known = ", ".join(functions) or "none"
    name = wanted or (CALL if CALL in functions else next(iter(functions)) if len(functions) == 1 else None)
    if name is not None and name in functions:
        return name, functions[name]
    if functions:
        raise ModelFailed(
            f"function: the SavedModel has no signatures; expected one of its functions {known}, got"
            f" {wanted or 'nothing'}; write function: {next(iter(functions))}"
        )
    raise ModelFailed(f"source: {WITHOUT_FUNCTION}")


def of_pixels(loaded: Any) -> list[str]:
    """Returns the names of a module's functions of one tensor of pixels, for inference."""
    return [name for name, function in _of_inference(loaded) if takes_pixels(function)]


def takes_pixels(function: Any) -> bool:
    """Returns whether a concrete function takes one tensor that images may be."""
    tensors = _tensors(function)
    return len(tensors) == 1 and tensors[0].dtype.name in DTYPES and tensors[0].shape.rank in (3, 4)


def _of_inference(loaded: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(loaded, "structured_input_signature"):  # a concrete function that was saved as it is, as onnx2tf does
        yield CALL, loaded
        return
    for name, member in vars(loaded).items():
        for function in getattr(member, "concrete_functions", ()):
            # Other arguments were fixed when the function was traced; True can only be `training`.
            is_trained = any(value is True for value in tf.nest.flatten(function.structured_input_signature))
            if _tensors(function) and not is_trained:
                yield name, function
                break


def _tensors(function: Any) -> list[tf.TensorSpec]:
    flat = tf.nest.flatten(function.structured_input_signature)
    tensors = [value for value in flat if isinstance(value, tf.TensorSpec)]
    # The structure of what was pruned from a graph of TensorFlow 1 is not known.
    return tensors or [tf.TensorSpec.from_tensor(tensor) for tensor in own_inputs(function)]


def _shape(spec: tf.TensorSpec) -> TensorShape:
    return TensorShape(None if spec.shape.rank is None else spec.shape.as_list(), spec.dtype.name)
