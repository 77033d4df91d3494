"""Explanation of a program: its operations before and after optimisation, and each instruction's cost, bound and
time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Final

from xlaserve.config import Bucket
from xlaserve.inspection import cost
from xlaserve.inspection.buffers import Memory
from xlaserve.inspection.cost import Cost
from xlaserve.inspection.hlo import Module
from xlaserve.inspection.roofline import Machine

_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
GROUP_COLUMNS: Final = ("opcode", "count", "took", "share", "roofline", "FLOPs", "bytes")


def amount(value: float, unit: str, digits: int = 1) -> str:
    """Returns `value` with a decimal prefix: 231.0 MFLOP."""
    for factor, prefix in _PREFIXES:
        if value >= factor:
            return f"{value / factor:.{digits}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def seconds(value: float) -> str:
    """Returns a duration in s, ms or µs, whichever suits it."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


@dataclass(frozen=True, slots=True)
class Row:
    """One instruction of the optimised program."""

    name: str
    opcode: str
    """The opcode; of a fusion with its kind: `fusion kLoop`."""
    shape: str
    layer: str
    cost: Cost
    bound_s: float
    """Least seconds of a run by the roofline model."""
    measured_s: float | None
    """Mean seconds over the traced runs; None where the trace lacks the instruction."""

    @property
    def figures(self) -> tuple[str, ...]:
        """FLOPs, bytes, FLOPs a byte, the roofline's bound and the measured time, as text."""
        took = "" if self.measured_s is None else seconds(self.measured_s)
        cost = self.cost
        flops, moved = amount(cost.flops, "FLOP"), amount(cost.bytes, "B")
        return flops, moved, f"{cost.intensity:.1f}", seconds(self.bound_s), took


@dataclass(frozen=True, slots=True)
class Group:
    """Sums over the instructions of one opcode."""

    opcode: str
    count: int
    cost: Cost
    bound_s: float
    measured_s: float


@dataclass(frozen=True)
class Explanation:
    """Everything that `xlaserve explain` shows of a program."""

    model: str
    source: str
    bucket: Bucket
    device: str
    versions: str
    machine: Machine
    machine_is_measured: bool
    operations_before: int
    """Operations as TensorFlow gave them to XLA."""
    operations_after: int
    """Operations after optimisation, those inside fusions included."""
    fusions: dict[str, int]
    """Number of fusions by kind."""
    rows: tuple[Row, ...]
    """Instructions that run, in the program's order."""
    memory: Memory
    compile_s: float
    measured_s: float
    """Median seconds of a run, alone on the device."""

    @property
    def cost(self) -> Cost:
        """Cost of the whole program."""
        return reduce(Cost.__add__, (row.cost for row in self.rows), Cost())

    @property
    def bound_s(self) -> float:
        """Sum of the instructions' bounds by the roofline model, in seconds."""
        return sum(row.bound_s for row in self.rows)

    @property
    def traced_s(self) -> float:
        """Sum of the measured seconds of all instructions; more than a run takes where several run at the same time."""
        return sum(row.measured_s or 0.0 for row in self.rows)

    def heaviest(self, key: Callable[[Row], float], count: int) -> list[Row]:
        """Returns the `count` rows with the largest `key`, largest first; rows whose key is 0 are left out."""
        return [row for row in sorted(self.rows, key=key, reverse=True) if key(row) > 0][:count]

    def groups(self) -> list[Group]:
        """Returns the rows by opcode, the one that took longest first."""
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            rows.setdefault(row.opcode, []).append(row)
        groups = [
            Group(
                opcode,
                len(members),
                reduce(Cost.__add__, (row.cost for row in members)),
                sum(row.bound_s for row in members),
                sum(row.measured_s or 0.0 for row in members),
            )
            for opcode, members in rows.items()
        ]
        return sorted(groups, key=lambda group: (group.measured_s, group.bound_s), reverse=True)

    def group_cells(self) -> list[tuple[str, ...]]:
        """Returns the groups as text, in GROUP_COLUMNS."""
        total_s = self.traced_s or 1.0
        return [
            (
                group.opcode,
                str(group.count),
                seconds(group.measured_s),
                f"{group.measured_s / total_s:.0%}",
                seconds(group.bound_s),
                amount(group.cost.flops, "FLOP"),
                amount(group.cost.bytes, "B"),
            )
            for group in self.groups()
        ]

    def json(self) -> dict[str, object]:
        """Returns the explanation in JSON's types, in seconds, bytes, FLOPs and FLOP/s."""
        whole = {"flops": self.cost.flops, "bytes": self.cost.bytes, "bound_s": self.bound_s, "traced_s": self.traced_s}
        return {**asdict(self), "bucket": list(self.bucket), **whole}


def rows(module: Module, machine: Machine, measured_s: Mapping[str, float]) -> tuple[Row, ...]:
    """Returns a row for each instruction of the optimised program. `measured_s` has the seconds of a run by
    instruction."""
    return tuple(
        Row(
            name=instruction.name,
            opcode=f"{instruction.opcode} {instruction.kind}".strip(),
            shape=str(instruction.shape),
            layer=instruction.layer,
            cost=price,
            bound_s=machine.bound_s(price),
            measured_s=measured_s.get(instruction.name),
        )
        for instruction, price in cost.instructions(module)
    )


def fusions(module: Module) -> dict[str, int]:
    """Returns the number of fusions that run by kind; each fusion in a loop counts once."""
    return dict(Counter(each.kind for each, _ in cost.instructions(module) if each.opcode == "fusion"))
