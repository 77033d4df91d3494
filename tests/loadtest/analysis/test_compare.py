from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from tests.loadtest.run_files import NewRun, RunFile
from tests.loadtest.simulated_arms import Simulated
from tests.required import required

from xlaserve_loadtest.analysis.compare import Comparison, baselines, compare, pairs
from xlaserve_loadtest.analysis.conclusion import sentence
from xlaserve_loadtest.analysis.intervals import Estimate, ratio
from xlaserve_loadtest.analysis.samples import collect
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.blocks import GeneratorUse, LoadLine
from xlaserve_loadtest.record.lines import Arm, Header, Run
from xlaserve_loadtest.record.requests import Status

BLOCK_NOISE = 0.03
"""Assumed deviation of a block's images/s, as in docs/loadtest-method.md."""
DOCUMENTED_BLOCKS = 16
"""That find a difference of 5% under that noise."""

OPEN = LoadLine("open", rate_per_s=50.0, arrivals="constant")


def comparisons(run: Run) -> dict[str, Comparison]:
    return {found.arm: found for found in compare(run.header, collect(run))}


def contains_one(interval: Estimate) -> bool:
    return required(interval.low) <= 1 <= required(interval.high)


def is_found(ratio_of_arm: Estimate, ratio_of_control: Estimate) -> bool:
    return not contains_one(ratio_of_arm) and contains_one(ratio_of_control)


def repetitions(count: int, *, true_ratio: float) -> Iterator[bool]:
    """Whether each of `count` seeded sessions with a control finds a difference."""
    random = np.random.default_rng(2026)
    for _ in range(count):
        graph, again, xla = random.normal([[0], [0], [np.log(true_ratio)]], BLOCK_NOISE, (3, DOCUMENTED_BLOCKS))
        yield is_found(ratio(xla - graph), ratio(again - graph))


def test_identical_arms_are_inconclusive_in_nineteen_of_twenty_repetitions() -> None:
    assert sum(repetitions(100, true_ratio=1.0)) <= 100 / 20


@pytest.mark.parametrize("true_ratio", [1.05, 1 / 1.05])
def test_a_difference_of_five_percent_is_found_in_the_documented_blocks(true_ratio: float) -> None:
    assert sum(repetitions(50, true_ratio=true_ratio)) >= 43


def test_identical_arms_of_whole_runs_are_inconclusive(compared: NewRun) -> None:
    verdicts = []
    for seed in range(20):
        run = compared(xla_ms=20, graph_ms=20, control_ms=20, seed=seed, noise=BLOCK_NOISE, requests=60).read()
        verdicts.append(comparisons(run)["xla"].verdict)
    assert verdicts.count("inconclusive") >= 19


def test_a_difference_shows_in_every_measure(compared: NewRun) -> None:
    found = comparisons(compared(xla_ms=10, graph_ms=20, control_ms=20).read())
    assert (found["xla"].verdict, found["xla"].reason, found["xla"].pairs) == ("faster", "", 8)
    ratios = {name: required(ratio) for name, ratio in found["xla"].ratios.items()}
    assert ratios["images_per_s"].value == pytest.approx(2, rel=0.05)
    assert ratios["p50"].value == pytest.approx(0.5, rel=0.05)
    assert required(ratios["p99"].high) < 1
    assert found["graph again"].is_control
    assert found["graph again"].verdict == "inconclusive"
    assert comparisons(compared(xla_ms=20, graph_ms=10).read())["xla"].verdict == "slower"


@pytest.mark.parametrize("starved", ["xla", "graph"])
def test_what_was_measured_while_the_generator_starved_never_wins(compared: NewRun, starved: str) -> None:
    use = GeneratorUse(1, 0.1, sends=100, wait_ms=3.0)
    found = comparisons(compared(xla_ms=10, graph_ms=20, generators={starved: use}).read())["xla"]
    assert (found.verdict, found.reason) == ("inconclusive", f"generator-limited: {starved}")


def test_a_failed_control_takes_the_verdict_back(compared: NewRun) -> None:
    found = comparisons(compared(xla_ms=10, graph_ms=20, control_ms=24).read())
    assert found["graph again"].has_failed
    assert found["xla"].verdict == "inconclusive"
    assert "A/A control failed" in found["xla"].reason
    assert required(found["xla"].ratio).value == pytest.approx(2, rel=0.05)


def test_a_control_that_fails_by_little_leaves_a_large_difference_standing(compared: NewRun) -> None:
    found = comparisons(compared(xla_ms=10, graph_ms=20, control_ms=20.4, noise=0.005).read())
    assert found["graph again"].has_failed
    assert (found["xla"].verdict, dict(found["xla"].doubts)) == ("faster", {})
    little = comparisons(compared(xla_ms=19.4, graph_ms=20, control_ms=20.4, noise=0.005).read())["xla"]
    assert (little.verdict, little.decides in little.doubts) == ("inconclusive", True)


def test_equal_arms_with_differing_processes_are_mostly_inconclusive() -> None:
    verdicts = [Simulated(processes=4).compare(seed)["xla"].verdict for seed in range(100)]
    assert verdicts.count("inconclusive") >= 95


def test_blocks_of_one_process_cannot_show_what_differs_between_processes() -> None:
    once = Simulated(processes=1, rounds=8, control_shares_process=True)
    found = [once.compare(seed)["xla"] for seed in range(40)]
    assert {one.unit for one in found} == {"blocks"}
    assert sum(one.verdict != "inconclusive" for one in found) > 20


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_pair_of_processes_is_one_sample_however_many_blocks_it_had(rounds: int) -> None:
    found = Simulated(processes=5, rounds=rounds, ratio=1.5).compare(1)["xla"]
    assert (found.unit, found.pairs, found.verdict) == ("server processes", 5, "faster")
    assert required(found.ratio).value == pytest.approx(1.5, rel=0.1)


def test_too_few_processes_are_inconclusive_and_the_option_is_named() -> None:
    found = Simulated(processes=3, ratio=2).compare(0)["xla"]
    assert (found.verdict, found.pairs) == ("inconclusive", 3)
    assert found.reason == "an interval takes 4 pairs of server processes; choose more with --processes"


def test_a_control_noisier_than_the_difference_withholds_the_verdict(run_file: NewRun) -> None:
    file, random = run_file().header(control=True), np.random.default_rng(0)
    for turn in range(8):
        for arm, mean_ms, noise in (("xla", 9.5, 0.0), ("graph", 10.0, 0.0), ("graph again", 10.0, 0.3)):
            file.block(arm, np.full(80, mean_ms) * np.exp(random.normal(0, noise + 0.001)), round=turn)
    found = comparisons(file.read())["xla"]
    assert not contains_one(required(found.ratio))
    assert found.verdict == "inconclusive"
    assert found.reason.startswith("the A/A control is too noisy to tell")
    assert {"images_per_s", "p50"} <= set(found.doubts)


def test_a_control_that_fails_in_one_measure_puts_that_one_alone_in_doubt(run_file: NewRun) -> None:
    file = run_file().header(control=True)
    for turn in range(8):
        for arm, mean_ms, slowest_ms in (("xla", 5.0, 25.0), ("graph", 10.0, 30.0), ("graph again", 10.0, 36.0)):
            latencies_ms = np.full(100, mean_ms) + turn % 2
            # The slowest two are slower in the control, and two others as much faster: images/s are the same.
            latencies_ms[:4] = slowest_ms, slowest_ms, 40 - slowest_ms, 40 - slowest_ms
            file.block(arm, latencies_ms, round=turn)
    run = file.read()
    found = comparisons(run)
    assert found["graph again"].failed == ("p99",)
    assert not found["graph again"].has_failed
    assert (found["xla"].verdict, set(found["xla"].doubts)) == ("faster", {"p99"})
    warnings = " ".join(summarize(run).warnings)
    assert "Nothing is concluded from p99, as the A/A control failed" in warnings


def test_a_control_without_an_interval_supports_no_verdict(run_file: NewRun) -> None:
    file = run_file().header(control=True)
    for turn in range(6):
        for arm, mean_ms in (("xla", 5.0), ("graph", 10.0), ("graph again", 10.0)):
            died = arm == "graph again" and turn > 1
            file.block(arm, [mean_ms + turn % 2] * 80, round=turn, status=Status.UNAVAILABLE if died else Status.OK)
    found = comparisons(file.read())["xla"]
    assert (found.verdict, found.reason) == ("inconclusive", "the A/A control has no interval for images/s")


def test_drift_that_hits_both_arms_does_not_pass_for_a_difference(run_file: NewRun) -> None:
    file, random = run_file().header(), np.random.default_rng(0)
    for turn in range(12):
        for arm in ("xla", "graph") if turn % 2 == 0 else ("graph", "xla"):
            slowing_ms = 10 * 1.1**turn * random.normal(1, 0.01)
            file.block(arm, np.full(50, slowing_ms), round=turn // 2)
    found = comparisons(file.read())["xla"]
    assert found.verdict == "inconclusive"
    interval = required(found.ratio)
    assert required(interval.high) - required(interval.low) < 0.05


def test_where_the_load_sets_the_rate_latency_decides(run_file: NewRun) -> None:
    file, random = run_file().header(), np.random.default_rng(0)
    due_ns = np.arange(100) * 20_000_000
    for _ in range(6):
        for arm, mean_ms in (("xla", 5), ("graph", 8)):
            file.block(arm, mean_ms * random.lognormal(0, 0.1, 100), load=OPEN, due_ns=due_ns)
    found = comparisons(file.read())["xla"]
    assert (found.decides, found.verdict) == ("p50", "faster")
    assert required(found.ratios["images_per_s"]).value == pytest.approx(1, abs=0.01)


def test_too_few_blocks_are_inconclusive_and_say_so(compared: NewRun) -> None:
    found = comparisons(compared(pairs=3).read())["xla"]
    assert found.verdict == "inconclusive"
    assert "4 pairs of blocks" in found.reason
    assert required(found.ratio).low is None


def test_a_block_that_answered_nothing_takes_its_partner_out(run_file: NewRun) -> None:
    file = run_file().header()
    for turn in range(6):
        file.block("xla", [10.0] * 40, status=Status.UNAVAILABLE if turn == 2 else Status.OK, round=turn)
        file.block("graph", [20.0 if turn != 2 else 2000.0] * 40, round=turn)
    found = comparisons(file.read())["xla"]
    assert found.pairs == 5
    assert required(found.ratio).value == pytest.approx(2)


def test_blocks_pair_within_their_round(run_file: NewRun) -> None:
    file = run_file().header()
    for turn in range(5):
        if turn != 1:
            file.block("xla", [10.0 * (turn + 1)] * 40, round=turn)
        file.block("graph", [20.0 * (turn + 1)] * 40, round=turn)
    assert required(comparisons(file.read())["xla"].ratio).value == pytest.approx(2)


def test_loads_are_compared_apart_and_searches_not_at_all(run_file: NewRun) -> None:
    file = run_file().header()
    for slots, xla_ms in ((1, 5.0), (8, 40.0)):
        for _ in range(4):
            file.block("xla", [xla_ms] * 40, load=LoadLine("closed", concurrency=slots))
            file.block("graph", [20.0] * 40, load=LoadLine("closed", concurrency=slots))
    file.block("xla", [1.0], load=OPEN, role="search").block("graph", [1.0], load=OPEN, role="search")
    run = file.read()
    found = compare(run.header, collect(run))
    assert [(one.label, one.verdict) for one in found] == [("1 at a time", "faster"), ("8 at a time", "slower")]


def test_each_model_has_its_own_baseline(run_file: NewRun) -> None:
    names = [("xla a", "xla", "a"), ("graph a", "graph", "a"), ("xla b", "xla", "b"), ("graph b", "graph", "b")]
    arms = [Arm(name, mode, model, "embedded") for name, mode, model in names]
    arms.append(Arm("graph b again", "graph", "b", "embedded", is_control_of="graph b"))
    file = run_file().header()
    (written,) = file.lines
    assert isinstance(written, Header)
    header = dataclasses.replace(written, arms=tuple(arms), baseline="graph a")
    assert baselines(header) == {
        "xla a": "graph a",
        "xla b": "graph b",
        "graph b again": "graph b",
    }
    assert dict(pairs(header)) == baselines(header)


@pytest.mark.parametrize("baseline", [None, "graph", "openvino", "xla"])
def test_xla_is_compared_with_openvino_too_and_once(run_file: NewRun, baseline: str | None) -> None:
    arms = [Arm(name, name, "a", "embedded") for name in ("openvino", "xla", "graph")]
    arms += [Arm("again", "openvino", "a", "embedded", is_control_of="openvino"), Arm("b", "openvino", "b", "embedded")]
    (written,) = run_file().header().lines
    assert isinstance(written, Header)
    found = pairs(dataclasses.replace(written, arms=tuple(arms), baseline=baseline))
    assert len({frozenset(pair) for pair in found}) == len(found)
    compared = [pair for pair in found if set(pair) == {"xla", "openvino"}]
    assert compared == [("openvino", "xla") if baseline == "xla" else ("xla", "openvino")]


def test_an_arm_faster_than_graph_may_be_slower_than_openvino(run_file: NewRun) -> None:
    file = run_file().header(("xla", "graph", "openvino"), control=True)
    for _ in range(16):
        for arm, milliseconds in (("xla", 15.0), ("graph", 20.0), ("openvino", 10.0), ("graph again", 20.0)):
            file.block(arm, [milliseconds] * 40)
    run = file.read()
    found = {(one.arm, one.baseline): one.verdict for one in compare(run.header, collect(run)) if not one.is_control}
    assert found == {("xla", "graph"): "faster", ("openvino", "graph"): "faster", ("xla", "openvino"): "slower"}
    assert "xla is slower than openvino at" in summarize(run).verdict


def pausing(run_file: NewRun, *, pauses: bool) -> RunFile:
    """A run of two servers, xla faster by 7%, whose blocks are as long as they are; each fifth takes 1 s more."""
    file, random = run_file().header(), np.random.default_rng(0)
    for turn in range(20):
        for arm, mean_ms in (("xla", 10 / 1.07), ("graph", 10.0)):
            latencies_ms = np.full(60, mean_ms) * np.exp(random.normal(0, 0.01))
            if pauses and arm == "xla" and turn % 5 == 2:
                latencies_ms[20:24] += 1000  # all slots wait
            file.block(arm, latencies_ms, round=turn // 2, server=arm == "xla")
    return file


def test_an_arm_that_stands_still_is_not_faster_though_most_blocks_are(run_file: NewRun) -> None:
    found = comparisons(pausing(run_file, pauses=True).read())["xla"]
    # Twenty blocks of 60 requests by 4 slots, and four pauses, for as much work in 20 blocks of 0.15 s.
    assert required(found.ratios["images_per_s"]).value == pytest.approx(3.0 / (3.0 / 1.07 + 4), rel=0.02)
    assert required(found.typical).value == pytest.approx(1.07, rel=0.02)
    assert found.verdict != "faster"
    calm = comparisons(pausing(run_file, pauses=False).read())["xla"]
    assert (calm.verdict, calm.holds) == ("faster", "of these two processes")
    assert "is faster than graph at 4 at a time, of these two processes: 1.07" in sentence(calm)


def test_the_blocks_of_a_control_on_its_baselines_server_are_the_baselines(run_file: NewRun) -> None:
    file, random = run_file().header(control=True), np.random.default_rng(0)
    for turn in range(6):
        for arm in ("xla", "graph", "xla", "graph again", "graph again", "xla", "graph", "xla"):
            served = 1 + 0.02 * turn * random.normal(1, 0.1)
            file.block(arm, np.full(40, 10.0) * served, round=turn, server=arm == "xla")
    found = comparisons(file.read())
    assert (found["xla"].pairs, found["graph again"].pairs) == (24, 12)
    assert found["xla"].verdict == "inconclusive"


@pytest.mark.parametrize(
    ("xla_ms", "slow_ms", "decides", "verdict"),
    [
        (8.0, 60.0, "p50", "inconclusive"),  # p50 is better by a fifth, p99 six times as high
        (8.0, 8.0, "p50", "faster"),
        (8.0, 11.0, "p50", "inconclusive"),  # p99 loses less than p50 gains, but for certain
        (10.0, 60.0, "p99", "slower"),  # p50 is the same
        (12.5, 12.5, "p50", "slower"),
    ],
)
def test_p50_and_p99_decide_together_in_an_open_loop(
    run_file: NewRun, xla_ms: float, slow_ms: float, decides: str, verdict: str
) -> None:
    file, random = run_file().header(), np.random.default_rng(0)
    due_ns = np.arange(200) * 20_000_000
    for turn in range(8):
        for arm, mean_ms, tail_ms in (("xla", xla_ms, slow_ms), ("graph", 10.0, 10.0)):
            latencies_ms = np.full(200, mean_ms)
            latencies_ms[::40] = tail_ms
            latencies_ms *= np.exp(random.normal(0, 0.01))
            file.block(arm, latencies_ms, load=OPEN, due_ns=due_ns, round=turn)
    found = comparisons(file.read())["xla"]
    assert (found.decides, found.verdict) == (decides, verdict)


@pytest.mark.parametrize(("slow_ms", "verdict"), [(60.0, "inconclusive"), (8.0, "faster")])
def test_a_worse_tail_of_few_answers_counts_against_a_better_p50(
    run_file: NewRun, slow_ms: float, verdict: str
) -> None:
    file, random = run_file().header(), np.random.default_rng(0)
    due_ns = np.arange(50) * 20_000_000
    for turn in range(8):
        for arm, mean_ms, tail_ms in (("xla", 8.0, slow_ms), ("graph", 10.0, 10.0)):
            latencies_ms = np.where(np.arange(50) % 10, mean_ms, tail_ms) * np.exp(random.normal(0, 0.01))
            file.block(arm, latencies_ms, load=OPEN, due_ns=due_ns, round=turn)
    found = comparisons(file.read())["xla"]
    assert found.ratios["p99"] is None
    assert (found.decides, found.verdict) == ("p50", verdict)
