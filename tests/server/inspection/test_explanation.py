from __future__ import annotations

import json
import math

from xlaserve.inspection.explanation import Explanation, amount, seconds
from xlaserve.inspection.roofline import Machine


def test_a_row_is_what_is_run_with_its_cost_its_bound_and_its_time(explained: Explanation) -> None:
    rows = {row.name: row for row in explained.rows}
    assert list(rows) == ["pixels", "factor", "convolution.1", "activation", "dot.1"]
    convolution = rows["convolution.1"]
    assert (convolution.opcode, convolution.shape, convolution.layer) == ("convolution", "f32[2,4,4,8]", "stem <1>")
    assert convolution.cost.flops == 2 * 2 * (3 * 4 - 2) ** 2 * 3 * 8
    assert math.isclose(convolution.bound_s, convolution.cost.flops / 1e9)
    assert convolution.measured_s == 8e-6
    assert rows["activation"].opcode == "fusion kLoop"
    assert rows["activation"].layer == "relu_1"
    assert rows["dot.1"].measured_s is None


def test_sums_are_over_all_rows(explained: Explanation) -> None:
    assert explained.cost.flops == 96 + 8 + 9600 + 2 * 256 + 2 * 2 * 5 * 128
    assert math.isclose(explained.bound_s, sum(row.bound_s for row in explained.rows))
    assert math.isclose(explained.traced_s, 11e-6)


def test_the_heaviest_come_first_and_what_weighs_nothing_not_at_all(explained: Explanation) -> None:
    heaviest = explained.heaviest(lambda row: row.measured_s or 0.0, 9)
    assert [row.name for row in heaviest] == ["convolution.1", "activation", "pixels"]
    assert [row.name for row in explained.heaviest(lambda row: row.cost.flops, 2)] == ["convolution.1", "dot.1"]


def test_groups_hold_every_row_once(explained: Explanation) -> None:
    groups = {group.opcode: group for group in explained.groups()}
    assert list(groups) == ["convolution", "fusion kLoop", "dot"]
    assert groups["fusion kLoop"].count == 3 == explained.fusions["kLoop"]
    assert sum(group.cost.flops for group in groups.values()) == explained.cost.flops


def test_it_is_json_with_units_in_the_names(explained: Explanation) -> None:
    value = json.loads(json.dumps(explained.json()))
    assert value["bucket"] == [2, 4, 4]
    assert value["flops"] == explained.cost.flops
    assert value["rows"][2]["cost"] == {"flops": 9600, "bytes": explained.rows[2].cost.bytes}


def test_the_roof_is_memory_below_the_balance_and_arithmetic_above(explained: Explanation) -> None:
    machine = Machine(flops_per_s=100.0, bytes_per_s=10.0)
    assert machine.balance == 10
    flops = explained.rows[2].cost
    assert machine.bound_s(flops) == max(flops.flops / 100, flops.bytes / 10)


def test_figures_are_short() -> None:
    assert [amount(value, "B") for value in (0, 999, 1000, 2.55e6, 7e9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "7.0 GB",
    ]
    assert [seconds(value) for value in (2e-6, 0.0035, 12)] == ["2.0 µs", "3.50 ms", "12.00 s"]
