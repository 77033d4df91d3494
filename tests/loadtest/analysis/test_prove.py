from __future__ import annotations

import math

import pytest
from tests.prove import runner  # noqa: F401
from tests.prove.__main__ import table, worst
from tests.prove.registry import PARTS, Row, share

SHORT_ERRORS = 4.0
"""The short form simulates a fortieth of the runs, so it catches gross mistakes only."""


@pytest.mark.parametrize("name", sorted(PARTS))
def test_what_is_claimed_holds_in_the_short_form(name: str) -> None:
    failed = [row for row in PARTS[name].rows(seed=1, is_short=True) if not row.passes(SHORT_ERRORS)]
    assert not failed


def test_claims_pass_within_their_error_and_fail_beyond() -> None:
    assert share("", "", 94, 100, at_least=0.95).passes(2)
    assert not share("", "", 90, 100, at_least=0.95).passes(2)
    assert share("", "", 0, 100, at_most=0.05).passes(0)
    assert not share("", "", 10, 100, at_most=0.05).passes(2)
    assert not share("", "", 0, 0, at_least=0.9).passes(math.inf)
    assert not Row("", "", 1.0, False, 1.1, 0.0).passes(4)


def test_the_table_shows_what_failed() -> None:
    text = table([("a", share("covers", "normal", 10, 100, at_least=0.9)), ("b", Row("", "", 1, False, 0.5, 0))])
    assert "| a | covers | normal | >= 0.9 | 0.1 ± 0.03 | **FAILS** |" in text
    assert text.endswith("1 of 2 claims hold")


def test_the_summary_shows_the_worst_of_each_claim() -> None:
    rows = [share("covers", f"{hits}", hits, 100, at_least=0.9) for hits in (95, 91, 93)]
    rows += [share("errs", f"{hits}", hits, 100, at_most=0.1) for hits in (1, 3, 2)]
    lines = worst(("a", row) for row in rows).splitlines()[2:]
    assert lines == ["| a | covers | >= 0.9 | 3 | 0.91 | 91 |", "| a | errs | <= 0.1 | 3 | 0.03 | 3 |"]
