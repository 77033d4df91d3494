from __future__ import annotations

from tests.fakes import Clock

from xlaserve.telemetry.metrics import MAX_VERSIONS_KEPT, SERIES_KEPT_S, SeriesRetention

CATS, DOGS = ("cats", "1"), ("dogs", "1")


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.forgotten: list[tuple[str, str]] = []
        self.retention = SeriesRetention(lambda *key: self.forgotten.append(key), self.clock)


def test_series_of_a_version_that_left_are_forgotten_once_after_a_while() -> None:
    world = World()
    world.retention.update([CATS, DOGS])
    world.retention.update([DOGS])
    world.clock.now += SERIES_KEPT_S - 1
    world.retention.update([DOGS])
    assert not world.forgotten
    world.clock.now += 1
    for _ in range(2):
        world.retention.update([DOGS])
    assert world.forgotten == [CATS]


def test_the_series_of_a_version_that_comes_back_are_kept() -> None:
    world = World()
    for present in ([CATS], [], [CATS]):
        world.retention.update(present)
    world.clock.now += 2 * SERIES_KEPT_S
    world.retention.update([CATS])
    assert not world.forgotten
    world.retention.update([])
    world.clock.now += SERIES_KEPT_S - 1
    world.retention.update([])
    assert not world.forgotten, "it left a second time"


def test_of_many_versions_that_left_the_first_are_forgotten_at_once() -> None:
    world = World()
    for version in range(MAX_VERSIONS_KEPT + 3):
        world.retention.update([("cats", str(version))])
        world.clock.now += 1
    assert world.forgotten == [("cats", "0"), ("cats", "1")]
