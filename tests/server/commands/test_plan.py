"""What `xlaserve plan` takes from a server's answer."""

from __future__ import annotations

import pytest

from xlaserve.commands.plan import FEW, SPREAD, measured
from xlaserve.engine.buckets.planner import Cost
from xlaserve.errors import ModelNotReady
from xlaserve_proto import vision_pb2 as pb

SIZE = {"height": 8, "width": 8}


def program(batch: int, seconds: float, mode: str = "xla") -> pb.Program:
    return pb.Program(mode=mode, bucket=pb.Bucket(batch=batch, **SIZE), run_s=seconds, run_loaded_s=2 * seconds)


def turn(batch: int, seconds: float, batches: int, spread: float = 0.3, mode: str = "xla") -> pb.Turn:
    bucket = pb.Bucket(batch=batch, **SIZE)
    return pb.Turn(mode=mode, bucket=bucket, alone_s=seconds, loaded_s=3 * seconds, spread=spread, batches=batches)


PROGRAMS = [program(1, 0.01), program(4, 0.02), program(1, 0.5, mode="graph")]


def test_before_much_traffic_costs_are_those_of_warm_up() -> None:
    model = pb.Model(programs=PROGRAMS, turns=[turn(1, 0.03, FEW), turn(4, 0.05, 0)])
    assert measured(model, "xla") == ({1: Cost(0.01, 0.02), 4: Cost(0.02, 0.04)}, SPREAD)


def test_after_enough_traffic_costs_and_spread_are_those_of_the_traffic() -> None:
    turns = [turn(1, 0.03, 192, spread=0.1), turn(4, 0.05, 64, spread=0.7), turn(1, 0.6, 256, mode="graph")]
    costs, spread = measured(pb.Model(programs=PROGRAMS, turns=turns), "xla")
    assert costs == {1: pytest.approx((0.03, 0.09)), 4: pytest.approx((0.05, 0.15))}
    assert spread == pytest.approx(((3 * 0.01 + 0.49) / 4) ** 0.5)


def test_a_model_without_programs_of_the_mode_has_no_costs() -> None:
    with pytest.raises(ModelNotReady, match="no program of mode graph was measured"):
        measured(pb.Model(name="cats", programs=[program(1, 0.01)]), "graph")
