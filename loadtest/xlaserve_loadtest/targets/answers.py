"""Checks of answers against their request and the metadata of the model, in any protocol."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.requests import NO_STAGES, STAGES, Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import ANY, BYTES, DTYPES, LENGTH_BYTES
from xlaserve_loadtest.targets.references import NONE, References
from xlaserve_loadtest.targets.target import Array, ModelInfo, Reply, widened

COMPARED: Final = frozenset({*DTYPES, BYTES})
"""Types of the outputs that are compared."""
_ITEM_BYTES: Final = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}

_NO_BOOL: Final = {str}
_NO_NUMBER: Final = {str, bool}

MAX_STAGE_S: Final = 1e9
"""A record holds times as float32, which end at 3e38."""

Wire = TypeVar("Wire")
"""An answer as it comes over the wire: bytes, or an HTTP response."""


class NoAnswer(Exception):
    """The response can't be read as an answer; the message says why."""


class Output(NamedTuple):
    """An output of an answer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | None = None
    """Its elements as the binary tensor extension has them; None where they are `listed`."""
    listed: Sequence[Any] = ()
    """Its elements one by one, row after row."""

    def compared(self) -> Array:
        """Returns what is compared with other answers: the numbers, or of BYTES a fingerprint of each element.

        Raises NoAnswer where other things are listed.
        """
        if self.datatype != BYTES:
            return widened(self.values())
        elements = _strings(self.raw) if self.raw is not None else map(_string, self.listed)
        prints = [int.from_bytes(blake2b(own, digest_size=8).digest(), signed=True) for own in elements]
        if len(prints) != math.prod(self.shape):
            raise NoAnswer(f"output {self.name}, {self.datatype} {self.shape}, has {len(prints)} elements")
        return np.array(prints, np.int64).reshape(self.shape)

    def values(self) -> NDArray[Any]:
        """Returns the numbers. Raises NoAnswer where other things are listed."""
        dtype = DTYPES[self.datatype]
        # NumPy reads "0.5" and true as numbers.
        if strange := {*map(type, self.listed)} & (_NO_BOOL if self.datatype == "BOOL" else _NO_NUMBER):
            got = next(own for own in self.listed if type(own) in strange)
            raise NoAnswer(f"output {self.name}, {self.datatype}: expected numbers, got {json.dumps(got)}")
        try:
            values = np.frombuffer(self.raw, dtype) if self.raw is not None else np.array(self.listed, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise NoAnswer(f"output {self.name}, {self.datatype}: {error}") from None
        return values.reshape(self.shape)


class Answer(NamedTuple):
    """An answer, whatever its protocol."""

    outputs: Sequence[Output]
    model: str = ""
    """The model that answered; empty where it is not said."""
    mode: str = ""
    """The mode that it was run in; empty where it is not said."""
    stages: tuple[float, ...] = NO_STAGES
    """The server's own seconds by stage, in the order of `record.STAGES`."""


Reader = Callable[[Wire, ModelInfo], Answer]
"""Reads an answer. Raises NoAnswer."""


def stages_of(named: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the seconds that parameters of an answer name; NaN for what can't be a time, such as 1e300."""
    found = (named.get(stage) for stage in STAGES)
    return tuple(
        float(value) if isinstance(value, (int, float)) and abs(value) <= MAX_STAGE_S else math.nan for value in found
    )


class Checker(Generic[Wire]):
    """Checks the answers that come over one connection, as `read` reads them.

    Of every answer the names of the model and the outputs, their types, shapes and bytes, and that the numbers are
    finite; of a sample whether they are those of the `references`.
    """

    def __init__(self, models: Sequence[ModelInfo], read: Reader[Wire], references: References = NONE) -> None:
        self._models = models
        self._read = read
        self._references = references

    def reply(self, data: Wire, request: Request) -> Reply:
        """Returns what an answer is worth."""
        model = self._models[request.model]
        try:
            answer = self._read(data, model)
            fault = _fault(answer, request, model) or _contents_fault(answer) or _numbers_fault(answer)
        except NoAnswer as error:
            fault = str(error) or "no answer"
        if fault:
            return Reply(Status.INVALID_REPLY, detail=fault)
        if difference := self._references.fault(request, lambda: _outputs(answer, model)):
            return Reply(Status.DIFFERING_REPLY, detail=difference)
        return Reply(Status.OK, answer.stages)

    def outputs(self, data: Wire, request: Request) -> list[Array]:
        """Returns the outputs of an answer that was right, in the order of the model's metadata."""
        model = self._models[request.model]
        return _outputs(self._read(data, model), model)


def _outputs(answer: Answer, model: ModelInfo) -> list[Array]:
    outputs = {out.name: out.compared() for out in answer.outputs if out.datatype in COMPARED}
    return [outputs[out.name] for out in model.outputs or answer.outputs if out.name in outputs]


def _strings(raw: bytes) -> Iterator[bytes]:
    """Yields the elements of BYTES in the binary tensor extension, each behind its length."""
    place = 0
    while place < len(raw):
        end = place + LENGTH_BYTES + int.from_bytes(raw[place : place + LENGTH_BYTES], "little")
        if end > len(raw):
            raise NoAnswer("an element of BYTES is shorter than its length says")
        yield raw[place + LENGTH_BYTES : end]
        place = end


def _string(listed: Any) -> bytes:
    """Returns an element of BYTES that is listed: bytes, text, or as TensorFlow Serving writes bytes in JSON."""
    if isinstance(listed, dict) and isinstance(listed.get("b64"), str):
        return base64.b64decode(listed["b64"])
    return listed if isinstance(listed, bytes) else str(listed).encode()


def _fault(answer: Answer, request: Request, model: ModelInfo) -> str:
    """Returns what is not as asked for and promised; or ""."""
    # Not every server names the model.
    if answer.model not in (model.name, model.own_name, ""):
        return f"expected an answer of {model.name}, got one of {answer.model}"
    if request.mode and answer.mode not in (request.mode, ""):
        return f"asked for mode {request.mode}, was run in {answer.mode}"
    got = [out[:3] for out in answer.outputs]
    promised = [
        (out.name, out.datatype, (request.images, *out.shape[1:]) if out.has_batch else out.shape)
        for out in model.outputs
    ]
    # Outputs are known by their names: servers send them in any order. A server that declares none promises none.
    if (
        promised
        and got != promised
        and (len(got) != len(promised) or not all(map(_keeps, sorted(got), sorted(promised))))
    ):
        return f"expected outputs {promised}, got {got}"
    return ""


def _keeps(got: tuple[str, str, tuple[int, ...]], promised: tuple[str, str, tuple[int, ...]]) -> bool:
    """Says whether an output is as promised; a side of -1 promises nothing."""
    return (
        got[:2] == promised[:2]
        and len(got[2]) == len(promised[2])
        and all(side in (has, ANY) for has, side in zip(got[2], promised[2], strict=True))
    )


def _contents_fault(answer: Answer) -> str:
    """Returns which output's contents don't fill its shape; or ""."""
    for out in answer.outputs:
        size, where = math.prod(out.shape), f"output {out.name}, {out.datatype} {out.shape}"
        if out.raw is None:
            if len(out.listed) != size:
                return f"{where}, has {len(out.listed)} elements"
        elif out.datatype in _ITEM_BYTES and len(out.raw) != size * _ITEM_BYTES[out.datatype]:
            return f"{where}, has {len(out.raw)} bytes"
        elif out.datatype == BYTES and len(out.raw) < size * LENGTH_BYTES:
            return f"{where}, has {len(out.raw)} bytes, too few for their lengths"
    return ""


def _numbers_fault(answer: Answer) -> str:
    numbers = (numbers_fault(out.name, out.values()) for out in answer.outputs if out.datatype in DTYPES)
    return next(filter(None, numbers), "")


def numbers_fault(name: str, values: NDArray[Any]) -> str:
    """Returns what in an output of floating point is no number; or "".

    Minus infinity is the logarithm of 0, and no mistake.
    """
    if values.dtype.kind != "f":
        return ""
    # One pass without a copy, as every answer is looked at; the maximum of numbers with a NaN is NaN.
    if values.max(initial=-np.inf) < np.inf:
        return ""
    return f"expected finite numbers in output {name}, got {values[~(values < np.inf)][0]}"
