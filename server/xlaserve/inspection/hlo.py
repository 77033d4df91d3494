"""A parser of XLA's programs as text (HLO); see https://openxla.org/xla/operation_semantics for the operations.

It reads XLA's output before and after optimisation: with or without types before operands, with or without `%` before
names. It does not validate: attributes of an instruction that it does not interpret are kept as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_BITS: Final = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of an element of the types whose name has no number of bits, as `f32`, `bf16`, `s4` and `f8e4m3fn` have."""
_NUMBER_TYPE: Final = re.compile(r"(?:[suc]|b?f)(\d+)")
_COMMENT: Final = re.compile(r"/\*.*?\*/")
_ARRAY: Final = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([^\s(]+) ?(?:\(.*\) -> .*)?\{$")
_INSTRUCTION: Final = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE: Final = re.compile(r" ?([a-z][a-z0-9-]*)\(")
_CALLED: Final = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation")
_OPENING: Final = {"(": ")", "{": "}", "[": "]"}


class HloSyntaxError(ValueError):
    """The text is not HLO as XLA prints it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One array, or a tuple of them."""

    dtype: str
    """`f32`, `u8`, ...; empty for a tuple."""
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] = ()
    """The elements of a tuple."""

    @property
    def size(self) -> int:
        """The number of elements; of a tuple, of all its arrays."""
        return math.prod(self.dims) if self.dtype else sum(shape.size for shape in self.elements)

    @property
    def size_bytes(self) -> int:
        """Bytes of the data."""
        if not self.dtype:
            return sum(shape.size_bytes for shape in self.elements)
        if self.dtype in _BITS:
            bits = _BITS[self.dtype]
        elif number := _NUMBER_TYPE.match(self.dtype):
            bits = int(number[1])
        else:
            raise HloSyntaxError(f"an array of unknown type {self.dtype}")
        return math.ceil(self.size * bits / 8)

    @property
    def first(self) -> Shape:
        """The array itself, or the first array of a tuple."""
        return self if self.dtype or not self.elements else self.elements[0].first

    def __str__(self) -> str:
        if not self.dtype:
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation and its operands."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation; empty for a parameter and a constant."""
    literal: str = ""
    """The text between the parentheses after the opcode."""
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def op_name(self) -> str:
        """The TensorFlow operation that it was made from, with the scopes of Keras's layers; empty where not known."""
        found = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @property
    def layer(self) -> str:
        """The layer in `op_name`, without the model's scope and the operation's own name; the first of several
        layers."""
        parts = [part for part in self.op_name.partition(";")[0].split("/") if not part.endswith("PartitionedCall")]
        return "/".join(parts[1:-1] if len(parts) > 2 else parts[:-1] or parts)

    @property
    def kind(self) -> str:
        """The kind of a fusion: `kLoop`, `kOutput`, ...; empty for other instructions."""
        return self.attributes.get("kind", "")

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs."""
        texts = (self.attributes[key] for key in _CALLED if key in self.attributes)
        return tuple(name.strip().lstrip("%") for text in texts for name in text.strip("{}").split(","))


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in their order, by name."""

    instructions: dict[str, Instruction]

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters, in the order of their numbers."""
        found = (each for each in self.instructions.values() if each.opcode == "parameter")
        return tuple(sorted(found, key=lambda parameter: int(parameter.literal)))

    def users(self) -> dict[str, list[Instruction]]:
        """Returns the users of each instruction: the instructions that have it as an operand."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users


@dataclass(frozen=True, slots=True)
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: Computation

    def count(self) -> int:
        """Returns the number of operations, those inside fusions and other computations included.

        Parameters, constants, bitcasts, tuples and elements of tuples are not counted.
        """
        bodies = self.computations.values()
        return sum(each.opcode not in NO_OPERATION for body in bodies for each in body.instructions.values())


NO_OPERATION: Final = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
)
"""Opcodes that compute nothing and move no data."""


def parse(text: str) -> Module:
    """Parses a module. Raises HloSyntaxError, which names the line that can't be parsed."""
    computations = {}
    entry: Computation | None = None
    current: Computation | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if current is not None:
            if line.startswith("}"):
                current = None
            elif line.strip():
                instruction = _instruction(line, number)
                current.instructions[instruction.name] = instruction
        elif found := _COMPUTATION.match(line):
            current = computations[found[2]] = Computation({})
            entry = current if found[1] else entry
    if entry is None or not entry.instructions:
        raise HloSyntaxError("expected a module with an ENTRY computation")
    return Module(computations, entry)


def parse_shape(text: str) -> Shape:
    """Parses `f32[2,3]{1,0}` or `(f32[2], u8[3])`."""
    shape, rest = _take_shape(_COMMENT.sub("", text).strip())
    if rest.strip():
        raise HloSyntaxError(f"expected a shape, got {text[:80]!r}")
    return shape


def _instruction(line: str, number: int) -> Instruction:
    try:
        found = _INSTRUCTION.match(_COMMENT.sub("", line))
        if found is None:
            raise HloSyntaxError("no instruction")
        shape, rest = _take_shape(found[2])
        opcode = _OPCODE.match(rest)
        if opcode is None:
            raise HloSyntaxError("no opcode")
        inside, rest = _take_group(rest[opcode.end() - 1 :])
        literal = inside[1:-1]
        is_leaf = opcode[1] in ("parameter", "constant", "iota")
        operands = () if is_leaf else tuple(part.split()[-1].lstrip("%") for part in _split(literal))
        return Instruction(found[1], shape, opcode[1], operands, literal, _attributes(rest))
    except HloSyntaxError as error:
        raise HloSyntaxError(f"line {number}: {error} in {line.strip()[:80]!r}") from None


def _take_shape(text: str) -> tuple[Shape, str]:
    """Returns the shape at the beginning of `text`, and the rest of `text`."""
    if text.startswith("("):
        inside, rest = _take_group(text)
        return Shape("", elements=tuple(parse_shape(part) for part in _split(inside[1:-1]))), rest
    found = _ARRAY.match(text)
    if found is None:
        raise HloSyntaxError("no shape")
    # A bounded dynamic dimension is written <=8, and counts with its bound.
    dims = tuple(int(side.strip().removeprefix("<=")) for side in found[2].split(",") if side.strip())
    rest = text[found.end() :]
    if rest.startswith("{"):
        _, rest = _take_group(rest)
    return Shape(found[1], dims), rest


def _take_group(text: str) -> tuple[str, str]:
    """Returns the bracketed group at the beginning of `text`, and the rest of `text`."""
    open_brackets = []
    for index, letter in _outside_quotes(text):
        if letter in _OPENING:
            open_brackets.append(_OPENING[letter])
        elif open_brackets and letter == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return text[: index + 1], text[index + 1 :]
    raise HloSyntaxError("an open bracket")


def _outside_quotes(text: str) -> Iterator[tuple[int, str]]:
    is_quoted = is_escaped = False
    for index, letter in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif letter == "\\":
            is_escaped = is_quoted
        elif letter == '"':
            is_quoted = not is_quoted
        elif not is_quoted:
            yield index, letter


def _split(text: str) -> list[str]:
    """Splits at the commas outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    for index, letter in _outside_quotes(text):
        if letter in "({[":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _attributes(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in _split(text))
    return {key.strip(): value.strip() for key, _, value in pairs}
