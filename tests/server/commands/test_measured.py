"""What `xlaserve plan` takes from a server's answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xlaserve.commands.measured import ENGINE_S, FEW, FEW_OF_BUCKET, measured
from xlaserve.engine.buckets.planner import Cost
from xlaserve.errors import ModelNotReady
from xlaserve.planning.measured_profile import POINTS
from xlaserve_proto import vision_pb2 as pb

SIZE = {"height": 8, "width": 8}


def program(batch: int, seconds: float, mode: str = "xla") -> pb.Program:
    return pb.Program(mode=mode, bucket=pb.Bucket(batch=batch, **SIZE), run_s=seconds, run_loaded_s=2 * seconds)


def turn(batch: int, seconds: float, batches: int, deviations: Sequence[float] = (1.0,), mode: str = "xla") -> pb.Turn:
    return pb.Turn(
        mode=mode,
        bucket=pb.Bucket(batch=batch, **SIZE),
        alone_s=seconds,
        loaded_s=3 * seconds,
        batches=batches,
        deviations=deviations,
        started_s=[0.001],
        returned_s=[0.002],
    )


PROGRAMS = [program(1, 0.01), program(4, 0.02), program(1, 0.5, mode="graph")]
WARMED = {1: Cost(0.01, 0.02), 4: Cost(0.02, 0.04)}
ANSWER = pb.ListModelsResponse(lanes=2, front_s=0.0007)


@pytest.mark.parametrize(
    "turns",
    [[turn(1, 0.03, FEW), turn(4, 0.05, 0)], [turn(1, 0.03, FEW_OF_BUCKET - 1)] * 50],
    ids=["few batches", "few of any bucket"],
)
def test_before_much_traffic_costs_are_those_of_warm_up(turns: list[pb.Turn]) -> None:
    known = measured(ANSWER, pb.Model(programs=PROGRAMS, turns=turns), "xla")
    assert (known.profile.costs, known.profile.planned) == (WARMED, WARMED)
    assert (known.batches, known.error) == (0, 0.0)
    assert (known.profile.lanes, known.profile.front_s, known.profile.fronts) == (2, 0.0007, 0)


def test_costs_follow_enough_traffic_and_plans_begin_with_warm_up() -> None:
    turns = [turn(1, 0.03, 192), turn(4, 0.05, 64), turn(1, 0.6, 256, mode="graph")]
    known = measured(ANSWER, pb.Model(programs=PROGRAMS, turns=turns), "xla")
    assert known.profile.costs == {1: pytest.approx((0.03, 0.09)), 4: pytest.approx((0.05, 0.15))}
    assert known.profile.planned == WARMED
    assert known.batches == 256
    assert {*known.profile.started_s} == {0.001}
    assert {*known.profile.returned_s} == {0.002}


def test_a_bucket_that_hardly_ran_is_slowed_as_much_as_the_others() -> None:
    turns = [turn(1, 0.03, 256), turn(4, 9.0, FEW_OF_BUCKET - 1)]
    known = measured(ANSWER, pb.Model(programs=PROGRAMS, turns=turns), "xla")
    assert known.profile.costs[4] == pytest.approx((0.06, 0.18))


def test_deviations_are_weighted_by_how_often_each_bucket_ran() -> None:
    turns = [turn(1, 0.03, 192, deviations=(0.5, 1.0, 2.0)), turn(4, 0.05, 64, deviations=(8.0, 8.0, 8.0))]
    known = measured(ANSWER, pb.Model(programs=PROGRAMS, turns=turns), "xla")
    deviations = known.profile.deviations
    assert len(deviations) == POINTS
    assert [*deviations] == sorted(deviations)
    assert sum(each > 7.9 for each in deviations) / POINTS == pytest.approx(0.2, abs=0.08)
    assert deviations[0] == 0.5
    assert 0.1 < known.error < 0.3


def test_fronts_are_as_many_as_the_server_has() -> None:
    answer = pb.ListModelsResponse(lanes=2, fronts=3, front_s=0.0005)
    profile = measured(answer, pb.Model(programs=PROGRAMS), "xla").profile
    assert (profile.fronts, profile.engine_s) == (3, ENGINE_S)


def test_a_model_without_programs_of_the_mode_has_no_costs() -> None:
    with pytest.raises(ModelNotReady, match="no program of mode graph was measured"):
        measured(ANSWER, pb.Model(name="cats", programs=[program(1, 0.01)]), "graph")
