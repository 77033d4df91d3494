"""What tests share: virtual time, images that can be told apart, and a model that tells which ones it saw."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import settings

from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Executable, Outputs
from xlaserve.planning.virtual_time import VirtualTimeLoop

# The same examples in every run; `--hypothesis-profile=default` looks for new ones.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


# A shell that starts the tests in the background, and nohup, have them ignore these, and what they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# As the load tester does for itself, before anything imports gRPC: where gRPC takes part in forks, starting a child may
# never end (https://github.com/grpc/grpc/issues/43157).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_LONG = ("tests/loadtest/test_cli.py", "tests/integration/", "tests/server/models/", "tests/loadtest/")
"""Files that begin first, in this order: a long file that began last would run alone while other processors idle."""

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_had_log_level = _LOG_LEVEL in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((place for place, folder in enumerate(_LONG) if item.nodeid.startswith(folder)), len(_LONG))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Undoes what JAX sets where a module of tests imports it, for all that tests start.

    Takes what was imported out of the garbage collector's sight: each of many collections would walk all of it.
    """
    if not _had_log_level:
        os.environ.pop(_LOG_LEVEL, None)
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if "virtual_time" in getattr(item, "fixturenames", ()):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest_asyncio.fixture
async def virtual_time() -> AsyncIterator[VirtualTimeLoop]:
    """The test's event loop, in virtual time. Nothing may be left to the loop's exception handler."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: unhandled.append(context))
    yield loop
    assert not unhandled


@pytest.fixture
def pictures() -> Callable[[Iterable[int]], Images]:
    """Makes images, 2 x 2, of their numbers, from 0 to 2**24 - 1."""

    def make(numbers: Iterable[int]) -> Images:
        channels = np.array(list(numbers), np.uint32)[:, np.newaxis] >> np.array([0, 8, 16], np.uint32)
        return np.tile((channels & 255).astype(np.uint8)[:, np.newaxis, np.newaxis, :], (1, 2, 2, 1))

    return make


@pytest.fixture
def echo() -> Executable:
    """An executable that answers each of `pictures` with its number, and once more doubled, as `[n, 1]`."""

    def run(images: Images) -> Outputs:
        numbers = (images[:, 0, 0, :] @ np.array([1, 256, 65536], np.uint32)).astype(np.float32)
        return numbers, 2 * numbers[:, np.newaxis]

    return run
