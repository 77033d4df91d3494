"""Verdicts of whole runs: how often is any of them false, and how often is a true difference found?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Literal

import numpy as np
from tests.prove.registry import Row, Trials, part, share
from tests.prove.runs import CONTROL, Blocks, header

from xlaserve_loadtest.analysis.compare import Comparison, compare
from xlaserve_loadtest.record.blocks import LoadLine

Noise = Literal["3% from block to block", "a tenth of blocks stalls", "2% from process to process"]

REQUESTS: Final = 40
"""Answers of a block."""


def comparisons(
    random: np.random.Generator,
    noise: Noise,
    *,
    arms: int,
    loads: int = 1,
    pairs: int = 8,
    is_open: bool = False,
    gain: float = 0.0,
) -> list[Comparison]:
    """Simulates a run and returns its comparisons without the control. arm1 is faster by `gain`; all others are equal.

    Where processes differ, each arm has one for each pair of blocks.
    """
    head, blocks = header(arms), Blocks()
    has_processes = noise.startswith("2% from process")
    block_noise = {"3% from block to block": 0.03, "a tenth of blocks stalls": 0.015}.get(noise, 0.02)
    names = [arm.name for arm in head.arms]
    servers = 0
    for turn in range(pairs):
        speeds = random.normal(0, 0.02 if has_processes else 0, len(names))
        for number in range(loads):
            load = LoadLine("open", rate_per_s=20.0 + number, arrivals="constant")
            load = load if is_open else LoadLine("closed", concurrency=number + 1)
            for place, name in enumerate(names):
                slowness = speeds[place] + random.normal(0, block_noise)
                if noise == "a tenth of blocks stalls" and random.random() < 0.1:
                    slowness -= math.log1p(-random.uniform(0.3, 0.8))
                mean_ms = 10 * math.exp(slowness) / (1 + gain * (name == "arm1"))
                latencies_ms = mean_ms * random.lognormal(0, 0.1, REQUESTS)
                blocks.add(name, load, latencies_ms, server=servers + place if has_processes else 0, turn=turn)
        servers += len(names) if has_processes else 0
    return [one for one in compare(head, blocks.samples) if one.arm != CONTROL]


@part
def false_verdicts(trials: Trials) -> Iterator[Row]:
    """Runs of equal arms with a control: how many give any verdict at all?"""
    runs = trials.number(600)
    noises: tuple[Noise, ...] = (
        "3% from block to block",
        "a tenth of blocks stalls",
        "2% from process to process",
    )
    for noise in noises:
        for arms, loads, pairs in trials.some((2, 1, 4), (2, 1, 8), (2, 1, 16), (2, 4, 8), (4, 2, 8), (6, 4, 5)):
            is_open = loads > 1 and arms < 4
            found = (
                comparisons(trials.random, noise, arms=arms, loads=loads, pairs=pairs, is_open=is_open)
                for _ in range(runs if arms * loads < 10 else runs // 2)
            )
            wrong = [any(one.verdict != "inconclusive" for one in all_of_run) for all_of_run in found]
            kind = "open" if is_open else "closed"
            where = f"{arms} arms, {loads} {kind} loads, {pairs} pairs, {noise}"
            yield share("runs of equal arms with any verdict", where, sum(wrong), len(wrong), at_most=0.05)


@part
def open_loops(trials: Trials) -> Iterator[Row]:
    """Open loops without a limit: arms of a lower p50, of which some answers take much longer, and arms of none."""
    runs = trials.number(400)
    for gain, slow, times, limit in (
        (0.1, 0.02, 6.0, {"at_most": 0.02}),
        (0.0, 0.02, 6.0, {"at_most": 0.02}),
        (0.1, 0.0, 1.0, {"at_least": 0.8}),
        (0.0, 0.0, 1.0, {"at_most": 0.05}),
    ):
        faster = sum(_is_faster_in_an_open_loop(trials.random, gain, slow, times) for _ in range(runs))
        where = f"p50 lower by {gain:.0%}, {slow:.0%} take {times:g} times as long, 8 pairs of 200 answers"
        yield share("an arm is called faster", where, faster, runs, **limit)


def _is_faster_in_an_open_loop(random: np.random.Generator, gain: float, slow: float, times: float) -> bool:
    head, blocks = header(2), Blocks()
    load = LoadLine("open", rate_per_s=20.0, arrivals="constant")
    for turn in range(8):
        for name in (arm.name for arm in head.arms):
            latencies_ms = 10 * math.exp(random.normal(0, 0.03)) * random.lognormal(0, 0.1, 200)
            if name == "arm1":
                latencies_ms *= (1 - gain) * np.where(random.random(200) < slow, times, 1)
            blocks.add(name, load, latencies_ms, server=head.arms[0].name != name, turn=turn)
    (found,) = (one for one in compare(head, blocks.samples) if one.arm == "arm1")
    return found.verdict == "faster"


@part
def found_differences(trials: Trials) -> Iterator[Row]:
    """Runs with a control in which one arm is faster: how many find it?"""
    runs = trials.number(400)
    for gain, pairs, least in trials.some((0.05, 8, 0.5), (0.05, 16, 0.85), (0.10, 8, 0.9), (0.02, 16, 0.2)):
        found = [
            comparisons(trials.random, "3% from block to block", arms=2, pairs=pairs, gain=gain)[0] for _ in range(runs)
        ]
        where = f"{gain:.0%} faster, {pairs} pairs, 3% from block to block, with a control"
        hits = sum(one.verdict == "faster" for one in found)
        yield share("a faster arm is found", where, hits, runs, at_least=least)
        false = sum(one.verdict == "slower" for one in found)
        yield share("a faster arm is called slower", where, false, runs, at_most=0.025)
