"""The conditions that fail every run, beside conditions of the user."""

from __future__ import annotations

import pytest

from xlaserve_loadtest.analysis.conditions import judge
from xlaserve_loadtest.analysis.defaults import judge_by_default
from xlaserve_loadtest.record.lines import Equality
from xlaserve_loadtest.schedule.conditions import parse

DIFFERENT = Equality("xla", "graph", 64, 1.0, 1.0, 0.5, 1e-4, 1e-3, is_equal=False, differing=16)
INCOMPARABLE = Equality("xla", "graph", 0, 0.0, 0.0, None, 0.0, 0.0, is_equal=False, incomparable="shapes differ")


@pytest.mark.parametrize(
    ("own", "fails"),
    [
        ("differing>50%", False),
        ("differing>=32", False),
        ("differing!=16", False),
        ("xla:differing>50%", False),
        ("openvino:differing>50%", True),
        ("differing<1%", True),
        ("differing<=16", True),
        ("differing=3", True),
        ("errors>1%", True),
        ("p99>80ms", True),
    ],
)
def test_a_default_condition_yields_only_to_one_of_the_same_figure(own: str, fails: bool) -> None:
    judged = judge_by_default([], [DIFFERENT], [parse(own)])
    assert any(each.is_met for each in judged if each.condition.metric == "differing") is fails


@pytest.mark.parametrize("own", ["p99>80ms", "differing>50%", "differing>9", "differing<1"])
def test_outputs_that_can_not_be_compared_count_as_differing(own: str) -> None:
    conditions = [parse(own)]
    judged = [*judge([], [], conditions, [INCOMPARABLE]), *judge_by_default([], [INCOMPARABLE], conditions)]
    assert any(each.is_met and each.is_judged for each in judged if each.condition.metric == "differing")
