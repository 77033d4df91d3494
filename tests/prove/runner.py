"""Runs parts, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.prove import ci_conditions, find_max, intervals, percentile_bounds, processes, verdicts  # noqa: F401
from tests.prove.registry import PARTS, Row


def run(names: Sequence[str], *, seed: int, is_short: bool, jobs: int) -> dict[str, list[Row]]:
    """Returns the rows of the parts `names`."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = {name: pool.submit(rows_of, name, seed, is_short) for name in names}
        return {name: task.result() for name, task in tasks.items()}


def rows_of(name: str, seed: int, is_short: bool) -> list[Row]:
    """Returns the rows of the part `name`."""
    return PARTS[name].rows(seed=seed, is_short=is_short)
