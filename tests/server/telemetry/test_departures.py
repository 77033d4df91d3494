from __future__ import annotations

from tests.fakes import Clock

from xlaserve.telemetry.departures import KEPT_S, MAX_KEPT, Departures

CATS, DOGS = ("cats", "1"), ("dogs", "1")


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.forgotten: list[tuple[str, str]] = []
        self.departures = Departures(lambda *key: self.forgotten.append(key), self.clock)


def test_a_version_that_left_is_forgotten_after_a_while_and_once() -> None:
    world = World()
    world.departures.see([CATS, DOGS])
    world.departures.see([DOGS])
    world.clock.now += KEPT_S - 1
    world.departures.see([DOGS])
    assert not world.forgotten
    world.clock.now += 1
    for _ in range(2):
        world.departures.see([DOGS])
    assert world.forgotten == [CATS]


def test_a_version_that_comes_back_goes_on() -> None:
    world = World()
    for there in ([CATS], [], [CATS]):
        world.departures.see(there)
    world.clock.now += 2 * KEPT_S
    world.departures.see([CATS])
    assert not world.forgotten
    world.departures.see([])
    world.clock.now += KEPT_S - 1
    world.departures.see([])
    assert not world.forgotten, "it left a second time"


def test_of_many_that_left_within_a_while_the_first_are_forgotten_at_once() -> None:
    world = World()
    for version in range(MAX_KEPT + 3):
        world.departures.see([("cats", str(version))])
        world.clock.now += 1
    assert world.forgotten == [("cats", "0"), ("cats", "1")]
