from __future__ import annotations

from collections import Counter

import pytest

from xlaserve.engine.buckets.demand import Demand
from xlaserve.engine.buckets.report import cost_s, report

MEASURED_S = {1: 2.0, 2: 3.0, 4: 5.0, 8: 9.0}


def test_an_unmeasured_cost_is_interpolated_between_its_neighbours() -> None:
    assert cost_s(4, MEASURED_S) == 5.0
    assert cost_s(3, MEASURED_S) == 4.0
    assert cost_s(6, MEASURED_S) == 7.0
    assert cost_s(1, {4: 5.0, 8: 9.0}) == 5.0


def test_sets_are_compared_on_the_same_demand() -> None:
    demand: Demand = Counter({3: 300})
    one = report((8, 8), demand, present=(1, 8), measured_s=MEASURED_S, most_buckets=6)
    # 1 + 1 + 1; 4 with one row for nothing; 3 as it is.
    assert one.present.batches == (1, 8)
    assert one.present.image_s == pytest.approx(6.0 / 3)
    assert one.powers_of_two.batches == (1, 2, 4, 8)
    assert one.powers_of_two.image_s == pytest.approx(5.0 / 3)
    assert (one.proposed.batches, one.proposed.estimated) == ((3,), (3,))
    assert one.proposed.image_s == pytest.approx(4.0 / 3)
    assert one.gain_over(one.powers_of_two) == pytest.approx(0.2)
    assert one.gain_over(one.present) == pytest.approx(1 / 3)


def test_padding_is_the_part_of_the_rows_that_nobody_asked_for() -> None:
    demand: Demand = Counter({3: 30, 4: 40})
    one = report((8, 8), demand, present=(4,), measured_s=MEASURED_S, most_buckets=1)
    assert one.present.padding == pytest.approx(10 / 80)


def test_nothing_is_proposed_beyond_what_can_be_priced_or_is_allowed() -> None:
    demand: Demand = Counter({100: 1000, 1: 1000})
    one = report((8, 8), demand, present=(1, 8), measured_s=MEASURED_S, most_buckets=6)
    assert max(one.proposed.batches) == 8
    one = report((8, 8), demand, present=(1, 8), measured_s=MEASURED_S, most_batch=4, most_buckets=1)
    assert one.proposed.batches in {(1,), (4,)}
    assert max(one.powers_of_two.batches) == 4
