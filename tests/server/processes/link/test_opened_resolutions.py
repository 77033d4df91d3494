"""Resolutions without buckets, at every `ModelEngine`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.fakes import outputs_of
from tests.server.processes.link.engines import Engines, until
from tests.server.processes.link.models import BROKEN, COST_S, OTHER, pictures

from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest
from xlaserve.errors import InvalidArgument


@pytest_asyncio.fixture
async def any_size(engines: Engines) -> AsyncIterator[Engines]:
    """A model, not used before, that takes other resolutions too."""
    await engines.renew("any size", 0.0)
    yield engines


async def ask_unmatched(
    engines: Engines, *numbers: int, size: tuple[int, int] = OTHER, mode: Mode = Mode.XLA
) -> tuple[Mode, list[int]]:
    """Returns the mode that images of a size without buckets ran in, and what was answered."""
    pixels = pictures(*numbers, size=size)
    with engines.engine("any size").admit(len(pixels), pixels.nbytes, size) as admitted:
        opened = await admitted.open(size, mode)
        result = await admitted.run(EngineRequest((pixels,), opened, math.inf))
    return opened, [int(number) for number in outputs_of(result)[0]]


async def test_a_resolution_without_buckets_runs_in_graph_mode_until_it_has_some(any_size: Engines) -> None:
    assert any_size.engine("any size").largest(Mode.GRAPH, *OTHER) == 0
    assert await ask_unmatched(any_size, 1, 2) == (Mode.GRAPH, [1, 2])
    assert await ask_unmatched(any_size, 3) == (Mode.GRAPH, [3])
    await any_size.compile()
    await until(lambda: any_size.engine("any size").largest(Mode.XLA, *OTHER) == max(COST_S))
    assert await ask_unmatched(any_size, 4) == (Mode.XLA, [4])


async def test_requests_that_come_together_open_a_resolution_together(any_size: Engines) -> None:
    asked = [asyncio.create_task(ask_unmatched(any_size, number)) for number in range(20)]
    await asyncio.sleep(0)
    asked[0].cancel()  # which takes nothing from the others
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [(Mode.GRAPH, [number]) for number in range(1, 20)]


async def test_a_resolution_that_is_not_taken_is_refused_before_it_is_admitted(any_size: Engines) -> None:
    for size, expected in (((2, 3), r"shape \[n, any, 2, 3\]"), ((2**22, 2), "at most 3276800 pixels")):
        with pytest.raises(InvalidArgument, match=f"pixels: expected {expected}"):
            any_size.engine("any size").admit(1, 1, size)
    with pytest.raises(InvalidArgument, match="pixels: expected a size that has buckets, got 3 x 2"):
        any_size.engine("numbers").admit(1, 1, OTHER)


async def test_no_more_resolutions_are_opened_than_there_are_places(any_size: Engines) -> None:
    sizes = [(height, 2) for height in range(6, 26)]
    outcomes = await asyncio.gather(*(ask_unmatched(any_size, 7, size=size) for size in sizes), return_exceptions=True)
    assert outcomes[:3] == [(Mode.GRAPH, [7])] * 3
    for outcome in outcomes[3:]:
        assert isinstance(outcome, InvalidArgument)
        assert "no more are taken (max_background_resolutions)" in str(outcome)
    assert await ask_unmatched(any_size, 8, size=sizes[0]) == (Mode.GRAPH, [8])


async def test_a_resolution_that_can_t_be_run_is_refused_each_time(any_size: Engines) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="pixels: expected a size that the network can take, got 5 x 2"):
            await ask_unmatched(any_size, 1, size=BROKEN)
