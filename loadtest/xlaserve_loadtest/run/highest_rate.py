"""The search for each arm's highest rate, on real targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

import numpy as np

from xlaserve_loadtest.analysis.percentiles import least_count
from xlaserve_loadtest.record.lines import Status
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.recorder import Recorder
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, OpenLoop
from xlaserve_loadtest.schedule.plan import BlockPlan, lasting, length_s
from xlaserve_loadtest.schedule.search import USUAL_STEPS, Slo, TriedRate, highest_rate
from xlaserve_loadtest.settings import Settings

FIRST_SLOTS: Final = 8
"""Slots of the closed loop that a search begins with: half its rate is the first guess."""
FIRST_S: Final = 2.0
COUNT_MARGIN: Final = 1.25
"""How many times the requests that a percentile needs a block is planned for: by chance fewer may arrive."""
LONGEST_S: Final = 60.0
FAST_PER_S: Final = 1e6
"""At this rate `duration_s` alone sets how long a block lasts."""


async def search_rates(
    settings: Settings,
    arms: Sequence[str],
    run_block: Callable[[BlockPlan], Awaitable[Outcome]],
    progress: Progress,
    recorder: Recorder,
) -> None:
    """Searches the highest rate of each arm that meets `settings.slo`; every rate that is tried becomes a block."""
    slo = settings.slo
    assert slo is not None
    about_s = estimate_s(settings)
    progress.say(f"searching the highest rate of {', '.join(arms)}: about {lasting(about_s * len(arms))}")
    for left, arm in zip(range(len(arms), 0, -1), arms, strict=True):
        progress.arm(f"{arm}: first guess", about_s * left)
        outcome = await run_block(_first_block(arm, settings))
        if not outcome.answered.size:
            recorder.event(outcome.end_ns, "error", f"{arm}: nothing was answered, so there is no rate to search")
            continue

        steps = iter(range(USUAL_STEPS, 0, -1))

        async def measure(
            rate_per_s: float, arm: str = arm, later: int = left - 1, steps: Iterator[int] = steps
        ) -> TriedRate:
            block = _search_block(arm, rate_per_s, settings, slo)
            progress.arm(f"{arm}: {rate_per_s:,.1f}/s", about_s * later + length_s(block) * next(steps, 1))
            tried = as_tried(rate_per_s, await run_block(block), slo)
            latency = (
                "too few answers" if tried.latency_ms is None else f"p{slo.percentile:g} {tried.latency_ms:.3g} ms"
            )
            progress.say(f"{arm}: {rate_per_s:,.1f}/s: {latency}: {'holds' if tried.holds(slo) else 'too much'}")
            return tried

        highest = await highest_rate(measure, slo, outcome.answered.size / outcome.window_s() / 2)
        rate = "no rate that was tried" if highest is None else f"{highest:,.1f}/s"
        progress.say(f"{arm}: highest rate with {slo}: {rate}")


def estimate_s(settings: Settings) -> float:
    """Returns how long the search of one arm's highest rate usually takes.

    It takes longer where rates are so low that the percentile needs more time than `duration_s`, or where what was
    found does not hold.
    """
    assert settings.slo is not None
    step = _search_block("", FAST_PER_S, settings, settings.slo)
    return length_s(_first_block("", settings)) + USUAL_STEPS * length_s(step)


def as_tried(rate_per_s: float, outcome: Outcome, slo: Slo) -> TriedRate:
    """Returns what the outcome of a block says of the rate that it offered."""
    measured, answered = outcome.measured, outcome.answered
    latencies_ms = (answered["end_ns"] - answered["scheduled_ns"]) / 1e6
    is_enough = answered.size >= least_count(slo.percentile)
    window_ns = outcome.window_ns or (0, 0)
    rows = outcome.rows
    in_window = (rows["end_ns"] >= window_ns[0]) & (rows["end_ns"] < window_ns[1]) & (rows["status"] == Status.OK)
    # Share of the requests due, not of the rate: by chance a Poisson process brings fewer.
    share = float(in_window.sum()) / measured.size if measured.size else 0.0
    return TriedRate(
        rate_per_s=rate_per_s,
        answered_per_s=share * rate_per_s,
        latency_ms=float(np.percentile(latencies_ms, slo.percentile, method="inverted_cdf")) if is_enough else None,
        failed=int((measured["status"] != Status.OK).sum()) + outcome.dropped,
    )


def _first_block(arm: str, settings: Settings) -> BlockPlan:
    return BlockPlan(arm, ClosedLoop(FIRST_SLOTS), settings.warmup_s, min(FIRST_S, settings.duration_s), "curve")


def _search_block(arm: str, rate_per_s: float, settings: Settings, slo: Slo) -> BlockPlan:
    duration_s = min(max(settings.duration_s, COUNT_MARGIN * least_count(slo.percentile) / rate_per_s), LONGEST_S)
    return BlockPlan(arm, OpenLoop(rate_per_s, "poisson"), settings.warmup_s / 2, duration_s, "search")
