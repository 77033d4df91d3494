"""Classes and functions that a file of Keras needs and does not hold: those that the settings name, and code in it."""

from __future__ import annotations

import keyword
import pkgutil
import re
from typing import Any, Final

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.sources import keras_bytecode, keras_config, keras_lambda
from xlaserve.models.sources.keras_config import Json

UNKNOWN: Final = re.compile(
    r"Could not locate (?:class|function) '([^']+)'|Unknown (?:layer|object|activation function|function)[^:]*: '?(\w+)"
)
"""Messages of Keras 3 and 2 for a custom object that they lack."""
UNMADE: Final = re.compile(
    r"Unable to revive model from config.*?constructor to <class '(?:[^']*\.)?(\w+)'>", re.DOTALL
)
"""The message of Keras 3 for a class of models whose constructor does not take what the file has for it."""
_IN_NO_NAME: Final = re.compile(r"\W")


def replaced_lambdas(name: str, config: Json, settings: ModelSettings) -> frozenset[str]:
    """Returns the names of the Lambda layers whose functions the settings replace, in the file `name`.

    Raises ModelFailed where others hold code that may not be run, or that this Python can't read.
    """
    code = keras_config.code(config)
    named = dict(settings.custom_objects).keys()
    if left := sorted(code.keys() - named):
        instead = ", ".join(f"{layer}: my_package.my_module:{_function_name(layer)}" for layer in left)
        remedy = f"write functions that do the same, and name them: custom_objects: {{{instead}}}"
        shown = [
            f"{layer} (whose code uses {used})" if (used := keras_lambda.uses(code[layer])) else layer for layer in left
        ]
        layers = f"the Lambda layer{'s' if len(left) > 1 else ''} {', '.join(shown)}"
        if settings.safe_mode:
            raise ModelFailed(
                f"safe_mode: {name} holds Python code in {layers}; {remedy}; or, for a file that you trust,"
                " safe_mode: false, which runs the code"
            )
        if not all(keras_bytecode.is_readable(code[layer]) for layer in left):
            raise ModelFailed(
                f"source: {name} holds code of another version of Python in {layers}, which Python"
                f" {keras_bytecode.PYTHON} can't read; {remedy}"
            )
    return frozenset(code.keys() & named)


def _function_name(layer: str) -> str:
    """Returns a name that a function in Python may have; Keras's own name of a first Lambda layer is `lambda`."""
    name = _IN_NO_NAME.sub("_", layer)
    return f"{name}_" if keyword.iskeyword(name) else name


def paths(config: Json, lambdas: frozenset[str], settings: ModelSettings) -> dict[str, str]:
    """Returns the path of each custom object of the settings, by each name that a file may have for it."""
    return {
        known: path
        for name, path in settings.custom_objects
        for known in [
            keras_config.replacement(name) if name in lambdas else name,
            *keras_config.registered(name, config),
        ]
    }


def imported(paths: dict[str, str]) -> dict[str, Any]:
    """Returns the custom objects at `paths`, by name. Raises ModelFailed."""
    return {
        known: import_object(f"custom_objects.{known.removeprefix(keras_config.REPLACED)}", path)
        for known, path in paths.items()
    }


def import_object(field: str, path: str) -> Any:
    """Returns the object that `package.module:attribute` names, in a setting. Raises ModelFailed."""
    module, _, attribute = path.partition(":")
    if not (module and attribute):
        raise ModelFailed(
            f"{field}: expected package.module:attribute, got {path}; write the name behind a colon, such as"
            " my_package.my_module:build"
        )
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{field}: {path} can't be imported: {error}"
        package = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            message += f"; start the server with the folder that {package} lies in: PYTHONPATH=FOLDER xlaserve serve"
        else:
            message += f"; try it where the server runs: python -c 'from {module} import {attribute}'"
        raise ModelFailed(message) from error


def unknown(text: str) -> ModelFailed | None:
    """Returns the error for an object that Keras lacks or can't make, by the text of its own; None where that is of
    another kind."""
    if (found := UNMADE.search(text)) is not None:
        return ModelFailed(
            f"source: Keras can't make {found[1]} of what the file has, as its constructor takes other arguments; name"
            " a function that returns the model, after one call: architecture: my_package.my_module:build"
        )
    if (found := UNKNOWN.search(text)) is None:
        return None
    name = found[1] or found[2]
    return ModelFailed(
        f"custom_objects: expected package.module:{name} for {name}, which Keras doesn't know, got nothing; write"
        f" custom_objects: {{{name}: my_package.my_module:{name}}}"
    )
