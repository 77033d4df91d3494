"""A program explained: what XLA made of it, what each instruction costs at best, and what it took."""

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
    """The opcode, for a fusion with its kind: `fusion kLoop`."""
    shape: str
    layer: str
    cost: Cost
    bound_s: float
    """What the roofline allows at best."""
    measured_s: float | None
    """Mean of the traced runs; None where the trace does not know it."""

    @property
    def figures(self) -> tuple[str, ...]:
        """FLOPs, bytes, FLOPs a byte, the roofline's bound and what it took, as text."""
        took = "" if self.measured_s is None else seconds(self.measured_s)
        cost = self.cost
        flops, moved = amount(cost.flops, "FLOP"), amount(cost.bytes, "B")
        return flops, moved, f"{cost.intensity:.1f}", seconds(self.bound_s), took


@dataclass(frozen=True, slots=True)
class Group:
    """Instructions of one opcode together."""

    opcode: str
    count: int
    cost: Cost
    bound_s: float
    measured_s: float


@dataclass(frozen=True)
class Explanation:
    """All that is shown of a program."""

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
    """How many, by their kind."""
    rows: tuple[Row, ...]
    """What is run, in the program's order."""
    memory: Memory
    compile_s: float
    measured_s: float
    """Median seconds of a run, alone on the device."""

    @property
    def cost(self) -> Cost:
        """The whole program's."""
        return reduce(Cost.__add__, (row.cost for row in self.rows), Cost())

    @property
    def bound_s(self) -> float:
        """What the roofline allows at best, instruction by instruction."""
        return sum(row.bound_s for row in self.rows)

    @property
    def traced_s(self) -> float:
        """The sum over all instructions; more than a run where several run at the same time."""
        return sum(row.measured_s or 0.0 for row in self.rows)

    def heaviest(self, key: Callable[[Row], float], count: int) -> list[Row]:
        """Returns the `count` rows with the largest `key`, largest first, and none of which it is 0."""
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
        """Returns it as JSON's types; seconds, bytes, FLOPs and FLOP/s."""
        whole = {"flops": self.cost.flops, "bytes": self.cost.bytes, "bound_s": self.bound_s, "traced_s": self.traced_s}
        return {**asdict(self), "bucket": list(self.bucket), **whole}


def rows(module: Module, machine: Machine, measured_s: Mapping[str, float]) -> tuple[Row, ...]:
    """Returns what the optimised program `module` runs; `measured_s` gives the seconds of an instruction's run."""
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
    """Returns how many fusions of each kind the program runs, those of a loop once."""
    return dict(Counter(each.kind for each, _ in cost.instructions(module) if each.opcode == "fusion"))
