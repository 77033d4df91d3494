"""Compares arms: ratios over paired blocks, with intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from xlaserve_loadtest.analysis.intervals import Estimate, ratio
from xlaserve_loadtest.analysis.judgement import Measure, Verdict, judge
from xlaserve_loadtest.analysis.samples import Sample, label
from xlaserve_loadtest.record.lines import Arm, Header


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm over its baseline, under one load."""

    arm: str
    baseline: str
    label: str
    """The load in words, as in `Point.label`."""
    pairs: int
    """Pairs of blocks."""
    ratios: Mapping[Measure, Estimate | None]
    """Arm over baseline; None where the sample does not support it."""
    decides: Measure
    """The measure that the verdict rests on: images/s, or p50 where the load sets the rate."""
    verdict: Verdict
    reason: str
    """Why it is inconclusive; empty otherwise."""
    is_control: bool
    """An A/A control: two arms that are the same."""

    @property
    def ratio(self) -> Estimate | None:
        """The ratio that the verdict rests on."""
        return self.ratios[self.decides]

    @property
    def has_failed(self) -> bool:
        """Whether it is a control whose equal arms came out different."""
        return self.is_control and self.verdict != "inconclusive"


def baselines(header: Header) -> dict[str, str]:
    """Returns the arm that each arm is compared with, by name: the baseline, or the same arm of another model.

    A control is compared with the arm that it repeats.
    """
    base = next((arm for arm in header.arms if arm.name == header.baseline), None)
    by_arm: dict[str, str] = {}
    for arm in header.arms:
        if arm.is_control_of is not None:
            by_arm[arm.name] = arm.is_control_of
        elif base is not None:
            like = [other for other in header.arms if _is_like(other, base) and other.model == arm.model]
            if like and like[0].name != arm.name:
                by_arm[arm.name] = like[0].name
    return by_arm


def compare(header: Header, samples: Sequence[Sample]) -> tuple[Comparison, ...]:
    """Compares every arm with its baseline under every load that both were measured under."""
    measured = [sample for sample in samples if sample.block.role == "measure"]
    loads = list(dict.fromkeys(label(sample.block.load) for sample in measured))
    controls = {arm.name for arm in header.arms if arm.is_control_of is not None}
    comparisons: list[Comparison] = []
    for arm, baseline in baselines(header).items():
        for load in loads:
            own, other = (
                [sample for sample in measured if sample.block.arm == name and label(sample.block.load) == load]
                for name in (arm, baseline)
            )
            if own and other:
                comparisons.append(_compare(own, other, load, is_control=arm in controls, seed=header.seed))
    return _mind_controls(header.arms, comparisons)


def _compare(own: Sequence[Sample], other: Sequence[Sample], load: str, *, is_control: bool, seed: int) -> Comparison:
    pairs = _pair(own, other)
    own_ns, other_ns = ([pair[side].latencies_ns for pair in pairs] for side in (0, 1))
    logs = [math.log((a.images_per_s or math.nan) / (b.images_per_s or math.nan)) for a, b in pairs]
    images_per_s = ratio(logs, seed=seed) if pairs else None
    judgement = judge(images_per_s, own_ns, other_ns, own[0].block.load.type, seed=seed)
    return Comparison(own[0].block.arm, other[0].block.arm, load, len(pairs), *judgement, is_control)


def _pair(own: Sequence[Sample], other: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pairs the blocks of two arms: those of one round, in their order; without rounds, all in their order.

    A pair of which one side answered nothing is left out: a failure is reported as such, not as slowness.
    """
    pairs: list[tuple[Sample, Sample]] = []
    for turn in dict.fromkeys(sample.block.round for sample in own):
        sides = ([sample for sample in side if sample.block.round == turn] for side in (own, other))
        pairs += zip(*sides, strict=False)
    return [pair for pair in pairs if all(sample.images_per_s for sample in pair)]


def _mind_controls(arms: Sequence[Arm], comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Withdraws verdicts under loads where two equal arms came out different."""
    models = {arm.name: arm.model for arm in arms}
    spoilt = {(models[comparison.arm], comparison.label) for comparison in comparisons if comparison.has_failed}
    withdrawn = "the A/A control failed: two equal arms came out different"
    return tuple(
        replace(comparison, verdict="inconclusive", reason=withdrawn)
        if (models[comparison.arm], comparison.label) in spoilt and not comparison.is_control
        else comparison
        for comparison in comparisons
    )


def _is_like(arm: Arm, other: Arm) -> bool:
    return arm.name == other.name or (
        arm.mode == other.mode and arm.is_control_of is None and arm.model != other.model and arm.target == other.target
    )
