"""Configurations of Keras models, as JSON in files: translated from other versions of Keras to the installed one.

Nothing here imports Keras: the process that runs Keras 2 uses it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Json = dict[str, Any]

CLASSES: Final[Mapping[str, str]] = {
    "BatchNormalizationV1": "BatchNormalization",
    "BatchNormalizationV2": "BatchNormalization",
    "SyncBatchNormalization": "BatchNormalization",
    "FixedDropout": "Dropout",  # of the package efficientnet; for inference both pass what they get
    "Policy": "DTypePolicy",
}
"""Names of classes that Keras has dropped, and their names now; for inference they compute the same."""
TEACHABLE_LAYER: Final = "dense_Dense1"
"""The name of a layer in every model that Teachable Machine writes."""


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in values)


def _always(value: object) -> bool:
    return True


_ANY: Final = "*"
"""Any layer."""
_RANDOM: Final = ("RandomCrop", "RandomFlip", "RandomRotation", "RandomShear", "RandomTranslation", "RandomZoom")
DROPPED: Final[Mapping[tuple[str, str], Callable[[object], bool]]] = {
    ("BatchNormalization", "fused"): _always,
    ("BatchNormalization", "renorm"): _is(False, None),
    ("BatchNormalization", "renorm_clipping"): _is(None),
    ("BatchNormalization", "renorm_momentum"): _always,  # of training alone
    ("BatchNormalization", "virtual_batch_size"): _is(None),
    ("BatchNormalization", "adjustment"): _is(None),
    ("Conv2DTranspose", "groups"): _is(1),
    ("DepthwiseConv2D", "groups"): _is(1),
    ("SeparableConv2D", "groups"): _is(1),
    ("GRU", "time_major"): _is(False),
    ("LSTM", "time_major"): _is(False),
    ("InputLayer", "ragged"): _is(False),
    ("LayerNormalization", "rms_scaling"): _is(False),
    (_ANY, "rng_type"): _always,  # of training alone
    **{(layer, "value_range"): _always for layer in _RANDOM},  # they move pixels and change none
}
"""Arguments of layers that Keras has dropped, and for each the values with which the layer works as it does now."""

REPLACED: Final = "replaced:"
"""Beginning of the names under which functions that replace those of Lambda layers are known."""


def mend(config: Json, functions: frozenset[str]) -> bool:
    """Puts a configuration as Keras reads it; returns whether that has changed it.

    Lambda layers whose names are `functions` are given the functions of the names `replacement` returns.
    """
    has_changed = False
    for one in objects(config):
        if (name := CLASSES.get(one["class_name"])) is not None:
            one["class_name"] = name
            one.pop("registered_name", None)
            has_changed = True
        own = one["config"]
        for argument in [*own]:
            is_dropped = DROPPED.get((one["class_name"], argument)) or DROPPED.get((_ANY, argument))
            if is_dropped is not None and is_dropped(own[argument]):
                del own[argument]
                has_changed = True
        axis = own.get("axis")
        if one["class_name"] == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
            own["axis"] = axis[0]
            has_changed = True
        if one["class_name"] == "Lambda" and own.get("name") in functions:
            own["function"] = replacement(own["name"])
            if "function_type" in own:
                own |= {"function_type": "function", "module": None}
            for argument in ("output_shape", "output_shape_type", "output_shape_module"):
                if own.get("output_shape_type") == "lambda" or holds_code(own.get("output_shape")):
                    own.pop(argument, None)
            has_changed = True
    return has_changed


def replacement(layer: str) -> str:
    """Returns the name of the function that replaces a Lambda layer's own."""
    return REPLACED + layer


def code(config: Json) -> dict[str, str]:
    """Returns Python's bytecode, in base64, of each Lambda layer that holds any, by the layer's name."""
    found = {}
    for one in objects(config):
        function = one["config"].get("function")
        if one["class_name"] == "Lambda" and holds_code(function):
            found[str(one["config"].get("name"))] = str(
                function[0] if isinstance(function, list) else function["config"]["code"]
            )
    return found


def holds_code(value: object) -> bool:
    """Returns whether a function is written as bytecode: a list of Keras 2, or an object of Keras 3."""
    if isinstance(value, list):
        return len(value) == 3 and isinstance(value[0], str)
    return isinstance(value, dict) and value.get("class_name") == "__lambda__"


def registered(name: str, config: Json) -> set[str]:
    """Returns the names under which a configuration registers the class or function `name`, such as `Custom>name`."""
    written = (one.get(key) for one in _named(config) for key in ("registered_name", "class_name"))
    return {one for one in written if isinstance(one, str) and one.endswith(f">{name}")}


def objects(config: Json) -> Iterator[Json]:
    """Yields every object of a configuration that has a class and a configuration of its own, outer ones first."""
    return (one for one in _named(config) if isinstance(one.get("config"), dict))


def is_of_teachable_machine(config: Json) -> bool:
    """Returns whether Teachable Machine wrote a model."""
    return any(one["config"].get("name") == TEACHABLE_LAYER for one in objects(config))


def _named(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        if isinstance(value.get("class_name"), str):
            yield value
        for item in [*value.values()]:
            yield from _named(item)
    elif isinstance(value, list):
        for item in value:
            yield from _named(item)
