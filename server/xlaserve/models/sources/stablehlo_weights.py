"""Takes a StableHLO module's weights out of it: its large constants become arguments.

What closes over its weights is exported with them as constants. As arguments, all buckets share them, they lie in a
SavedModel's variables, and XLA does not compute with them as it compiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import chlo, func, sdy, stablehlo
from numpy.typing import NDArray

MIN_ELEMENTS: Final = 1024
"""Smaller constants stay: XLA folds them, and shapes are computed with some of them."""
NEWEST: Final = "1.13.7"
"""The newest version of StableHLO that TensorFlow 2.21 reads."""
DTYPES: Final[Mapping[str, Any]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "ui8": np.uint8,
}
"""Types of constants that are taken out, as MLIR names them."""
_VERSION: Final = re.compile(rb"StableHLO_v([0-9.]+)")
_CONTENTS: Final = re.compile(r'"0x([0-9A-F]*)"')
_ELEMENT: Final = re.compile(r"0x[0-9A-F]+|-?[0-9.]+e[+-][0-9]+")


class Separated(NamedTuple):
    """A module that takes further arguments, behind its own, and their values."""

    module: bytes
    weights: tuple[NDArray[Any], ...]


def separate(module: bytes) -> Separated:
    """Returns `module`, serialized StableHLO whose entry is the function `main`, with its weights as arguments.

    It is in a version of StableHLO that TensorFlow reads. Raises what MLIR raises, for operations of a newer one too.
    """
    written = _VERSION.search(module[:100])
    version = NEWEST if written is None else stablehlo.get_smaller_version(NEWEST, written[1].decode())
    with parsed(module) as functions:
        weights = _Functions(functions).separate("main")
        values = tuple(value(constant.attributes["value"]) for constant in weights)
        for constant in weights:
            constant.erase()
        return Separated(stablehlo.serialize_portable_artifact(functions, version), values)


@contextmanager
def parsed(module: bytes) -> Iterator[Any]:
    """Yields `module`, serialized StableHLO. Raises what MLIR raises."""
    with ir.Context() as context, ir.Location.unknown():
        for dialect in (stablehlo, chlo, sdy):
            dialect.register_dialect(context)
        yield stablehlo.deserialize_portable_artifact(context, module)


class _Functions:
    """The functions of a module. Constants of a function that is called become arguments of its callers, too.

    JAX's named operations, composites such as chlo.erf, become calls of what they are composed of: TensorFlow finds the
    shapes within calls alone where the batch is symbolic. What nothing reads is erased, such as the places of what
    PyTorch's poolings find: it could keep a module from being translated.
    """

    def __init__(self, module: Any) -> None:
        functions = (one for one in module.body.operations if isinstance(one, func.FuncOp))
        self._functions = {function.sym_name.value: function for function in functions}
        self._weights: dict[str, list[Any]] = {}
        for function in self._functions.values():
            for operation in reversed(list(function.entry_block.operations)):
                if operation.results and not any(list(result.uses) for result in operation.results):
                    operation.operation.erase()
            for composite in _find(function, _is_composite):
                _replace_by_call(composite, composite.attributes["decomposition"], composite.operands)

    def separate(self, name: str) -> list[Any]:
        """Has a function take its weights as further arguments; returns the constants, which have no more uses."""
        if name in self._weights:
            return self._weights[name]
        function = self._functions[name]
        constants = _find(function, _is_weight)
        calls = {call: self.separate(call.attributes["callee"].value) for call in _find(function, _is_call)}
        weights = list(dict.fromkeys((*constants, *(one for of_call in calls.values() for one in of_call))))
        arguments = dict(zip(weights, _with_arguments(function, weights), strict=True))
        for constant in constants:
            constant.results[0].replace_all_uses_with(arguments[constant])
        for call, of_call in calls.items():
            if of_call:
                operands = [*call.operands, *(arguments[one] for one in of_call)]
                _replace_by_call(call, call.attributes["callee"], operands)
        self._weights[name] = weights
        return weights


def _find(function: Any, is_meant: Callable[[Any], bool]) -> list[Any]:
    found = []

    def visit(operation: Any) -> Any:
        if is_meant(operation):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    return found


def _is_call(operation: Any) -> bool:
    return bool(operation.name == "func.call")


def _is_composite(operation: Any) -> bool:
    return bool(operation.name == "stablehlo.composite")


def _is_weight(operation: Any) -> bool:
    if operation.name != "stablehlo.constant":
        return False
    value, kind = operation.attributes["value"], operation.results[0].type
    is_large = kind.has_static_shape and int(np.prod(kind.shape)) >= MIN_ELEMENTS
    return (
        is_large and str(kind.element_type) in DTYPES and isinstance(value, ir.DenseElementsAttr) and not value.is_splat
    )


def _with_arguments(function: Any, weights: Sequence[Any]) -> list[Any]:
    """Appends an argument to a function for each of `weights`; returns these."""
    kinds = [constant.results[0].type for constant in weights]
    own = function.type
    attributes = (
        list(function.arg_attrs) if "arg_attrs" in function.attributes else [ir.DictAttr.get({})] * len(own.inputs)
    )
    added = [function.entry_block.add_argument(kind, function.location) for kind in kinds]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([*own.inputs, *kinds], own.results))
    function.arg_attrs = [*attributes, *(ir.DictAttr.get({}) for _ in kinds)]
    return added


def _replace_by_call(operation: Any, callee: Any, operands: Sequence[Any]) -> None:
    results = [result.type for result in operation.results]
    with ir.InsertionPoint(operation):
        call = func.CallOp(results, callee, list(operands), loc=operation.location)
    for old, new in zip(operation.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    operation.erase()


def value(attribute: Any) -> NDArray[Any]:
    """Returns the elements of a constant, which are not all the same."""
    kind = attribute.type
    dtype = np.dtype(DTYPES[str(kind.element_type)])
    if dtype != ml_dtypes.bfloat16:
        return np.array(attribute, dtype)
    # The buffer protocol, which numpy reads others by, has no bfloat16. Text has all bytes, little-endian, in
    # hexadecimal. Of a few elements it has the numbers, and the bits of those that are none or infinite.
    text = str(attribute)
    if (contents := _CONTENTS.search(text)) is not None:
        elements = np.frombuffer(bytes.fromhex(contents[1]), dtype)
    else:
        elements = np.array([_bfloat16(one) for one in _ELEMENT.findall(text)], dtype)
    return elements.reshape(kind.shape)


def _bfloat16(text: str) -> Any:
    return np.uint16(int(text, 16)).view(ml_dtypes.bfloat16) if text.startswith("0x") else float(text)
