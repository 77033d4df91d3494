"""The size of a front's arena, and the memory that it keeps while that is not in use."""

from __future__ import annotations

import asyncio
from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_FSIZE, getrlimit
from typing import Final

from xlaserve.engine.memory import machine_memory_bytes
from xlaserve.processes.link.arena import PAGE_BYTES, Arena

ARENA_SHARE: Final = 4
"""Addresses of an arena, as a multiple of the machine's memory: enough for all models, whatever gaps there are."""
MIN_ARENA_BYTES: Final = 2**36
MAX_ARENA_BYTES: Final = 2**40
"""An engine has the arenas of all fronts among its addresses, which are 2**47."""
ADDRESS_SHARE: Final = 16
"""Where RLIMIT_AS bounds a process's addresses, an arena has that part of them."""
TRIM_S: Final = 30.0
"""How long an arena keeps memory that it has not needed, for the next burst: new memory takes longer than a request."""
TRIM_STEP_S: Final = 0.02
KEPT_BYTES: Final = 32 * 2**20
SLACK: Final = 1.25
"""Memory that an arena may keep, as a multiple of what it needed: extents of different sizes leave gaps."""


def addressable_bytes() -> int:
    """Returns how large an arena, which is a file, may be: more than will ever be used, unless limits are set."""
    wanted = min(max(MIN_ARENA_BYTES, ARENA_SHARE * machine_memory_bytes()), MAX_ARENA_BYTES)
    (file_bytes, _), (address_bytes, _) = getrlimit(RLIMIT_FSIZE), getrlimit(RLIMIT_AS)
    if file_bytes != RLIM_INFINITY:
        wanted = min(wanted, file_bytes)
    if address_bytes != RLIM_INFINITY:  # the engine maps the arenas of all fronts
        wanted = min(wanted, address_bytes // ADDRESS_SHARE)
    return wanted // PAGE_BYTES * PAGE_BYTES


async def trim_regularly(arena: Arena) -> None:
    """Gives memory that was not needed in the last `TRIM_S` back to the system, in small steps, for ever."""
    while True:
        await asyncio.sleep(TRIM_S)
        kept_bytes = max(KEPT_BYTES, int(SLACK * arena.most_used_bytes()))
        for _ in arena.trim(kept_bytes):
            if arena.used_bytes > kept_bytes:  # a burst needs it again
                break
            await asyncio.sleep(TRIM_STEP_S)
