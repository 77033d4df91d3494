"""Requests to any `ModelEngine`, by the numbers that their images tell."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from tests.fakes import outputs_of
from tests.server.processes.link.engines import Engines
from tests.server.processes.link.models import SMALL, pictures

from xlaserve.config import Mode
from xlaserve.engine.inputs import Rows
from xlaserve.engine.model_engine import ModelEngine
from xlaserve.engine.request import DEFAULT_PRIORITY, EngineRequest, Result
from xlaserve.engine.trace_context import TraceContext
from xlaserve.errors import ModelNotReady


async def ask(
    engines: Engines,
    name: str,
    *numbers: int,
    size: tuple[int, int] = SMALL,
    mode: Mode = Mode.XLA,
    deadline: float = math.inf,
    priority: int = DEFAULT_PRIORITY,
    trace: TraceContext | None = None,
    in_place: bool = False,
) -> Result:
    """Runs images as a request does: admits and runs them, and ends the request."""
    pixels = pictures(*numbers, size=size)
    rows: Rows = (pixels,)
    with engines.engine(name).admit(len(pixels), pixels.nbytes) as admitted:
        if in_place:
            rows = admitted.buffer(len(pixels), size)
            rows[0][...] = pixels
        return await admitted.run(EngineRequest(rows, mode, deadline, priority, trace))


def begin(*arguments: Any, **named: Any) -> asyncio.Task[Result]:
    return asyncio.create_task(ask(*arguments, **named))


def takes(engine: ModelEngine) -> bool:
    try:
        with engine.admit(1, 1):
            return True
    except ModelNotReady:
        return False


async def numbers(asked: Any) -> list[int]:
    first, doubled = outputs_of(await asked)
    assert (first * 2 == doubled[:, 0]).all()
    return [int(number) for number in first]
