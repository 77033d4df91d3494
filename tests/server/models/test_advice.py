from __future__ import annotations

from typing import Any

import pytest

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed
from xlaserve.engine.warmup.auto_buckets import Programs
from xlaserve.models.advice import slower

SMALL, LARGE = Bucket(1, 8, 8), Bucket(8, 8, 8)
WIDENS = "on a CPU XLA computes in float32 all the same"


def settings(*modes: Mode, **values: Any) -> ModelSettings:
    return ModelSettings(name="model", source="builtin:digits", modes=modes or (Mode.XLA,), **values)


def programs(xla_s: tuple[float, float] = (1.0, 1.0), graph_s: tuple[float, float] | None = None) -> Programs:
    """Programs for both buckets, with what they cost."""
    seconds = {Mode.XLA: xla_s, **({Mode.GRAPH: graph_s} if graph_s else {})}
    return {
        (mode, bucket): Warmed(lambda images: (), Cost(cost_s, cost_s))
        for mode, costs_s in seconds.items()
        for bucket, cost_s in zip((SMALL, LARGE), costs_s, strict=True)
    }


def test_nothing_is_said_of_less_than_a_millisecond() -> None:
    fast = programs((0.0005, 0.0005), (0.0001, 0.0001))
    assert slower(settings(Mode.XLA, Mode.GRAPH), fast, on_cpu=True) == []


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_narrow_numbers_in_xla_on_a_cpu_are_advised_against(precision: str) -> None:
    (said,) = slower(settings(precision=precision), programs(), on_cpu=True)
    assert WIDENS in said
    assert f"precision {precision}" in said
    (said,) = slower(settings(precision=precision, disable_lowerings=("float32",)), programs(), on_cpu=True)
    assert "converts to float32 and back at each operation" in said
    assert slower(settings(precision=precision), programs(), on_cpu=False) == []
    assert slower(settings(Mode.GRAPH, precision=precision), programs(), on_cpu=True) == []
    assert slower(settings(Mode.AUTO, Mode.XLA, precision=precision), programs(), on_cpu=True) == []


def test_what_was_measured_is_said() -> None:
    measured = programs((0.002, 0.024), (0.002, 0.006))
    both = (Mode.XLA, Mode.GRAPH)
    (narrow,) = slower(settings(*both, precision="bfloat16"), measured, on_cpu=True)
    (exact,) = slower(settings(*both), measured, on_cpu=False)
    for said in (narrow, exact):
        assert "a batch in 8x8x8 takes 24 ms in xla and 6 ms in graph" in said
    assert WIDENS not in exact


@pytest.mark.parametrize("graph_s", [(1.0, 1.0), (0.7, 0.9), (5.0, 5.0)])
def test_nothing_is_said_of_what_is_as_fast(graph_s: tuple[float, float]) -> None:
    assert slower(settings(Mode.XLA, Mode.GRAPH), programs((1.0, 1.0), graph_s), on_cpu=True) == []


def test_nothing_is_said_of_a_mode_that_is_not_the_default() -> None:
    assert slower(settings(Mode.GRAPH, Mode.XLA), programs((1.0, 1.0), (0.1, 0.1)), on_cpu=True) == []
