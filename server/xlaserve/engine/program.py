"""The engine's interface to models: programs, which compile to an executable for each mode and bucket."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, Layout, layout

Value = (
    np.float32
    | np.float64
    | np.int8
    | np.int16
    | np.int32
    | np.int64
    | np.uint8
    | np.uint16
    | np.uint32
    | np.uint64
    | np.bool_
)
"""The dtypes of outputs."""

Outputs = tuple[NDArray[Value], ...]
"""A model's outputs: arrays whose first dimension is the batch."""


def is_finite(outputs: Outputs) -> bool:
    """Returns whether there is no NaN and no infinity in `outputs`; takes a small part of the time to compute them."""
    return all(output.dtype.kind != "f" or bool(np.isfinite(output).all()) for output in outputs)


Executable = Callable[..., Outputs]
"""A model fixed to one mode and one bucket: a function of an array for each of its inputs, of the bucket's shapes and
nothing else. It blocks until the outputs are there, which own their memory: the arrays may be overwritten as soon as it
returns. Safe to call from several threads at a time. Call it through `run_batch`, which checks the outputs."""

Noted = Callable[[Executable, str, float], Executable]
"""Wraps an executable so that its runs are recorded as under way, given the program's mode and bucket as text, and the
seconds that a run takes; see `UnderWay.noted`."""


def not_noted(executable: Executable, program: str, cost_s: float) -> Executable:
    """Returns the executable as it is: its runs are not recorded."""
    return executable


class WrongRowsError(Exception):
    """An output has not one row for each image of its batch. `index` is its place among the outputs."""

    def __init__(self, index: int, shape: tuple[int, ...], images: int) -> None:
        super().__init__(index, shape, images)
        self.index = index
        self.rows = shape[0] if shape else 0
        self.shape = shape
        self.images = images

    def __str__(self) -> str:
        return self.described(f"output {self.index}")

    def described(self, output: str) -> str:
        """Returns the message of the error, with the name of the output."""
        rows = "1 row" if self.images == 1 else f"{self.images} rows"
        return f"{output}: expected {rows}, one for each image of the batch, got {self.rows} (shape {self.shape})"


def run_batch(executable: Executable, *rows: NDArray[Any]) -> Outputs:
    """Runs `rows`, an array for each input, and returns the outputs, each of which has one row for each row of those.

    Every run whose outputs are used goes through here, whatever the mode: with a row too few or too many, clients would
    get each other's answers. Raises WrongRowsError, and the errors of the executable.
    """
    outputs = executable(*rows)
    images = len(rows[0])
    for index, output in enumerate(outputs):
        if not output.ndim or len(output) != images:
            raise WrongRowsError(index, output.shape, images)
    return outputs


@dataclass(frozen=True, slots=True)
class FixedShape:
    """Calls `run` with rows of one bucket only."""

    run: Executable
    bucket: Bucket
    inputs: Inputs = RGB_IMAGE
    arrays: Layout = field(init=False)
    """The dtype of each array, and its whole shape."""

    def __post_init__(self) -> None:
        batch, height, width = self.bucket
        whole = tuple((dtype, (batch, *shape)) for dtype, shape in layout(self.inputs, height, width))
        object.__setattr__(self, "arrays", whole)

    def __call__(self, *rows: NDArray[Any]) -> Outputs:
        """Runs `rows` and returns the outputs; raises ValueError where they are of another shape or type."""
        # A concrete function of TensorFlow takes a tensor of any shape, and XLA then compiles again.
        for spec, got, (dtype, shape) in zip(self.inputs, rows, self.arrays, strict=True):
            if got.shape != shape or got.dtype != dtype:
                raise ValueError(f"{spec.name}: expected {dtype} {shape}, got {got.dtype} {got.shape}")
        return self.run(*rows)


@dataclass(frozen=True, slots=True)
class Compilation:
    """An executable, and the time of making it."""

    executable: Executable
    trace_s: float
    """Seconds in Python, from the model to a graph."""
    compile_s: float
    """Seconds from the graph to the end of the first run, less the time of a later run; 0 where nothing is compiled."""
    warnings: tuple[str, ...] = ()
    """Warnings for users about the answers, or how they are computed."""
    from_cache: bool = False
    """Whether it came from the compile cache: `compile_s` is then the time of loading it."""
    cost: Cost | None = None
    """The cost, where the compile cache has kept it."""
    keep_cost: Callable[[Cost], object] = lambda cost: None
    """Writes the cost to the compile cache."""
    difference: float | None = None
    """The difference from the reference when it was made, where that was more than rounding and the compile cache has
    kept it."""
    keep_difference: Callable[[float], object] = lambda difference: None
    """Writes the difference to the compile cache."""
    forget: Callable[[], object] = lambda: None
    """Removes it from the compile cache."""
    unlowered: Callable[[Exception], Compilation] | None = None
    """Compiles the program again without lowerings; None where it has none. Takes the error of the lowered one."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """An executable that has run, and its cost."""

    executable: Executable
    cost: Cost
    fastest_s: float = math.inf
    """Seconds of its fastest run at this start, where an earlier start measured the cost."""
    keep_cost: Callable[[Cost], object] = lambda cost: None
    """Writes another cost to the compile cache."""


class Program(Protocol):
    """A model's computation, preprocessing included, not yet fixed to a shape."""

    platform: str
    """"tensorflow" or "numpy"."""

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Makes the executable for `mode` and `bucket` and runs it once. May raise anything."""


@runtime_checkable
class Sealed(Protocol):
    """A `Program` that can free its source, so that the garbage collector need not traverse it."""

    def seal(self) -> None:
        """Frees everything that only another compilation needs, for good. Executables stay usable."""


@runtime_checkable
class Dismantled(Protocol):
    """A `Program` that can break its reference cycles, which leaves less to the garbage collector and its pauses."""

    def dismantle(self) -> None:
        """Takes the program and its executables apart, for good. None of them may run any more."""


@runtime_checkable
class IsLowered(Protocol):
    """A `Program` that XLA may run in another form."""

    def lowerings(self, bucket: Bucket) -> str:
        """Returns the lowerings for images of the size of `bucket` and how often each applies: `depthwise 17`."""


@runtime_checkable
class MayBeNarrow(Protocol):
    """A `Program` whose model may compute in less than float32 by itself."""

    def is_narrow(self, bucket: Bucket) -> bool:
        """Returns whether the model computes in bfloat16 or float16 anywhere, for images of the size of `bucket`."""


@runtime_checkable
class AnySize(Protocol):
    """A `Program` that can run without buckets as well."""

    def any_size(self) -> Executable:
        """Makes an executable of graph mode that takes any number of images of any size, without tracing for each."""
