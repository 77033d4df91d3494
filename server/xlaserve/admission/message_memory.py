"""The bound on memory for clients' messages: messages that arrive, and messages that are not answered yet.

Messages that have arrived are counted, and refused beyond a bound. What is still arriving lies in gRPC's own buffers,
which neither tell their size nor take a bound. gRPC receives by itself as many messages as the
bound has room for at the largest size, and they can't be refused until they have arrived. Further ones are asked for by
`receive`, and where the process runs short of memory no more of them than there is room for are kept: those that take
longest are refused in favour of new ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.engine.memory import resident_bytes
from xlaserve.errors import QueueFull

R = TypeVar("R")

MEMORY_CHECK_S: Final = 0.05
"""How often the process's memory is looked at while many messages arrive."""


class MessageMemory:
    """Bounds `held_bytes` by `max_bytes`, and while memory is short the number of messages that arrive.

    Memory is short where `resident`, the bytes that the process takes, comes near `max_resident_bytes`, or where no
    more than `max_bytes` are `left` of what all processes may take together. With several fronts, by their `usage`,
    all but `resident` holds for them together, and each has its share of what is left of `max_resident_bytes` beside
    the `max_bytes` that they hold together. Both bounds may change at any time.
    """

    def __init__(
        self,
        max_bytes: int,
        max_message_bytes: int,
        max_resident_bytes: int,
        resident: Callable[[], int] = resident_bytes,
        usage: SharedCounts | None = None,
        *,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        usage = usage or SharedCounts()
        self.max_bytes = self._configured_bytes = max_bytes
        self._max_message_bytes = max_message_bytes
        self.max_resident_bytes = max_resident_bytes
        self._left = left
        self._usage = usage
        self._resident = resident
        self._arriving: dict[asyncio.Task[object], None] = {}
        self._refused: set[asyncio.Task[object]] = set()
        self._is_short = False
        self._timer: asyncio.TimerHandle | None = None
        self._all_arriving = usage.amount(Kind.ARRIVING)
        self._expected = usage.amount(Kind.EXPECTED)
        self._held_bytes = usage.amount(Kind.HELD_BYTES)

    @property
    def held_bytes(self) -> int:
        """Bytes of messages that have arrived here, and of large answers that have not left."""
        return self._held_bytes.own

    @property
    def held_everywhere_bytes(self) -> int:
        """Held bytes of all fronts."""
        return self._held_bytes.total

    @property
    def expected(self) -> int:
        """Messages that gRPC receives here by itself, and that have not arrived."""
        return self._expected.own

    @property
    def is_crowded(self) -> bool:
        """Whether a message is to be asked for by `receive`, so that it can be refused while it arrives."""
        return self._all_arriving.total >= self._room

    def expect(self, messages: int = 1) -> None:
        """Counts messages that gRPC receives by itself, each until `end_expecting`."""
        self._expected.own += messages

    def end_expecting(self, messages: int = 1) -> None:
        """Counts messages that have arrived, or will not."""
        self._expected.own -= messages

    async def receive(self, read: Callable[[], Awaitable[R]]) -> R:
        """Returns what `read` does, the current call's next message. Raises QueueFull."""
        task = asyncio.current_task()
        assert task is not None
        arriving = self._arriving
        if len(arriving) >= self._sure:
            self._crowd()
        arriving[task] = None
        self._all_arriving.own = len(arriving)
        try:
            return await read()
        except asyncio.CancelledError:
            if task not in self._refused:
                raise
            self._refused.remove(task)
            task.uncancel()
            raise QueueFull("the server is short of memory, and this message took longest to arrive") from None
        finally:
            arriving.pop(task, None)
            self._all_arriving.own = len(arriving)
            if self._timer is not None and asyncio.get_running_loop().time() > self._timer.when():
                self._check_memory()  # which large messages, one after the other, have kept from its turn

    def take(self, size_bytes: int) -> None:
        """Counts what is held, until `release`. Raises QueueFull."""
        held_bytes = self._held_bytes.total
        if held_bytes + size_bytes > self.max_bytes:
            told = f"{self.max_bytes}; {held_bytes} are held"
            if self.max_bytes < self._configured_bytes:
                raise QueueFull(f"{size_bytes} more bytes exceed what the server's memory has room for, {told}")
            raise QueueFull(f"{size_bytes} more bytes exceed max_inflight_bytes {told}")
        self._held_bytes.own += size_bytes

    def hold(self, size_bytes: int) -> None:
        """Counts an answer, which is never refused, until `release`."""
        self._held_bytes.own += size_bytes

    def release(self, size_bytes: int) -> None:
        """Ends what `take` or `hold` began."""
        self._held_bytes.own -= size_bytes

    @property
    def _sure(self) -> int:
        """Messages that may always arrive here at the same time, even while memory is short."""
        return max(1, self._room - sum(self._all_arriving.elsewhere))

    @property
    def _room(self) -> int:
        """Messages of the largest size that fit in addition to what is held and expected."""
        return (self.max_bytes - self._held_bytes.total) // self._max_message_bytes - self._expected.total

    @property
    def _short_from_bytes(self) -> int:
        """Of this process, as many fronts as there are now."""
        return max(0, self.max_resident_bytes - self.max_bytes) // self._usage.serving

    def _crowd(self) -> None:
        """Called when one more message begins to arrive than there is surely room for."""
        if self._is_short:
            self._refuse(keep=self._sure - 1)
        if self._timer is None:
            self._check_memory()

    def _check_memory(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if len(self._arriving) < self._sure:
            self._is_short, self._timer = False, None
            return
        self._is_short = self._resident() >= self._short_from_bytes or self._left() <= self.max_bytes
        if self._is_short:
            self._refuse(keep=self._sure)
        self._timer = asyncio.get_running_loop().call_later(MEMORY_CHECK_S, self._check_memory)

    def _refuse(self, keep: int) -> None:
        """Refuses the messages that have been arriving for longest."""
        while len(self._arriving) > keep:
            task = next(iter(self._arriving))
            del self._arriving[task]
            self._refused.add(task)
            task.cancel()
