"""The search for each arm's highest rate, on real targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.recorder import Recorder
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, OpenLoop
from xlaserve_loadtest.schedule.early_stopping import least_requests
from xlaserve_loadtest.schedule.plan import BlockPlan, lasting, length_s
from xlaserve_loadtest.schedule.search import MAX_RUN_S, Search, TriedRate, estimate_s
from xlaserve_loadtest.settings import Settings

FIRST_SLOTS: Final = 8
"""Slots of the closed loop that a search begins with: half its rate is the first guess."""
FIRST_S: Final = 2.0
SHORT_S: Final = 5.0
"""Least length of a run that looks for a candidate."""
WARMUP_SHARE: Final = 0.05
"""Share of a confirming run's length that it warms up for: queues start empty."""


class RateSearch:
    """Searches the highest rate of each arm that meets `settings.slo`; every rate that is tried becomes a block."""

    def __init__(
        self,
        settings: Settings,
        run_block: Callable[[BlockPlan], Awaitable[Outcome]],
        progress: Progress,
        recorder: Recorder,
    ) -> None:
        assert settings.slo is not None
        self._settings = settings
        self._slo = settings.slo
        self._run_block = run_block
        self._progress = progress
        self._recorder = recorder
        # Only what confirms a rate has to be long enough for what comes seldom.
        self._lengths_s = min(settings.duration_s, SHORT_S), settings.duration_s

    async def run(self, arms: Sequence[str]) -> None:
        """Searches one arm after the other.

        How long that takes depends on how fast the arms are: all of them are asked for that before the first search.
        """
        guesses: dict[str, float] = {}
        self._progress.say(f"searching the highest rate of {', '.join(arms)} with {self._slo}")
        for arm in arms:
            if guess := await self._first_guess(arm):
                guesses[arm] = guess
        if not guesses:
            return
        estimates = {arm: estimate_s(self._slo, guess, *self._lengths_s) for arm, guess in guesses.items()}
        usual_s, most_s = (sum(ends) for ends in zip(*estimates.values(), strict=True))
        self._progress.say(f"it takes about {lasting(usual_s)}, and up to {lasting(most_s)} where queues are long")
        later_s = usual_s
        for arm, guess in guesses.items():
            own_s, _ = estimates[arm]
            later_s -= own_s
            await self._search(arm, guess, own_s, later_s)

    async def _first_guess(self, arm: str) -> float | None:
        """Returns half of what a closed loop brings, in requests/s; None where nothing was answered."""
        settings = self._settings
        self._progress.arm(f"{arm}: first guess", None)
        seconds = min(FIRST_S, settings.duration_s)
        outcome = await self._run_block(BlockPlan(arm, ClosedLoop(FIRST_SLOTS), settings.warmup_s, seconds, "curve"))
        if not outcome.answered.size:
            text = f"{arm}: nothing was answered, so there is no rate to search"
            self._recorder.event(outcome.end_ns, "error", text)
            return None
        guess = outcome.answered.size / outcome.window_s() / 2
        if 2 * guess * MAX_RUN_S < least_requests(self._slo.percentile):
            text = f"{arm}: too slow for p{self._slo.percentile:g}: {lasting(MAX_RUN_S)} hold too few requests for it"
            self._recorder.event(outcome.end_ns, "error", text)
            return None
        return guess

    async def _search(self, arm: str, guess: float, own_s: float, later_s: float) -> None:
        settings, slo, left_s = self._settings, self._slo, own_s

        async def measure(rate_per_s: float, seconds: float, confirms: bool) -> TriedRate:
            nonlocal left_s
            warmup_s = max(settings.warmup_s / 2, WARMUP_SHARE * seconds if confirms else 0.0)
            load = OpenLoop(rate_per_s, settings.search_arrivals)
            block = BlockPlan(arm, load, warmup_s, seconds, "confirm" if confirms else "search")
            what = f"{arm}: {'confirming' if confirms else 'trying'} {rate_per_s:,.1f}/s for {lasting(seconds)}"
            self._progress.arm(what, max(left_s, length_s(block)) + later_s)
            outcome = await self._run_block(block)
            left_s -= length_s(block)
            tried = TriedRate.of(rate_per_s, slo, outcome.rows, outcome.window_ns, outcome.dropped)
            holds = tried.is_confirmed if confirms else tried.holds
            verdict = ("confirmed" if holds else "not confirmed") if confirms else ("holds" if holds else "too much")
            over = f"{tried.tail.over:,} of {tried.tail.requests:,} over {slo.limit_ms:g} ms"
            self._progress.say(f"{what}: {over}: {verdict}")
            return tried

        found = await Search(measure, slo, *self._lengths_s).run(guess)
        rate = "no rate was confirmed" if found.confirmed_per_s is None else f"{found.confirmed_per_s:,.1f}/s"
        rejected = "" if found.rejected_per_s is None else f"; {found.rejected_per_s:,.1f}/s is too much"
        self._progress.say(f"{arm}: highest rate with {slo}: {rate}{rejected}")
