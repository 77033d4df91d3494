"""The interface that runs a model for requests: its `Batcher` in this process, or a link to one in another process.

Both are held to the tests of every `ModelEngine` in `tests/server/processes/link/`, with the fixture `engines`.
"""

from __future__ import annotations

from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, Self

from xlaserve.config import Mode
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import Rows
from xlaserve.engine.request import EncodedRequest, EngineRequest, Result


class Ticket(Protocol):
    """An admitted request. It counts until the end of the `with` that holds it; its runs end before that."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def buffer(self, images: int, resolution: Resolution) -> Rows:
        """Returns memory for rows of the model's inputs, with any content: what is written there and then run, as this
        very tuple, is not copied again. Raises QueueFull."""

    async def open(self, resolution: Resolution, mode: Mode) -> Mode:
        """Makes the model ready for a `resolution` that was admitted as `unmatched`, which takes a few runs the first
        time. Returns the mode that its images run in now: `mode` once buckets have compiled for it, else graph mode.

        Raises InvalidArgument where the model does not take it, EngineLost, and any ModelError. A cancelled call
        leaves the others that wait for the same.
        """

    def run(self, request: EngineRequest) -> Coroutine[Any, Any, Result]:
        """Runs rows of a shape that has buckets. Raises any ModelError or OverloadError. A cancelled call takes its
        images out of the queue."""


class ModelEngine(Protocol):
    """Runs the requests to one model. All methods are called on one event loop."""

    def admit(self, images: int, size_bytes: int, unmatched: Resolution | None = None) -> Ticket:
        """Admits a request of `images` that hold `size_bytes` in all, to be held in a `with`. For pixels of a
        resolution without buckets, `unmatched` is that resolution, which must be opened before they run.

        Raises ModelNotReady, QueueFull, EngineLost, or InvalidArgument for more than the model ever takes, or for a
        resolution that it does not take.
        """

    def check_encoded(self, request: EncodedRequest) -> None:
        """Raises DeadlineUnreachable for encoded images that can't be answered by their deadline in any shape."""

    def largest(self, mode: Mode, height: int, width: int) -> int:
        """Returns the most images of this mode and resolution that run in one batch; 0 where none do."""

    async def run_when_idle(self, request: EngineRequest) -> Result:
        """Runs 1 to `largest` rows as one batch that no client waits for, once nothing runs on the device and nothing
        waits for it. A request that comes then waits for that batch at most.

        It counts for no bound, queue or demand. Raises DeadlineExceeded where the device was not idle by the
        deadline, QueueFull without room for the rows, InvalidArgument for more than `largest`, EngineLost, and any
        ModelError.
        """

    def outstanding_s(self) -> float:
        """Returns the seconds in which every request that waits or runs should be answered."""

    def live(self) -> Live:
        """Returns the model's work, as it was within the last second or two."""
