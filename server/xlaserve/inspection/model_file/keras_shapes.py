"""Shapes of what the layers of a Keras model give, computed from its configuration without Keras.

Only the layers that vision models commonly have are known. What comes after another one is unknown, until a layer whose
output does not depend on it, or whose configuration has the shape that it was built for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from xlaserve.inspection.model_file import keras_layers
from xlaserve.inspection.model_file.description import Shape
from xlaserve.models.sources.keras_config import Json

PASSING: Final = ("Reshape", "Flatten", "Permute", "Dropout", "Identity", "Cropping2D", "ActivityRegularization")
"""Layers after which an activation still holds, as they change no number."""
MERGING: Final = ("Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract")
_SAME: Final = """
    Activation ActivityRegularization AlphaDropout BatchNormalization BatchNormalizationV1 BatchNormalizationV2
    Dropout ELU FixedDropout GaussianDropout GaussianNoise GroupNormalization Identity LayerNormalization LeakyReLU
    Masking Normalization PReLU RMSNormalization ReLU Rescaling Softmax SpatialDropout1D SpatialDropout2D
    SyncBatchNormalization ThresholdedReLU TrueDivide UnitNormalization
"""
SAME: Final = frozenset(_SAME.split())
"""Layers that give the shape that they take."""


class Value(NamedTuple):
    """A tensor between layers."""

    shape: Shape
    activation: str = ""


class Graph(NamedTuple):
    """A model's inputs and outputs."""

    inputs: dict[str, tuple[Shape, str]]
    """Shape and type, by name."""
    outputs: dict[str, Value]


def graph(model: Json) -> Graph:
    """Returns the inputs and outputs of a model by its configuration, as far as that tells them."""
    config = keras_layers.own(model)
    inner = [one for one in config.get("layers", ()) if isinstance(one, dict) and "class_name" in one]
    if not inner:
        shape = _built(model)
        return Graph({} if shape is None else {"input": (shape, "")}, {})
    if "input_layers" in config:
        names = _references(config["input_layers"])
        by_name = {keras_layers.name(one): one for one in inner}
        inputs = {one: (declared(by_name[one]), _dtype(by_name[one])) for one, *_ in names if one in by_name}
        values = _functional(config, [Value(shape) for shape, _ in inputs.values()])
        outputs = dict(zip((one for one, *_ in _references(config.get("output_layers"))), values, strict=False))
        return Graph(inputs, outputs)
    first = inner[0]
    shape = declared(first) or _shape(config.get("build_input_shape")) or _built(model)
    (value, *_) = _sequential(config, [Value(shape)])
    name = keras_layers.name(first)
    named = name if first["class_name"] == "InputLayer" else f"{name}_input"
    return Graph({named: (shape, _dtype(first))}, {keras_layers.name(inner[-1]): value})


def declared(layer: Json) -> Shape:
    """Returns the shape `[n, ...]` of a model's input that a layer declares; None where it does not."""
    config = keras_layers.own(layer)
    own = _shape(config.get("batch_input_shape")) or _shape(config.get("batch_shape"))
    if own is None and config.get("layers"):
        first, *_ = config["layers"]
        return declared(first) or _shape(config.get("build_input_shape"))
    return own


def _functional(config: Json, inputs: Sequence[Value]) -> list[Value]:
    values: dict[tuple[str, int], list[Value]] = {}
    starts = [(name, node) for name, node, _ in _references(config["input_layers"])]
    values |= {start: [value] for start, value in zip(starts, inputs, strict=False)}
    pending = list(_calls(config))
    while pending:
        left = []
        for layer, index, sources in pending:
            key = (keras_layers.name(layer), index)
            if key in values:
                continue
            if all(source[:2] in values for source in sources):
                given = [_at(values[name, node], tensor) for name, node, tensor in sources]
                values[key] = _outputs(layer, given)
                if keras_layers.own(layer).get("layers"):  # whose calls Keras may number from 1
                    values.setdefault((key[0], index + 1), values[key])
            else:
                left.append((layer, index, sources))
        if len(left) == len(pending):
            break  # what is left depends on what nothing gives
        pending = left
    return [
        _at(values.get((name, node), []), tensor) for name, node, tensor in _references(config.get("output_layers"))
    ]


def _calls(config: Json) -> Iterator[tuple[Json, int, list[tuple[str, int, int]]]]:
    """Yields each call of a layer: the layer, the call's number, and the tensors that it takes."""
    for layer in config["layers"]:
        for index, node in enumerate(layer.get("inbound_nodes") or ()):
            yield layer, index, list(_references(node))
        if not layer.get("inbound_nodes"):
            yield layer, 0, []


def _references(value: Any) -> list[tuple[str, int, int]]:
    """Returns the tensors that a part of a configuration refers to: each a layer's name, its call and its output."""
    if isinstance(value, dict):
        if value.get("class_name") == "__keras_tensor__":
            return _references(value["config"].get("keras_history"))
        return [one for item in value.values() for one in _references(item)]
    if not isinstance(value, list):
        return []
    match value:
        case [str(name), int(node), int(tensor), *rest] if not rest or isinstance(rest[0], dict):
            return [(name, node, tensor), *(one for item in rest for one in _references(item))]
    return [one for item in value for one in _references(item)]


def _sequential(config: Json, inputs: Sequence[Value]) -> list[Value]:
    values = list(inputs)
    for layer in config["layers"]:
        values = _outputs(layer, values)
    return values or [Value(None)]


def _outputs(layer: Json, inputs: Sequence[Value]) -> list[Value]:
    kind, config = layer["class_name"], keras_layers.own(layer)
    if isinstance(config.get("layers"), list) and config["layers"]:
        return _functional(config, inputs) if "input_layers" in config else _sequential(config, inputs)
    if kind == "InputLayer":
        return [_at(inputs, 0) if inputs else Value(declared(layer))]
    first = _at(inputs, 0)
    taken = first.shape or _built(layer)
    shapes = [one.shape for one in inputs]
    try:
        shape = _given(kind, config, taken, shapes)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        shape = None  # arguments of another form, as some version of Keras may have written them
    return [Value(shape, _activation(kind, config, first))]


def _activation(kind: str, config: Json, first: Value) -> str:
    if kind in PASSING or kind.startswith("Random"):
        return first.activation
    if kind == "Softmax":
        return "softmax"
    has_one = "activation" in config or kind in ("Conv2D", "Dense")
    return keras_layers.activation(config) if has_one else ""


def _given(kind: str, config: Json, taken: Shape, shapes: Sequence[Shape]) -> Shape:  # noqa: PLR0911, PLR0912 - one each
    """Returns the shape of a layer's output; `taken` is the shape of the first input, `shapes` are all of them."""
    if taken is None:
        return None
    if kind in SAME:
        return taken
    is_first = config.get("data_format") == "channels_first"
    match kind, taken:
        case "Dense", (*others, _):
            return (*others, config.get("units"))
        case "Flatten", (batch, *sides):
            return (batch, _product(sides))
        case "Reshape", (batch, *sides):
            target = list(config.get("target_shape", ()))
            known = _product([side for side in target if side != -1])
            whole = _product(sides)
            free = None if whole is None or not known else whole // known
            return (batch, *(free if side == -1 else side for side in target))
        case "Permute", (batch, *sides):
            return (batch, *(sides[axis - 1] for axis in config.get("dims", ())))
        case (("GlobalAveragePooling2D" | "GlobalMaxPooling2D"), (batch, *sides)) if len(sides) == 3:
            channels = sides[0 if is_first else 2]
            if config.get("keepdims"):
                return (batch, channels, 1, 1) if is_first else (batch, 1, 1, channels)
            return (batch, channels)
        case (("LSTM" | "GRU" | "SimpleRNN"), (batch, steps, _)):
            return (batch, steps, config.get("units")) if config.get("return_sequences") else (batch, config["units"])
        case "Concatenate", _:
            return _joined(shapes, config.get("axis", -1))
        case _ if kind in MERGING:
            return next((one for one in shapes if one is not None), None) if shapes else taken
        case _, (batch, *sides) if len(sides) == 3:
            channels, *places = (sides[0], *sides[1:]) if is_first else (sides[2], *sides[:2])
            placed = _placed(kind, config, places)
            if placed is None:
                return None
            channels = config.get("filters", channels)
            if kind == "DepthwiseConv2D" and isinstance(channels, int):
                channels *= config.get("depth_multiplier", 1)
            return (batch, channels, *placed) if is_first else (batch, *placed, channels)
    return None


def _placed(kind: str, config: Json, places: Sequence[int | None]) -> list[int | None] | None:  # noqa: PLR0911
    """Returns height and width of a layer's output for those of its input; None where the layer is not known."""
    same = config.get("padding", config.get("border_mode")) == "same"
    match kind:
        case "Conv2D" | "Convolution2D" | "SeparableConv2D" | "DepthwiseConv2D":
            dilations = _pair(config.get("dilation_rate", 1))
            sides = zip(_pair(config["kernel_size"]), dilations, strict=True)
            window = [(side - 1) * dilation + 1 for side, dilation in sides]
            return _each(places, window, _pair(config.get("strides", 1)), _same if same else _valid)
        case "MaxPooling2D" | "AveragePooling2D":
            size = _pair(config.get("pool_size", 2))
            return _each(places, size, _pair(config.get("strides") or size), _same if same else _valid)
        case "Conv2DTranspose":
            grow = _times if same else _grown
            return _each(places, _pair(config["kernel_size"]), _pair(config.get("strides", 1)), grow)
        case "UpSampling2D":
            return _each(places, (0, 0), _pair(config.get("size", 2)), _times)
        case "ZeroPadding2D" | "Cropping2D":
            value = config.get("padding" if kind == "ZeroPadding2D" else "cropping", 0)
            sums = [sum(_pair(one)) for one in _pair(value)]
            sign = 1 if kind == "ZeroPadding2D" else -1
            return [None if side is None else side + sign * more for side, more in zip(places, sums, strict=True)]
        case "Resizing" | "CenterCrop" | "RandomCrop":
            return [config.get("height"), config.get("width")]
    return list(places) if kind.startswith("Random") else None


def _each(
    places: Sequence[int | None], window: Sequence[int], steps: Sequence[int], how: Callable[[int, int, int], int]
) -> list[int | None]:
    return [
        None if side is None else how(side, size, step) for side, size, step in zip(places, window, steps, strict=True)
    ]


def _same(side: int, size: int, step: int) -> int:
    return -(-side // step)


def _valid(side: int, size: int, step: int) -> int:
    return (side - size) // step + 1


def _times(side: int, size: int, step: int) -> int:
    return side * step


def _grown(side: int, size: int, step: int) -> int:
    return side * step + max(size - step, 0)


def _joined(shapes: Sequence[Shape], axis: int) -> Shape:
    known = [one for one in shapes if one is not None]
    if not known or len(known) < len(shapes):
        return None
    joined = list(known[0])
    joined[axis] = _sum([one[axis] for one in known])
    return tuple(joined)


def _sum(sides: Sequence[int | None]) -> int | None:
    known = [side for side in sides if side is not None]
    return sum(known) if len(known) == len(sides) else None


def _product(sides: Sequence[int | None]) -> int | None:
    whole = 1
    for side in sides:
        if side is None:
            return None
        whole *= side
    return whole


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, list) and len(value) > 1 else (value, value)


def _at(values: Sequence[Value], index: int) -> Value:
    return values[index] if index < len(values) else Value(None)


def _built(layer: Json) -> Shape:
    """Returns the shape that a layer of Keras 3 was built for, where it has it."""
    built = layer.get("build_config")
    return _shape(built.get("input_shape")) if isinstance(built, dict) else None


def _shape(value: Any) -> Shape:
    is_shape = isinstance(value, list) and value and all(side is None or isinstance(side, int) for side in value)
    return tuple(value) if is_shape else None


def _dtype(layer: Json) -> str:
    """Returns the type of an input layer's pixels."""
    dtype = keras_layers.own(layer).get("dtype", "float32")
    if isinstance(dtype, dict):
        dtype = keras_layers.own(dtype).get("name", "float32")
    return str(dtype or "float32").removeprefix("mixed_") if layer["class_name"] == "InputLayer" else "float32"
