from __future__ import annotations

from types import SimpleNamespace

import pytest

from xlaserve_fleet.policy import BUSY, WAIT, Policy, servers_needed


def test_waiting_work_is_spread_so_that_servers_meet_the_target_wait() -> None:
    assert servers_needed([0.1, 0.2, 0.3], [1, 1, 1], 0.1) == 6


def test_a_fleet_with_nothing_to_do_is_one_server() -> None:
    assert servers_needed([0.0] * 5, [0.0] * 5, 0.1) == 1


def test_servers_whose_lanes_are_needed_stay_although_nothing_waits() -> None:
    assert servers_needed([0.0] * 4, [0.6] * 4, 0.1) == 3
    assert servers_needed([0.0] * 4, [0.79] * 4, 0.1) == 4


def test_the_number_is_at_most_doubled_at_a_time() -> None:
    assert servers_needed([60.0], [1.0], 0.1) == 2
    assert servers_needed([60.0, 0.0, 0.0], [1.0] * 3, 0.1) == 6


@pytest.mark.parametrize(("wait_s", "servers"), [(0.105, 2), (0.104, 2), (0.106, 3)])
def test_a_tenth_of_a_server_more_starts_none(wait_s: float, servers: int) -> None:
    assert servers_needed([wait_s, wait_s], [0.5, 0.5], 0.1) == servers


def test_the_policy_reads_what_serve_has_of_each_replica() -> None:
    reports = {WAIT: {"a": 0.1, "b": 0.2}, BUSY: {"a": 0.9, "b": 1.0}}
    context = SimpleNamespace(aggregated_metrics=reports, target_num_replicas=2)
    assert Policy(target_wait_s=0.1)(context) == (3, {})


@pytest.mark.parametrize("reports", [None, {}, {WAIT: {}, BUSY: {}}])
def test_nothing_changes_while_no_server_has_reported(reports: object) -> None:
    context = SimpleNamespace(aggregated_metrics=reports, target_num_replicas=3)
    assert Policy(target_wait_s=0.1)(context) == (3, {})
