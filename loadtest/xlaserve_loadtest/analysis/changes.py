"""Changes from one run to another: ratios of arms of the same name and load, and reasons not to conclude."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.conditions import Judged, judge
from xlaserve_loadtest.analysis.defaults import judge_by_default
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.multiplicity import corrected
from xlaserve_loadtest.analysis.samples import Sample, by_process, collect, label, rate
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.analysis.verdict import TWO_PROCESSES, Measure, Side, Unit, Verdict
from xlaserve_loadtest.analysis.verdict import judge as judge_ratio
from xlaserve_loadtest.record.lines import Environment, Run
from xlaserve_loadtest.schedule.conditions import (
    DIFFERING,
    ERRORS,
    RATIO,
    VERDICT,
    Condition,
    ConditionError,
    parse,
)

CODE: Final = ("packages.xlaserve", "git_revision")
"""The differences that two runs are usually compared for: the code under test."""

_MACHINE: Final = ("cpu", "cores", "gpus")
_WRITTEN: Final = ("record", "html", "markdown", "csv", "json", "fail_if", "output", "save_arrivals")
"""Options about what is written; every run has names of its own."""
_HARMLESS: Final = (
    *("models", "modes", "baseline", "has_control", "loops", "scenario", "find_max", "slo"),  # only what is measured
    *("seed", "equality_images", "start_timeout_s", "duration_s", "block_s", "ends_when_steady"),
)
"""Options that change no figure of an arm under a load. Lengths of blocks are compared as they were measured."""
_OF_EITHER: Final = (ERRORS, DIFFERING)
"""Figures of one run that two of them are judged by as well: where they are bad, what changed means nothing."""
_LENGTH_LIMIT: Final = 1.2
"""Blocks differ in length where one is longer than the other by this factor."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs other than what they measured."""

    name: str
    text: str
    is_machine: bool = False
    is_reason: bool = True
    """Whether it is a reason not to conclude: it may change figures, and was not the purpose of the comparison."""


@dataclass(frozen=True, slots=True)
class Change:
    """One arm under one load: the second run over the first."""

    arm: str
    label: str
    images_per_s: tuple[float, float]
    """In the first run and in the second."""
    ratios: Mapping[Measure, Estimate | None]
    """Of images/s over the whole time."""
    decides: Measure
    verdict: Verdict
    reason: str
    """Why there is no verdict; empty where there is one."""
    samples: int
    """The smaller number of samples of the two runs."""
    unit: Unit = "blocks"
    is_other_machine: bool = False
    is_withheld: bool = False
    """Whether the verdict was withheld since the runs differ in more than what is compared."""
    holds: str = ""
    """Processes that the verdict and the intervals hold for, in words; empty where for any that run this code."""
    typical: Estimate | None = None
    """Ratio of the images/s of typical blocks or server processes; the verdict must agree with it."""


def changes(first: Run, second: Run, apart: Sequence[Difference] = ()) -> list[Change]:
    """Compares what both runs measured: arms of the same name under the same load. Blocks of two runs are not pairs.

    There is no verdict where one of `apart` is a reason not to conclude, or where blocks differ in length.
    """
    groups = [_groups(run) for run in (first, second)]
    seed = first.header.seed
    found = [
        _change(arm, load, (groups[0][arm, load], groups[1][arm, load]), apart, seed)
        for arm, load in groups[1]
        if (arm, load) in groups[0]
    ]
    left = corrected([(one.ratios[one.decides], one.verdict, one.reason) for one in found])
    return [
        dataclasses.replace(one, verdict=verdict, reason=reason)
        for one, (verdict, reason) in zip(found, left, strict=True)
    ]


def differences(first: Run, second: Run, expected: Sequence[str] = CODE) -> list[Difference]:
    """Returns differences between two runs other than the arms: machine, software, options.

    `expected` names what was changed on purpose, by name or by what stands before a dot: "packages". The machine can't
    be.
    """
    one, other = first.header, second.header
    found: list[Difference] = []

    def add(pairs: Iterable[tuple[str, str]], *, is_machine: bool = False, is_harmless: bool = False) -> None:
        for name, text in pairs:
            is_expected = any(name == own or name.startswith(f"{own}.") for own in expected)
            is_reason = is_machine or not (is_harmless or is_expected)
            found.append(Difference(name, f"{name}: {text}", is_machine, is_reason))

    ids = [set(each.environment.machine_ids) for each in (one, other)]
    if all(ids) and not ids[0] & ids[1]:
        # Two of one type differ by more than two runs on one of them do.
        add([("machine", "another machine, be it of the same type")], is_machine=True)
    for field in (field for field in dataclasses.fields(Environment) if field.name != "machine_ids"):
        values = (getattr(each.environment, field.name) for each in (one, other))
        add(apart(field.name, *values), is_machine=field.name in _MACHINE)
    # What only one version of the load tester records is not known to differ.
    for name in (name for name in one.configuration if name in other.configuration and name not in _WRITTEN):
        add(apart(name, one.configuration[name], other.configuration[name]), is_harmless=name in _HARMLESS)
    return found


def parse_condition(text: str) -> Condition:
    """Reads a condition on two runs: `xla:B/A p99 lower>1.1`, `verdict=slower`, or `errors>1%` of either.

    Raises ConditionError.
    """
    condition = parse(text)
    if condition.metric in _OF_EITHER:
        return condition
    _, side = _sides(condition)
    is_pair = {side, condition.baseline} == {"A", "B"}
    if condition.metric not in (RATIO, VERDICT) or (condition.baseline is not None and not is_pair):
        raise ConditionError(
            f"{text!r}: expected a ratio of the runs such as 'B/A upper<0.95' or 'xla:B/A p99 lower>1.1', a verdict "
            "such as verdict=slower, or errors>1% and differing>1% of either; `loadtest report` judges what else one "
            "run has"
        )
    return condition


def judge_changes(
    found: Sequence[Change], conditions: Iterable[Condition], *, these_processes: bool = False
) -> list[Judged]:
    """Judges the conditions that are about what changed from one run to the other; see `parse_condition`.

    See `judge` for `these_processes`.
    """
    judged = []
    for condition in conditions:
        if condition.metric in _OF_EITHER:
            continue
        arm, side = _sides(condition)
        own = [change for change in found if arm in (None, change.arm)]
        withheld = next((change for change in own if change.is_withheld), None)
        if withheld and (condition.metric == VERDICT or condition.bound):
            where = f"{withheld.arm}, {withheld.label}"
            judged.append(Judged(condition, is_met=True, is_judged=False, found=f"{where}: {withheld.reason}"))
            continue
        plain = dataclasses.replace(condition, arm=side or "B", baseline=condition.baseline or "A")
        judged += judge((), [_as_comparison(change) for change in own], [plain], these_processes=these_processes)
    return judged


def judge_each(first: Summary, second: Summary, conditions: Sequence[Condition]) -> list[Judged]:
    """Judges each of two runs by the `conditions` that are about one, and by those of every run."""
    own = [condition for condition in conditions if condition.metric in _OF_EITHER]
    return [
        dataclasses.replace(
            each, condition=dataclasses.replace(each.condition, text=f"{each.condition.text} in {name}")
        )
        for name, run in (("A", first), ("B", second))
        for each in (
            *judge(run.points, (), own, run.equalities),
            *judge_by_default(run.points, run.equalities, own),
        )
    ]


def _sides(condition: Condition) -> tuple[str | None, str | None]:
    """Returns the arm that a condition is about, and which run stands over the other."""
    if condition.baseline is None:
        return condition.arm, None
    arm, _, side = (condition.arm or "").rpartition(":")
    return arm.strip() or None, side.strip()


def _as_comparison(change: Change) -> Comparison:
    return Comparison(
        arm="B",
        baseline="A",
        label=f"{change.arm}, {change.label}",
        pairs=change.samples,
        unit=change.unit,
        ratios=change.ratios,
        typical=change.typical,
        decides=change.decides,
        verdict=change.verdict,
        reason=change.reason,
        is_control=False,
        holds=change.holds,
    )


def _groups(run: Run) -> dict[tuple[str, str], list[Sample]]:
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in collect(run):
        if sample.block.role == "measure":
            groups.setdefault((sample.block.arm, label(sample.block.load)), []).append(sample)
    return {key: samples for key, samples in groups.items() if any(sample.has_answers for sample in samples)}


def _change(
    arm: str, load: str, sides: tuple[list[Sample], list[Sample]], apart: Sequence[Difference], seed: int
) -> Change:
    # A block in which nothing was answered has no rate; `judge_ratio` counts what was not answered.
    answered = [[sample for sample in side if sample.has_answers] for side in sides]
    rates = [rate(side, "images") for side in sides]
    unit: Unit = "server processes"
    units = [by_process(side) for side in answered]
    if any(len(groups) == 1 for groups in units):
        unit, units = "blocks", [[[sample] for sample in side] for side in answered]
    first, second = (Side(side, groups) for side, groups in zip(sides, units, strict=True))
    judgement = judge_ratio(second, first, unit=unit, seed=seed, paired=False)
    verdict, reason = judgement.verdict, judgement.reason
    is_other_machine = any(each.is_machine for each in apart)
    reasons = [each.text for each in apart if each.is_reason] + list(_lengths(*sides))
    if reasons:
        others = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        verdict, reason = "inconclusive", f"the runs differ in more than what is compared ({reasons[0]}{others})"
    return Change(
        arm=arm,
        label=load,
        images_per_s=(rates[0].value if rates[0] else 0.0, rates[1].value if rates[1] else 0.0),
        ratios=judgement.ratios,
        typical=judgement.typical,
        decides=judgement.decides,
        verdict=verdict,
        reason=reason,
        samples=min(map(len, units)),
        unit=unit,
        is_other_machine=is_other_machine,
        is_withheld=bool(reasons),
        holds=TWO_PROCESSES if unit == "blocks" else "",
    )


def _lengths(first: Sequence[Sample], second: Sequence[Sample]) -> Iterator[str]:
    """Yields that blocks differ in length: where a queue grows, so does latency with the length."""
    one, other = (float(np.median([sample.seconds for sample in side])) for side in (first, second))
    # A closed loop's window ends as planned; offline it lasts as long as the target takes.
    if first[0].block.load.type != "offline" and not 1 / _LENGTH_LIMIT <= other / max(one, 1e-9) <= _LENGTH_LIMIT:
        yield f"block length: {one:.3g} s became {other:.3g} s"


def apart(name: str, one: Any, other: Any) -> Iterator[tuple[str, str]]:
    """Yields the name and the change of everything that differs in two values, field by field: "1 became 2"."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            yield from apart(f"{name}.{key}", one.get(key), other.get(key))
    elif _shown(one) != _shown(other):
        yield name, f"{_shown(one)} became {_shown(other)}"


def _shown(value: Any) -> str:
    if value is None or value in ((), []):
        return "nothing"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
