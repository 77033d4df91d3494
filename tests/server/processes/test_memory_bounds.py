"""Bounds of memory, as limits and what else takes memory change."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

from xlaserve.admission.image_memory import ImageMemory
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.config import Settings
from xlaserve.engine.control_groups import MemoryLimit
from xlaserve.processes import memory_bounds
from xlaserve.processes.memory_bounds import LOOK_S, LOOKS, MemoryBounds, left_bytes

MIB = 2**20
MACHINE_BYTES = 65_536 * MIB


class World:
    """A process in control groups that the test changes."""

    def __init__(self, *limits: MemoryLimit, **settings: int) -> None:
        self.limits = [*limits]
        self.cores = 4
        self.settings = Settings(**settings)
        self.decoding = ImageMemory(self.settings.max_decode_bytes)
        self.message_memory = MessageMemory(
            self.settings.max_inflight_bytes, self.settings.max_message_bytes, MACHINE_BYTES
        )
        self.bounds = MemoryBounds(
            self.settings, self.message_memory, self.decoding, lambda: self.limits, lambda: self.cores
        )

    @property
    def mib(self) -> tuple[int, int, int]:
        """The bounds of messages, of decoding and of the process."""
        bounds = self.message_memory.max_bytes, self.decoding.max_bytes, self.message_memory.max_resident_bytes
        return bounds[0] // MIB, bounds[1] // MIB, bounds[2] // MIB


def limit(limit_mib: int, taken_mib: int = 0) -> MemoryLimit:
    return MemoryLimit(limit_mib * MIB, taken_mib * MIB)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_bounds, "machine_memory_bytes", lambda: MACHINE_BYTES)


def test_without_limits_the_settings_hold() -> None:
    assert World().mib == (1024, 512, 52_428)
    assert World(max_resident_bytes=100 * MIB, max_inflight_bytes=90 * MIB).mib == (90, 512, 100)
    assert left_bytes(list) == math.inf


def test_messages_and_decoding_have_shares_of_what_else_is_not_taken() -> None:
    assert World(limit(1500, 300)).mib == (400, 200, 1200)
    assert World(limit(1500, 300), limit(2000, 1700)).mib == (100, 50, 1200), "the group with the least left counts"
    assert World(limit(8000, 300)).mib == (1024, 512, 6400), "never more than the settings"
    assert World(limit(1500, 1490)).mib == (64, 1, 1200), "one message always fits"
    assert left_bytes(lambda: [limit(1500, 300), limit(2000, 1000)]) == 600 * MIB


def test_memory_of_messages_and_images_is_not_taken_from_their_bounds() -> None:
    world = World(limit(1500, 300))
    world.message_memory.take(200 * MIB)
    with world.decoding.hold(100 * MIB):
        world.limits = [limit(1500, 600)]
        for _ in range(LOOKS):
            world.bounds.look()
        assert world.mib == (400, 200, 1200)


def test_memory_taken_for_a_few_seconds_changes_no_bound_and_longer_does() -> None:
    world = World(limit(1500, 300))
    world.limits = [limit(1500, 900)]
    for _ in range(LOOKS - 1):
        world.bounds.look()
    assert world.mib == (400, 200, 1200)
    world.bounds.look()
    assert world.mib == (200, 100, 1200)
    world.limits = [limit(1500, 300)]
    world.bounds.look()
    assert world.mib == (400, 200, 1200)


def test_one_image_may_take_alone_what_is_free_but_a_reserve() -> None:
    assert World().decoding.max_alone_bytes == math.inf
    world = World(limit(1500, 300))
    assert world.decoding.max_alone_bytes == world.decoding.free_bytes == 1050 * MIB
    world.message_memory.take(200 * MIB)
    world.limits = [limit(1500, 500)]
    world.bounds.look()
    assert (world.decoding.max_alone_bytes, world.decoding.free_bytes) == (1050 * MIB, 850 * MIB)
    crowded = World(limit(300, 295)).decoding
    assert crowded.free_bytes >= crowded.max_bytes


@pytest.mark.usefixtures("virtual_time")
async def test_a_limit_that_changes_while_it_serves_is_followed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World(limit(8000, 300))
    following = asyncio.create_task(world.bounds.follow())
    await asyncio.sleep(2.5 * LOOK_S)
    assert not caplog.records
    world.limits = [limit(1500, 300)]
    await asyncio.sleep(LOOK_S)
    assert world.mib == (400, 200, 1200)
    await asyncio.sleep(5 * LOOK_S)
    world.limits = []
    await asyncio.sleep(LOOK_S)
    assert world.mib == (1024, 512, 52_428)
    following.cancel()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "messages have 400 MiB for now" in caplog.records[0].getMessage()


def test_processors_that_change_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for world.cores in (4, 2, 2, 4):
        world.bounds.look()
    assert [record.getMessage().partition(" may")[0] for record in caplog.records] == [
        "processors: 2",
        "processors: 4",
    ]
