"""Runs the parts of this folder's modules, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from tests.prove.registry import PARTS, Row

for _module in sorted(Path(__file__).parent.glob("[!_]*.py")):
    import_module(f"tests.prove.{_module.stem}")  # registers its parts


def run(names: Sequence[str], *, seed: int, is_short: bool, jobs: int) -> dict[str, list[Row]]:
    """Returns the rows of the parts `names`."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = {name: pool.submit(rows_of, name, seed, is_short) for name in names}
        return {name: task.result() for name, task in tasks.items()}


def rows_of(name: str, seed: int, is_short: bool) -> list[Row]:
    """Returns the rows of the part `name`."""
    return PARTS[name].rows(seed=seed, is_short=is_short)
