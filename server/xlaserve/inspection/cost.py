"""The cost of instructions: floating-point operations, and bytes read and written.

The rules are those of XLA's HloCostAnalysis (xla/service/hlo_cost_analysis.cc), simplified where it makes no difference
to vision models: a multiply-add is two operations, a transcendental one; a convolution's window counts where it lies on
data and not where it lies on padding; a fusion computes what its body does and reads its operands once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from xlaserve.inspection.hlo import NO_OPERATION, Computation, Instruction, Module, Shape

ARITHMETIC: Final = frozenset(
    {
        "abs",
        "add",
        "atan2",
        "cbrt",
        "ceil",
        "clamp",
        "cosine",
        "divide",
        "erf",
        "exponential",
        "exponential-minus-one",
        "floor",
        "log",
        "log-plus-one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "power",
        "remainder",
        "round-nearest-afz",
        "round-nearest-even",
        "rsqrt",
        "sign",
        "sine",
        "sqrt",
        "subtract",
        "tan",
        "tanh",
    }
)
SLICING: Final = frozenset({"slice", "dynamic-slice", "gather"})
FREE: Final = NO_OPERATION | {"iota", "reshape"}
"""Opcodes that move no data. A reshape that moves data has become a copy after optimisation."""

_WINDOW_FIELD: Final = re.compile(r"(\w+)=([^\s}]+)")


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations and bytes of an instruction or a program."""

    flops: int = 0
    bytes: int = 0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def instructions(module: Module) -> list[tuple[Instruction, Cost]]:
    """Returns the instructions of the entry computation in their order, each with its cost.

    In the place of a loop are the instructions of its body and its condition, each with its cost over all rounds.
    """
    return list(_run(module.entry, 1, _Costs(module), module))


def _run(computation: Computation, rounds: int, costs: _Costs, module: Module) -> Iterator[tuple[Instruction, Cost]]:
    for each in computation.instructions.values():
        if each.opcode == "while":
            for name in each.called:
                yield from _run(module.computations[name], rounds * _trips(each), costs, module)
        elif each.opcode not in FREE:
            flops, size_bytes = costs.flops(each, computation), costs.bytes(each, computation)
            yield each, Cost(rounds * flops, rounds * size_bytes)


class _Costs:
    """Rules of cost by opcode. `within` is the computation of an instruction."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._by_computation: dict[str, int] = {}

    def flops(self, instruction: Instruction, within: Computation) -> int:
        """Floating-point operations of one run."""
        opcode = instruction.opcode
        if opcode in ARITHMETIC:
            return instruction.shape.size if _is_float(instruction.shape) else 0
        if counted := _FLOPS.get(opcode):
            return counted(self, instruction, within)
        return sum(map(self._body_flops, instruction.called))

    def bytes(self, instruction: Instruction, within: Computation) -> int:
        """Bytes that one run reads and writes."""
        opcode, output = instruction.opcode, instruction.shape.size_bytes
        if opcode in FREE:
            return 0
        if opcode in ("call", "conditional", "while"):
            return _trips(instruction) * sum(map(self._body_bytes, instruction.called))
        if opcode == "fusion":
            return self._written_by_fusion(instruction) + sum(self._read_by_fusion(instruction))
        operands = [within.instructions[name].shape.size_bytes for name in instruction.operands]
        match opcode:
            case "slice" | "dynamic-slice" | "gather":
                moved = 2 * output
            case "dynamic-update-slice":
                moved = 2 * operands[1]
            case "scatter":
                moved = 2 * operands[-1]
            case _:
                moved = output + sum(operands)
        return moved

    def _written_by_fusion(self, fusion: Instruction) -> int:
        """Bytes that a fusion writes; of an output that is updated in place, only the bytes of the update."""
        body = self._module.computations[fusion.called[0]]
        *_, root = body.instructions.values()
        if root.opcode == "dynamic-update-slice":
            return body.instructions[root.operands[1]].shape.size_bytes
        return fusion.shape.size_bytes

    def _read_by_fusion(self, fusion: Instruction) -> list[int]:
        """Bytes that a fusion reads of each operand; of an operand of which the body reads only slices, the bytes of
        these."""
        body = self._module.computations[fusion.called[0]]
        users = body.users()
        return [
            min(parameter.shape.size_bytes, sum(_read_by(user, parameter) for user in users[parameter.name]))
            for parameter in body.parameters
        ]

    def _body_flops(self, name: str) -> int:
        if name not in self._by_computation:
            body = self._module.computations[name]
            self._by_computation[name] = sum(self.flops(each, body) for each in body.instructions.values())
        return self._by_computation[name]

    def _body_bytes(self, name: str) -> int:
        body = self._module.computations[name]
        return sum(self.bytes(each, body) for each in body.instructions.values())

    def dot(self, instruction: Instruction, within: Computation) -> int:
        """Twice the elements of the output times the contracted elements."""
        lhs = within.instructions[instruction.operands[0]].shape
        contracted = math.prod(
            lhs.dims[int(axis)] for axis in re.findall(r"\d+", instruction.attributes["lhs_contracting_dims"])
        )
        return 2 * instruction.shape.size * contracted

    def convolution(self, instruction: Instruction, within: Computation) -> int:
        """Twice the batch times the input and output features times the positions of the window that lie on data."""
        lhs, kernel = (within.instructions[name].shape for name in instruction.operands[:2])
        attributes = instruction.attributes
        inputs, kernels, outputs = re.split("_|->", attributes["dim_labels"])
        output = instruction.shape.first
        window = _window(attributes.get("window", ""))
        places = 1
        for axis in range(len(lhs.dims) - 2):
            label = str(axis)
            sides = lhs.dims[inputs.index(label)], kernel.dims[kernels.index(label)], output.dims[outputs.index(label)]
            places *= _valid_places(*sides, window, axis)
        batch = lhs.dims[inputs.index("b")] // int(attributes.get("batch_group_count", 1))
        return 2 * batch * kernel.dims[kernels.index("i")] * output.dims[outputs.index("f")] * places

    def reduce(self, instruction: Instruction, within: Computation) -> int:
        """Operations of the body, for each element but the first of each reduction."""
        elements = within.instructions[instruction.operands[0]].shape.size
        outputs = instruction.shape.first.size
        return (elements - outputs) * sum(map(self._body_flops, instruction.called))

    def reduce_window(self, instruction: Instruction, within: Computation) -> int:
        """Operations of the body, for each element but the first of each window."""
        window = math.prod(int(side) for side in _window(instruction.attributes["window"])["size"].split("x"))
        return instruction.shape.first.size * (window - 1) * sum(map(self._body_flops, instruction.called))

    def scatter(self, instruction: Instruction, within: Computation) -> int:
        """Operations of the body, for each element of the updates."""
        updates = within.instructions[instruction.operands[-1]].shape.size
        return updates * sum(map(self._body_flops, instruction.called))

    def loop(self, instruction: Instruction, within: Computation) -> int:
        """Operations of condition and body, for each round; for one round where their number is not known."""
        return _trips(instruction) * sum(map(self._body_flops, instruction.called))

    def custom_call(self, instruction: Instruction, within: Computation) -> int:
        """Operations of a library call for a convolution or a matrix product; 0 for any other call, whose cost is not
        known."""
        if "dim_labels" in instruction.attributes:
            return self.convolution(instruction, within)
        config = _json(instruction.attributes.get("backend_config", ""))
        gemm = config.get("gemm_backend_config", config)
        numbers = gemm.get("dot_dimension_numbers", {}) if isinstance(gemm, dict) else {}
        if "lhs_contracting_dimensions" in numbers:
            lhs = within.instructions[instruction.operands[0]].shape
            contracted = math.prod(lhs.dims[int(axis)] for axis in numbers["lhs_contracting_dimensions"])
            return 2 * instruction.shape.first.size * contracted
        return 0


_FLOPS: Final[dict[str, Callable[[_Costs, Instruction, Computation], int]]] = {
    "dot": _Costs.dot,
    "convolution": _Costs.convolution,
    "reduce": _Costs.reduce,
    "reduce-window": _Costs.reduce_window,
    "select-and-scatter": _Costs.reduce_window,
    "scatter": _Costs.scatter,
    "while": _Costs.loop,
    "custom-call": _Costs.custom_call,
    "sort": lambda *_: 0,  # its computation compares elements and computes nothing of them
}


def _valid_places(input_side: int, kernel_side: int, output_side: int, window: dict[str, str], axis: int) -> int:
    """Returns the number of pairs of an output and a kernel position that lie on data, along one axis."""
    stride, input_dilation, kernel_dilation = (
        int(window[key].split("x")[axis]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
    )
    pad_low = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
    dilated_side = (input_side - 1) * input_dilation + 1 if input_side else 0
    positions = (
        output * stride - pad_low + kernel * kernel_dilation
        for kernel in range(kernel_side)
        for output in range(output_side)
    )
    return sum(0 <= position < dilated_side and position % input_dilation == 0 for position in positions)


def _window(text: str) -> dict[str, str]:
    return dict(_WINDOW_FIELD.findall(text))


def _read_by(user: Instruction, operand: Instruction) -> int:
    """Returns the bytes that an instruction of a fusion reads of an operand."""
    if user.opcode in SLICING:
        return user.shape.size_bytes
    is_updated = user.opcode == "dynamic-update-slice" and user.operands[0] == operand.name
    return 0 if is_updated else operand.shape.size_bytes


def _trips(instruction: Instruction) -> int:
    """Returns the number of rounds of a loop; 1 where XLA does not know it, and for other instructions."""
    found = re.search(r'known_trip_count\\?"?\s*[:=]\s*\{\\?"?n\\?"?\s*:\s*\\?"?(\d+)', str(instruction.attributes))
    return int(found[1]) if found else 1


def _json(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_float(shape: Shape) -> bool:
    return shape.first.dtype.startswith(("f", "bf", "c"))
