"""Verdicts where server processes of the same code differ: false ones, and true ones that are found."""

from __future__ import annotations

from collections.abc import Iterator

from tests.loadtest.simulated_arms import Simulated
from tests.prove.registry import Row, Trials, part, share


@part
def processes(trials: Trials) -> Iterator[Row]:
    """Processes that differ by 1 or 3%, blocks by 1%: false verdicts and power, for several processes and for one."""
    runs = trials.number(1000)
    for spread in (0.01, 0.03):
        for count in trials.some(4, 6, 8):
            where = f"processes differ by {spread:.0%}, {count} for each arm"
            equal = Simulated(processes=count, between_processes=spread)
            yield share("false verdicts", where, _verdicts(trials, equal, runs), runs, at_most=0.05)
    for modes, count in trials.some((0.05, 6), (0.1, 6), (0.1, 8)):
        where = f"half of one arm's processes faster by {modes:.0%}, half slower, {count} for each arm"
        bimodal = Simulated(processes=count, between_processes=0.005, modes=modes)
        yield share("false verdicts", where, _verdicts(trials, bimodal, runs), runs, at_most=0.06)
    # What loadtest does not do unless it is told to: the blocks of one process can't show what differs between two.
    once = Simulated(processes=1, rounds=8, control_shares_process=True)
    shared = "processes differ by 3%, one for each arm, shared with the control"
    yield share("false verdicts (why there are several)", shared, _verdicts(trials, once, runs), runs, at_least=0.4)
    for spread, ratio, least in (
        (0.01, 1.05, {4: 0.55, 6: 0.9, 8: 0.9}),
        (0.03, 1.05, {4: 0.05, 6: 0.25, 8: 0.5}),
        (0.03, 1.1, {4: 0.4, 6: 0.85, 8: 0.9}),
    ):
        for count in trials.some(*least):
            where = f"{ratio - 1:.0%}, processes differ by {spread:.0%}, {count} for each arm"
            other = Simulated(processes=count, between_processes=spread, ratio=ratio)
            yield share(
                "a true difference is found", where, _verdicts(trials, other, runs), runs, at_least=least[count]
            )


def _verdicts(trials: Trials, simulated: Simulated, runs: int) -> int:
    seeds = trials.random.integers(0, 2**32, runs).tolist()
    return sum(simulated.compare(seed)["xla"].verdict != "inconclusive" for seed in seeds)
