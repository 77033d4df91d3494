"""Every `ModelEngine`, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.server.processes.link.engines import (
    EngineProcess,
    Engines,
    EnginesElsewhere,
    EnginesHere,
    until_nothing_is_held,
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("engine") / "socket") as process:
        yield process


@pytest_asyncio.fixture(params=["here", "elsewhere", "spread"])
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    engines: EnginesHere | EnginesElsewhere
    if request.param == "here":
        engines = EnginesHere()
    else:
        engines = await EnginesElsewhere.connect(request.getfixturevalue("process"))
        engines.is_spread = request.param == "spread"
    yield engines
    engines.gate.open()
    try:
        await until_nothing_is_held(engines)
    finally:
        engines.gate.close()
        await engines.stop()
