"""Conditions for CI: how often do they end a build that did nothing wrong, and how often do they find what is wrong?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from tests.loadtest.simulated_arms import Simulated
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.analysis.conditions import judge
from xlaserve_loadtest.run.sender import Live
from xlaserve_loadtest.run.watch import Watch, parse_abort
from xlaserve_loadtest.schedule.conditions import parse

CASES: Final[tuple[tuple[str, float, dict[str, float]], ...]] = (
    # condition, true images/s of xla over graph mode, share of builds in which it is met
    ("xla/graph upper<1.0", 1.0, {"at_most": 0.05}),
    ("verdict=slower", 1.0, {"at_most": 0.05}),
    ("xla/graph upper<0.95", 0.95, {"at_most": 0.05}),
    ("xla/graph upper<0.95", 1.0, {"at_most": 0.01}),
    ("xla/graph p50 lower>1.05", 1.0, {"at_most": 0.05}),
    ("xla/graph lower<0.95", 0.9, {"at_least": 0.95}),
    ("xla/graph upper<0.95", 0.85, {"at_least": 0.8}),
    ("xla/graph<1.0", 1.0, {"at_least": 0.4}),
)
PROCESSES: Final = 8
ANSWERS: Final = 20_000
LOOK: Final = 50


@part
def ci_conditions(trials: Trials) -> Iterator[Row]:
    """Builds that a condition fails, by the true ratio of the arms; a plain ratio is a coin toss."""
    builds = trials.number(400)
    ratios = dict.fromkeys(ratio for _, ratio, _ in CASES)
    for ratio in ratios:
        cases = [(text, limit) for text, own, limit in CASES if own == ratio]
        met = np.zeros(len(cases), int)
        arms = Simulated(processes=PROCESSES, ratio=ratio, between_processes=0.02)
        for seed in trials.random.integers(2**32, size=builds).tolist():
            found = list(arms.compare(seed).values())
            met += [one.is_met for one in judge((), found, [parse(text) for text, _ in cases])]
        for (text, limit), hits in zip(cases, met.tolist(), strict=True):
            yield share(
                f"--fail-if '{text}' is met", f"true ratio {ratio:g}, {PROCESSES} processes", hits, builds, **limit
            )


@part
def abort_if(trials: Trials) -> Iterator[Row]:
    """Runs that `--abort-if 'p99>80ms'` ends, by the true share of answers that take longer."""
    runs = trials.number(400)
    for over, limit in ((0.01, {"at_most": 0.01}), (0.02, {"at_least": 0.95})):
        ended = sum(_is_ended(trials.random, over) for _ in range(runs))
        where = f"{over:.0%} take longer, {ANSWERS:,} answers, a look at each {LOOK}"
        yield share("--abort-if 'p99>80ms' ends the run", where, ended, runs, **limit)


def _is_ended(random: np.random.Generator, over: float) -> bool:
    watch = Watch([parse_abort("p99>80ms")])
    watch.begin("xla", "")
    for latencies_ms in np.where(random.random((ANSWERS // LOOK, LOOK)) < over, 100, 10).astype(np.float32):
        watch.add(Live(LOOK, latencies_ms, 0, np.ones(LOOK, np.bool_)))
    return bool(watch.reason)
