"""Compares arms: ratios over pairs of server processes or of blocks, with intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from xlaserve_loadtest.analysis import generator
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.multiplicity import corrected
from xlaserve_loadtest.analysis.samples import Sample, label
from xlaserve_loadtest.analysis.verdict import (
    MEASURE_NAMES,
    TWO_PROCESSES,
    Measure,
    Side,
    Unit,
    Verdict,
    judge,
)
from xlaserve_loadtest.record.lines import Arm, Header

Pair = tuple[Sample, Sample]

FAR_BEYOND = 4.0
"""Multiple of the difference between equal arms, as logarithms of ratios, from which an arm's difference stands.

A control fails by chance, too: by a thousandth where times hardly vary, which says nothing about a factor of two.
"""

RIVALS = ("xla", "openvino")
"""Modes that are compared with each other too: the two that compile."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm over its baseline, under one load."""

    arm: str
    baseline: str
    label: str
    """The load in words, as in `Point.label`."""
    pairs: int
    """How many pairs of `unit` the intervals rest on."""
    unit: Unit
    """The unit of a sample: a server process, where each arm had several, or else a block."""
    ratios: Mapping[Measure, Estimate | None]
    """Arm over baseline; None where the sample does not support it. Images/s are over the whole time."""
    decides: Measure
    """The measure that the verdict rests on: images/s or, where the load sets the rate, p50 or p99."""
    verdict: Verdict
    reason: str
    """Why it is inconclusive, or what it rests on but the ratio; empty otherwise."""
    is_control: bool
    """An A/A control: two arms that are the same."""
    doubts: Mapping[Measure, str] = field(default_factory=dict)
    """Measures of which nothing can be concluded, since the A/A control did not show that equal arms come out equal,
    with the reason."""
    holds: str = ""
    """Processes that the verdict and the intervals hold for, in words; empty where for any that run the same code."""
    typical: Estimate | None = None
    """Ratio of the images/s of a typical pair, however slow a few of them were; the verdict must agree with it."""
    wrong: Mapping[str, float] = field(default_factory=dict)
    """Share of the compared answers that were wrong, of each arm that gave such: how fast they came means little."""

    @property
    def ratio(self) -> Estimate | None:
        """The ratio that the verdict rests on."""
        return self.ratios[self.decides]

    @property
    def failed(self) -> tuple[Measure, ...]:
        """The measures in which the equal arms of a control came out different."""
        return tuple(measure for measure, ratio in self.ratios.items() if self.is_control and _distance(ratio))

    @property
    def has_failed(self) -> bool:
        """Whether it is a control that failed in the measure that decides."""
        return self.decides in self.failed


def baselines(header: Header) -> dict[str, str]:
    """Returns the arm that each arm is compared with, by name: the baseline, or the same arm of another model.

    Arms that are servers have one baseline. A control is compared with the arm that it repeats.
    """
    base = next((arm for arm in header.arms if arm.name == header.baseline), None)
    by_arm: dict[str, str] = {}
    for arm in header.arms:
        if arm.is_control_of is not None:
            by_arm[arm.name] = arm.is_control_of
        elif base is not None and header.configuration.get("arms"):
            if arm is not base:
                by_arm[arm.name] = base.name
        elif base is not None:
            like = [other for other in header.arms if _is_like(other, base) and other.model == arm.model]
            if like and like[0].name != arm.name:
                by_arm[arm.name] = like[0].name
    return by_arm


def pairs(header: Header) -> list[tuple[str, str]]:
    """Returns which arm is compared with which: each with its baseline and, of the same model, XLA with OpenVINO."""
    found = [*baselines(header).items()]
    arms = [arm for arm in header.arms if arm.is_control_of is None]
    for arm, other in permutations(arms, 2):
        pair = arm.name, other.name
        if (
            (arm.mode, other.mode) == RIVALS
            and (arm.model, arm.target) == (other.model, other.target)
            and not {pair, pair[::-1]} & set(found)
        ):
            found.append(pair)
    return found


def compare(header: Header, samples: Sequence[Sample]) -> tuple[Comparison, ...]:
    """Compares the `pairs` under every load that both were measured under."""
    measured = [sample for sample in samples if sample.block.role == "measure"]
    loads = list(dict.fromkeys(label(sample.block.load) for sample in measured))
    controls = {arm.name for arm in header.arms if arm.is_control_of is not None}
    controls_of = {arm.is_control_of: arm.name for arm in header.arms if arm.is_control_of is not None}
    comparisons: list[Comparison] = []
    for arm, baseline in pairs(header):
        for load in loads:
            own, other, twin = (
                [sample for sample in measured if sample.block.arm == name and label(sample.block.load) == load]
                for name in (arm, baseline, controls_of.get(baseline))
            )
            if own and other:
                comparisons.append(
                    _compare(own, _with_twin(other, twin, own), load, is_control=arm in controls, seed=header.seed)
                )
    return _mind_number(_mind_controls(comparisons, baselines(header)))


def _with_twin(baseline: Sequence[Sample], twin: Sequence[Sample], own: Sequence[Sample]) -> Sequence[Sample]:
    """Returns the blocks of a baseline and, where the arm was measured as often as both, those of its control.

    That is where both ran on one server: they are blocks of the same, and a control is not compared with itself.
    """
    is_shared = {sample.block.server for sample in baseline} == {sample.block.server for sample in twin}
    if not is_shared or len(own) <= len(baseline):
        return baseline
    return sorted([*baseline, *twin], key=lambda sample: sample.block.index)


def _compare(own: Sequence[Sample], other: Sequence[Sample], load: str, *, is_control: bool, seed: int) -> Comparison:
    unit, groups = _samples_of(_pair(own, other))
    sides = [
        Side(samples, [[pair[side] for pair in group] for group in groups]) for side, samples in enumerate((own, other))
    ]
    judged = judge(*sides, unit=unit, seed=seed, paired=True)
    found = Comparison(
        arm=own[0].block.arm,
        baseline=other[0].block.arm,
        label=load,
        pairs=len(groups),
        unit=unit,
        ratios=judged.ratios,
        typical=judged.typical,
        decides=judged.decides,
        verdict=judged.verdict,
        reason=judged.reason,
        is_control=is_control,
        wrong={samples[0].block.arm: share for samples in (own, other) if (share := _wrong_share(samples))},
    )
    if unit == "blocks" and own[0].block.server != other[0].block.server:
        found = replace(found, holds=TWO_PROCESSES)
    limited = [samples[0].block.arm for samples in (own, other) if generator.figures(samples).is_limited]
    if limited:
        # What was measured is the generator: it may be the same for both, or hide more of the one than of the other.
        return replace(found, verdict="inconclusive", reason=f"generator-limited: {', '.join(limited)}")
    return found


def _wrong_share(samples: Sequence[Sample]) -> float:
    """Returns the share of the compared answers that differ from what the same request got alone."""
    compared = sum(sample.block.generator.compared for sample in samples)
    return sum(sample.block.generator.differing for sample in samples) / compared if compared else 0.0


def _samples_of(pairs: Sequence[Pair]) -> tuple[Unit, list[list[Pair]]]:
    """Groups pairs of blocks by what was drawn independently.

    Blocks of one server process share its threads, its memory and its place on the machine. Where each arm had several
    processes, the pair of processes is the sample; otherwise the pair of blocks is.
    """
    by_processes: dict[tuple[int | None, int | None], list[Pair]] = {}
    for own, other in pairs:
        by_processes.setdefault((own.block.server, other.block.server), []).append((own, other))
    if len(by_processes) > 1:
        return "server processes", list(by_processes.values())
    return "blocks", [[pair] for pair in pairs]


def _pair(own: Sequence[Sample], other: Sequence[Sample]) -> list[Pair]:
    """Pairs the blocks of two arms: those of one round, in their order; without rounds, all in their order.

    A pair of which one side answered nothing is left out: a failure is reported as such, not as slowness.
    """
    pairs: list[Pair] = []
    for turn in dict.fromkeys(sample.block.round for sample in own):
        sides = ([sample for sample in side if sample.block.round == turn] for side in (own, other))
        pairs += zip(*sides, strict=False)
    return [pair for pair in pairs if all(sample.has_answers for sample in pair)]


def _mind_controls(comparisons: Sequence[Comparison], baselines: Mapping[str, str]) -> tuple[Comparison, ...]:
    """Withdraws what the control of the same baseline, under the same load, does not support, measure by measure.

    Arms that are no baseline, and have no control, have that of their own baseline.
    """
    controls = {(one.baseline, one.label): one for one in comparisons if one.is_control}
    minded: list[Comparison] = []
    for one in comparisons:
        control = controls.get((one.baseline, one.label)) or controls.get((baselines.get(one.arm, ""), one.label))
        if control and control is not one:
            found = {measure: _doubt(measure, ratio, control) for measure, ratio in one.ratios.items()}
            one = replace(one, doubts={measure: doubt for measure, doubt in found.items() if doubt})  # noqa: PLW2901
            if one.decides in one.doubts:
                one = replace(one, verdict="inconclusive", reason=one.doubts[one.decides])  # noqa: PLW2901
        minded.append(one)
    return tuple(minded)


def _mind_number(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Withdraws verdicts that chance would give so many comparisons."""
    left = iter(corrected([(one.ratio, one.verdict, one.reason) for one in comparisons if not one.is_control]))
    minded: list[Comparison] = []
    for one in comparisons:
        verdict, reason = (one.verdict, one.reason) if one.is_control else next(left)
        minded.append(replace(one, verdict=verdict, reason=reason))
    return tuple(minded)


def _doubt(measure: Measure, ratio: Estimate | None, control: Comparison) -> str:
    """Returns why an arm's ratio says nothing, as its control shows; empty where it does or claims nothing anyway."""
    equal = control.ratios[measure]
    claimed, spurious = _distance(ratio), _distance(equal)
    if spurious is not None:
        if claimed is not None and claimed.least >= FAR_BEYOND * spurious.most:
            return ""
        return "the A/A control failed: two equal arms came out different"
    if ratio is None or claimed is None:
        return ""
    if equal is None or equal.low is None or equal.high is None:
        return f"the A/A control has no interval for {MEASURE_NAMES[measure]}"
    half = math.log(equal.high / equal.low) / 2
    if abs(math.log(ratio.value)) < half:
        return f"the A/A control is too noisy to tell: its own interval is {math.expm1(half):.1%} to each side"
    return ""


@dataclass(frozen=True, slots=True)
class _Distance:
    """Least and most distance from 1, as logarithms, of the ratios in an interval that does not contain 1."""

    least: float
    most: float


def _distance(ratio: Estimate | None) -> _Distance | None:
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return None
    return _Distance(*sorted((abs(math.log(ratio.low)), abs(math.log(ratio.high)))))


def _is_like(arm: Arm, other: Arm) -> bool:
    return arm.name == other.name or (
        arm.mode == other.mode and arm.is_control_of is None and arm.model != other.model and arm.target == other.target
    )
