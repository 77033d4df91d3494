from __future__ import annotations

import numpy as np
from tests.loadtest.run_files import NewRun

from xlaserve_loadtest.analysis.compare import compare
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.multiplicity import corrected
from xlaserve_loadtest.analysis.samples import collect
from xlaserve_loadtest.analysis.verdict import Verdict
from xlaserve_loadtest.record.blocks import LoadLine


def verdicts(*p_values: float | None) -> list[Verdict]:
    found: list[tuple[Estimate | None, Verdict, str]] = []
    for p_value in p_values:
        is_sure = p_value is not None and p_value < 0.05
        found.append((Estimate(1.1, 1.0, 1.2, p_value), "faster" if is_sure else "inconclusive", ""))
    return [verdict for verdict, _ in corrected(found)]


def test_the_surest_of_several_has_to_be_surer_than_one_alone() -> None:
    assert verdicts(0.04) == ["faster"]
    assert verdicts(0.04, 0.5) == ["inconclusive", "inconclusive"]
    assert verdicts(0.5, 0.01, 0.03, None) == ["inconclusive", "faster", "inconclusive", "inconclusive"]


def test_once_the_surest_hold_fewer_are_left_to_correct_for() -> None:
    assert verdicts(0.03, 0.02, 0.01) == ["faster", "faster", "faster"]
    assert verdicts(0.03, 0.026, 0.01) == ["inconclusive", "inconclusive", "faster"]


def test_what_has_no_interval_is_left_as_it_is() -> None:
    assert corrected([(None, "inconclusive", "too few answers")]) == [("inconclusive", "too few answers")]
    assert corrected([]) == []


def test_a_verdict_of_one_load_among_many_is_withdrawn_with_the_reason(run_file: NewRun) -> None:
    file = run_file().header()
    for slots in range(1, 9):
        for turn in range(4):
            # One load with gains of 1 to 4%, whose p-value is 0.03; the others gain and lose.
            gain = 1 + turn if slots == 1 else (-1) ** turn
            for arm, mean_ms in (("xla", 10 - gain / 10), ("graph", 10.0)):
                file.block(arm, np.full(40, mean_ms), load=LoadLine("closed", concurrency=slots))
    run = file.read()
    found = compare(run.header, collect(run))[0]
    ratio = found.ratio
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.low > 1
    assert (found.verdict, found.reason) == ("inconclusive", "not after correction for 8 comparisons")
