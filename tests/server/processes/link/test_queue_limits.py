"""The limits of every `ModelEngine`."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial

import pytest
from tests.server.processes.link.engines import Engines
from tests.server.processes.link.models import LARGE, MAX_BYTES, MAX_IMAGES, SMALL
from tests.server.processes.link.requests import ask, begin, numbers

from xlaserve.engine.inputs import Rows
from xlaserve.errors import InvalidArgument, QueueFull


async def test_a_queue_is_bounded_in_images(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    with engines.engine("gated").admit(MAX_IMAGES - 1, 0):
        with pytest.raises(QueueFull, match=f"1 more images exceed max_queue_images {MAX_IMAGES}") as full:
            await ask(engines, "gated", 2)
        assert full.value.retry_after_s is not None
    engines.gate.open()
    await running


async def test_a_queue_is_bounded_in_bytes(engines: Engines) -> None:
    with (
        engines.engine("numbers").admit(1, MAX_BYTES - 1),
        pytest.raises(QueueFull, match=f"2 more bytes exceed max_queue_bytes {MAX_BYTES}"),
    ):
        engines.engine("numbers").admit(1, 2)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_models_that_hold_all_that_they_may_leave_the_others_theirs(
    engines: Engines, size: tuple[int, int]
) -> None:
    """However many images that is, and whatever room their outputs take, those of class maps above all."""
    with ExitStack() as held:
        for name in ("gated", "maps", "nan", "slow"):
            for images in (1, 2, 3, 50) * 1000:
                shape = (images, *size, 3)
                try:
                    admitted = held.enter_context(engines.engine(name).admit(images, math.prod(shape)))
                except QueueFull as full:
                    assert "exceed max_queue" in str(full)
                    break
                held.push(partial(_drop, [admitted.buffer(images, size)]))
        wanted = [*range(50)]
        assert await numbers(ask(engines, "numbers", *wanted, size=size, in_place=True)) == wanted


def _drop(held: list[Rows], *_: object) -> None:
    held.clear()


async def test_what_could_never_be_taken_is_an_invalid_argument(engines: Engines) -> None:
    engine = engines.engine("numbers")
    with pytest.raises(InvalidArgument, match="images: expected at most"):
        engine.admit(MAX_IMAGES + 1, 1)
    with pytest.raises(InvalidArgument, match="images: expected at most"):
        engine.admit(1, MAX_BYTES + 1)
