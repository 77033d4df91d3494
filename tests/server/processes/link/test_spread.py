"""How requests are spread over engines, on fakes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from xlaserve.config import Mode
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.request import EncodedRequest, EngineRequest
from xlaserve.errors import DeadlineUnreachable
from xlaserve.processes.link.spread import Part, Spread


class Engine:
    """Takes in whatever comes, and answers nothing."""

    def __init__(self, name: str = "", outstanding_s: float = 0.0) -> None:
        self.name = name
        self.images = 0
        self.told_s = outstanding_s
        self.releases = 0
        self.shown = Live()
        self.batches = {(Mode.XLA, 8, 8): 4}
        self.asked: list[tuple[int, int]] = []
        """Resolutions that it was asked to open."""
        self.ran: list[int] = []

    def admit(self, images: int, size_bytes: int, unmatched: tuple[int, int] | None = None) -> Any:
        self.images += images
        return self

    def has(self, resolution: tuple[int, int]) -> bool:
        return any(shape[1:] == resolution for shape in self.batches)

    def open_soon(self, resolution: tuple[int, int]) -> None:
        self.asked.append(resolution)

    def largest(self, mode: Mode, height: int, width: int) -> int:
        return self.batches.get((mode, height, width), 0)

    async def run_when_idle(self, request: EngineRequest) -> Any:
        self.ran.append(request.images)

    def check_encoded(self, request: EncodedRequest) -> None:
        if self.told_s > request.deadline:
            raise DeadlineUnreachable(self.name, self.told_s - request.deadline)

    def outstanding_s(self) -> float:
        return self.told_s

    def live(self) -> Live:
        return self.shown

    def release(self) -> None:
        self.releases += 1


def spread(*engines: Engine) -> Spread:
    return Spread(cast(Part, engine) for engine in engines)


def test_requests_go_where_the_fewest_images_are() -> None:
    first, second = Engine(), Engine()
    model = spread(first, second)
    first.images = 10
    for _ in range(8):
        model.admit(1, 1)
    assert (first.images, second.images) == (10, 8)
    model.admit(5, 1)
    assert (first.images, second.images) == (10, 13)
    model.admit(1, 1)
    assert (first.images, second.images) == (11, 13)


def test_of_as_many_images_the_engine_that_is_done_first_gets_more() -> None:
    busy, idle = Engine(outstanding_s=0.5), Engine(outstanding_s=0.01)
    model = spread(busy, idle)
    for _ in range(3):
        assert cast(Any, model.admit(1, 1)) is idle
        idle.images = 0


def test_engines_that_have_nothing_to_do_take_turns() -> None:
    engines = [Engine(name) for name in "abc"]
    model = spread(*engines)
    chosen = Counter[str]()
    for _ in range(30):
        engine = cast(Any, model.admit(1, 1))
        engine.images = 0
        chosen[engine.name] += 1
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_what_can_be_answered_in_time_somewhere_is_taken() -> None:
    model = spread(Engine("slow", 2.0), Engine("quick", 1.0))
    request = EncodedRequest(1, 1.5, 2, [(Mode.XLA, 8, 8)], decode_s=0.0, decoding=0)
    model.check_encoded(request)
    model.check_encoded(request._replace(deadline=math.inf))
    with pytest.raises(DeadlineUnreachable, match="quick"):
        model.check_encoded(request._replace(deadline=0.5))
    assert model.outstanding_s() == 1.0


def test_new_requests_go_to_others_from_one_moment_on() -> None:
    before, after = Engine(), Engine()
    model = spread(before)
    model.admit(1, 1)
    model.use([cast(Part, after)])
    model.admit(1, 1)
    assert (before.images, after.images) == (1, 1)
    model.release()
    assert (before.releases, after.releases) == (0, 1)


def test_what_engines_have_to_do_is_added_up() -> None:
    first, second = Engine(), Engine()
    first.shown = Live(1, 0.5, 0.25, 2, 64, demand={(8, 8): Counter({1: 3})})
    second.shown = Live(3, 0.2, 0.5, 5, 64, demand={(8, 8): Counter({1: 1, 2: 4})})
    live = spread(first, second).live()
    assert live[:5] == (4, 0.5, 0.75, 7, 128)
    assert live.demand == {(8, 8): Counter({1: 4, 2: 4})}


def test_the_first_engine_opens_a_resolution_and_the_others_follow() -> None:
    first, second, third = engines = [Engine(name) for name in "abc"]
    model = spread(*engines)
    for _ in range(3):
        model.admit(1, 1, (5, 5))
    assert [engine.images for engine in engines] == [3, 0, 0], "who has the say"
    assert not any(engine.asked for engine in engines)
    first.batches[Mode.GRAPH, 5, 5] = 4
    model.admit(1, 1, (5, 5))
    assert [engine.images for engine in engines] == [4, 0, 0]
    assert [engine.asked for engine in engines] == [[], [(5, 5)], [(5, 5)]]
    third.batches[Mode.GRAPH, 5, 5] = 4
    for _ in range(4):
        model.admit(1, 1, (5, 5))
    assert [engine.images for engine in engines] == [4, 0, 4], "where it is open"
    second.batches[Mode.GRAPH, 5, 5] = 4
    model.admit(1, 1, (5, 5))
    assert [engine.images for engine in engines] == [4, 1, 4]


async def test_an_idle_run_goes_to_the_least_loaded_engine_or_the_first() -> None:
    first, second = Engine(), Engine()
    model, pixels = spread(first, second), np.zeros((3, 8, 8, 3), np.uint8)
    for _ in range(2):
        await model.run_when_idle(EngineRequest((pixels,), Mode.XLA, math.inf))
    assert (first.ran, second.ran) == ([3, 3], [])
    first.images = 1
    await model.run_when_idle(EngineRequest((pixels,), Mode.XLA, math.inf))
    assert (first.ran, second.ran) == ([3, 3], [3])
    second.batches[Mode.XLA, 8, 8] = 2
    assert model.largest(Mode.XLA, 8, 8) == 2
    await model.run_when_idle(EngineRequest((pixels,), Mode.XLA, math.inf))
    assert (first.ran, second.ran) == ([3, 3, 3], [3]), "where such a batch runs"
    first.batches.clear()
    assert model.largest(Mode.XLA, 8, 8) == 2
    second.batches.clear()
    assert model.largest(Mode.XLA, 8, 8) == 0
