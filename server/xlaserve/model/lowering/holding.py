"""Layers that hold other layers: a twin of such a layer holds replacements for some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xlaserve.model.networks.keras_runtime import keras


def with_replaced(layer: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns `layer`, or a twin of it where `replace` gives other layers for any among its attributes.

    The twin has all else in common with it, its variables too.
    """
    held = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    replaced = {name: new for name, value in held.items() if (new := _replaced(value, replace)) is not value}
    if not replaced:
        return layer
    twin = object.__new__(type(layer))  # a Keras layer's own ways to be copied make new variables
    vars(twin).update(vars(layer), _inbound_nodes=[], _outbound_nodes=[], **replaced)
    return twin


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, keras.layers.Layer):
        return replace(value)
    if isinstance(value, list | tuple):
        items = [_replaced(item, replace) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        entries = {key: _replaced(item, replace) for key, item in value.items()}
        return value if all(entries[key] is item for key, item in value.items()) else entries
    return value
