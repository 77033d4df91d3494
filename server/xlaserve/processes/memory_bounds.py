"""Bounds of memory for messages and for decoding, which follow the limits of this process's control groups."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from xlaserve.admission.image_memory import ImageMemory
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.config import Settings
from xlaserve.engine.control_groups import MemoryLimit, memory_limits
from xlaserve.engine.memory import machine_memory_bytes
from xlaserve.programs.tf.device import usable_cores

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Interval at which the limits are read."""
LOOKS: Final = 10
"""Bounds follow the reading with the most free memory among the last ones, so that a burst of messages lowers none."""
RESIDENT_SHARE: Final = 0.8
"""Share of the usable memory that `max_resident_bytes` is by default."""
RESERVED_BYTES: Final = 256 * 2**20
"""Bytes of a limit that stay free: as much may arrive and be copied between two readings."""
MESSAGES_SHARE: Final = 1 / 3
DECODING_SHARE: Final = 1 / 6
"""Shares of the memory that is free. The rest is for queues, for copies and for other processes."""
ALONE_SHARE: Final = 7 / 8
"""Share of it that one image may take without others, together with messages."""


def left_bytes(read: Callable[[], Sequence[MemoryLimit]] = memory_limits) -> float:
    """Returns the bytes that may still be taken before memory is short; infinity if no group has a limit."""
    return min(
        (
            min(RESIDENT_SHARE * limit.limit_bytes, limit.limit_bytes - RESERVED_BYTES) - limit.taken_bytes
            for limit in read()
        ),
        default=math.inf,
    )


class MemoryBounds:
    """Sets the bounds of messages and of decoding by the limits that `read` returns, and never above the settings.

    Changes that only a start can follow are logged.
    """

    def __init__(
        self,
        settings: Settings,
        message_memory: MessageMemory,
        decoding: ImageMemory,
        read: Callable[[], Sequence[MemoryLimit]] = memory_limits,
        cores: Callable[[], int] = usable_cores,
    ) -> None:
        self._settings = settings
        self._message_memory = message_memory
        self._decoding = decoding
        self._read = read
        self._cores = cores
        self._cores_at_start = self._cores_before = cores()
        self._usable_bytes = 0
        self._is_reduced = False
        self._free: deque[float] = deque(maxlen=LOOKS)
        """Bytes that messages and decoding could take together, at each of the last readings."""
        self.look()

    async def follow(self) -> None:
        """Sets the bounds at each interval. Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Reads the limits and sets the bounds by them."""
        settings, limits = self._settings, self._read()
        usable_bytes = min([machine_memory_bytes(), *(limit.limit_bytes for limit in limits)])
        before_bytes, self._usable_bytes = self._usable_bytes, usable_bytes
        if usable_bytes != before_bytes:
            self._free.clear()
        message_bytes = self._message_memory.held_everywhere_bytes
        in_use_bytes = message_bytes + self._decoding.used_bytes
        self._free.append(
            min((limit.limit_bytes - limit.taken_bytes + in_use_bytes for limit in limits), default=math.inf)
        )
        free_bytes = max(self._free)
        self._message_memory.max_resident_bytes = settings.max_resident_bytes or int(usable_bytes * RESIDENT_SHARE)
        self._message_memory.max_bytes = _bounded(
            MESSAGES_SHARE * free_bytes, settings.max_message_bytes, settings.max_inflight_bytes
        )
        self._decoding.max_bytes = _bounded(DECODING_SHARE * free_bytes, 0, settings.max_decode_bytes)
        alone_bytes = ALONE_SHARE * free_bytes
        self._decoding.max_alone_bytes = max(self._decoding.max_bytes, alone_bytes)
        self._decoding.free_bytes = max(self._decoding.max_bytes, alone_bytes - message_bytes)
        self._tell(before_bytes)

    def _tell(self, before_bytes: int) -> None:
        settings, messages, decoding = self._settings, self._message_memory.max_bytes, self._decoding.max_bytes
        is_reduced = messages < settings.max_inflight_bytes or decoding < settings.max_decode_bytes
        usable_mib = self._usable_bytes >> 20
        if is_reduced and (not self._is_reduced or self._usable_bytes != before_bytes):
            log.warning(
                "memory: %d MiB may be used, so that messages have %d MiB for now (max_inflight_bytes: %d) and decoding"
                " %d (max_decode_bytes: %d)",
                usable_mib,
                messages >> 20,
                settings.max_inflight_bytes >> 20,
                decoding >> 20,
                settings.max_decode_bytes >> 20,
            )
        elif before_bytes and self._usable_bytes != before_bytes:
            log.info("memory: %d MiB may be used from now on", usable_mib)
        self._is_reduced = is_reduced
        if (cores := self._cores()) != self._cores_before:
            self._cores_before = cores
            log.warning(
                "processors: %d may be used now; until the next start lanes and threads are for %d",
                cores,
                self._cores_at_start,
            )


def _bounded(size_bytes: float, least_bytes: int, most_bytes: int) -> int:
    return int(min(max(size_bytes, least_bytes), most_bytes))
