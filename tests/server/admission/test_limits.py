"""Limits of callers, on a clock that tests advance."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.fakes import Clock

from xlaserve.admission import shared_counts
from xlaserve.admission.caller import Caller, Limit, Origin, Role
from xlaserve.admission.limits import Limiter
from xlaserve.errors import DeadlineUnreachable, ExecutionFailed, InvalidArgument, LimitExceeded, QueueFull

ROLES = frozenset([Role.INFER])


class World:
    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.refused: list[tuple[str, str]] = []
        self.usage = shared_counts.SharedCounts()
        self.limiter = Limiter(
            self.clock, lambda caller, field: self.refused.append((caller.name, field)), usage=self.usage
        )

    def ask(self, caller: Caller, images: int = 1, model: str = "digits", error: Exception | None = None) -> None:
        """Asks, and is answered at once."""
        with self.limiter.hold(caller, model, images):
            if error is not None:
                raise error

    def wait_s(self, caller: Caller, images: int = 1, model: str = "digits") -> float | None:
        """Returns when the caller, that is refused, may come again."""
        with pytest.raises(LimitExceeded) as refused:
            self.ask(caller, images, model)
        return refused.value.retry_after_s


@pytest.fixture
def world() -> World:
    return World()


def shop(*given: dict[str, Any], name: str = "shop", origin: Origin = Origin.FILE) -> Caller:
    return Caller(name, ROLES, limits=tuple(Limit(**one) for one in given), origin=origin)


def test_a_caller_has_a_burst_and_then_its_rate(world: World) -> None:
    caller = shop({"images_per_s": 4, "burst_images": 8})
    for _ in range(2):
        for images in (5, 3):
            world.ask(caller, images)
        assert world.wait_s(caller) == 0.25
        world.clock.now += 1
        world.ask(caller, 4)
        assert world.wait_s(caller, 3) == 0.75
        world.clock.now += 1000  # no more than the burst is saved


def test_a_burst_is_a_second_s_worth_and_at_least_one_image(world: World) -> None:
    fast, slow = shop({"images_per_s": 10}), shop({"images_per_s": 0.5}, name="slow")
    world.ask(fast, 10)
    assert world.wait_s(fast) == pytest.approx(0.1)
    world.ask(slow)
    assert world.wait_s(slow) == pytest.approx(2.0)


def test_who_comes_again_when_told_is_let_in(world: World) -> None:
    caller = shop({"images_per_s": 3.7, "burst_images": 5})
    for images in [1, 2, 3, 4, 5, 9] * 50:
        try:
            world.ask(caller, images)
        except LimitExceeded as refused:
            assert refused.retry_after_s is not None
            world.clock.now += refused.retry_after_s
            world.ask(caller, images)


def test_the_rate_holds_in_the_long_run_for_requests_larger_than_the_burst(world: World) -> None:
    caller = shop({"images_per_s": 2, "burst_images": 4})
    world.ask(caller, 20)
    assert world.wait_s(caller, 20) == 10.0
    assert world.wait_s(caller, 1) == 8.5
    world.clock.now += 10
    world.ask(caller, 20)


@given(
    rate=st.floats(0.01, 1000),
    burst=st.integers(1, 50),
    most=st.integers(1, 60),
    requests=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 60)), max_size=60),
)
def test_no_more_is_taken_than_the_burst_the_rate_and_one_request(
    rate: float, burst: int, most: int, requests: list[tuple[float, int]]
) -> None:
    world, caller = World(), shop({"images_per_s": rate, "burst_images": burst})
    began, taken = world.clock.now, 0
    for pause_s, images in requests:
        world.clock.now += pause_s
        try:
            world.ask(caller, min(images, most))
        except LimitExceeded as refused:
            assert refused.retry_after_s is not None and refused.retry_after_s > 0
        else:
            taken += min(images, most)
        assert taken <= burst + rate * (world.clock.now - began) + most + 1e-3


def test_a_request_that_is_refused_takes_nothing(world: World) -> None:
    caller = shop({"images_per_s": 1, "burst_images": 4})
    world.ask(caller, 3)
    for _ in range(10):
        assert world.wait_s(caller, 4) == 3.0
    world.ask(caller, 1)


@pytest.mark.parametrize("error", [QueueFull("full"), DeadlineUnreachable("late")])
def test_a_request_that_no_queue_took_in_is_not_counted(world: World, error: Exception) -> None:
    caller = shop({"images_per_s": 1, "burst_images": 4, "max_images": 4})
    for _ in range(10):
        with pytest.raises(type(error)):
            world.ask(caller, 4, error=error)
    world.ask(caller, 4)
    assert world.wait_s(caller) == 1.0


def test_a_request_that_failed_is_counted(world: World) -> None:
    caller = shop({"images_per_s": 1, "burst_images": 4})
    with pytest.raises(ExecutionFailed):
        world.ask(caller, 4, error=ExecutionFailed("broken"))
    assert world.wait_s(caller) == 1.0


def test_images_in_flight_are_bounded_and_released_however_a_request_ends(world: World) -> None:
    caller = shop({"max_images": 4})
    for error in (None, ExecutionFailed("broken"), QueueFull("full")):
        with ExitStack() as under_way:
            for images in (1, 3):
                under_way.enter_context(world.limiter.hold(caller, "digits", images))
            assert world.wait_s(caller) is None
            if error is not None:
                with pytest.raises(type(error)), under_way.pop_all():
                    raise error
    world.ask(caller, 4)
    assert world.refused == [("shop", "max_images")] * 3


def test_a_request_that_could_never_be_taken_is_an_invalid_argument(world: World) -> None:
    with pytest.raises(InvalidArgument, match=r"^images: expected at most 4 in a request .*, got 5$"):
        world.ask(shop({"max_images": 4}), 5)
    assert not world.refused


def test_each_model_has_the_limits_whose_patterns_it_matches(world: World) -> None:
    caller = shop(
        {"images_per_s": 10, "burst_images": 10}, {"models": ["resnet*", "vit"], "images_per_s": 1, "burst_images": 2}
    )
    world.ask(caller, 1, "resnet50")
    world.ask(caller, 1, "vit")
    assert world.wait_s(caller, 1, "resnet18") == 1.0
    world.ask(caller, 8, "digits")
    assert world.wait_s(caller, 10, "vit") == 2.0
    assert world.wait_s(caller, 1, "digits") == pytest.approx(0.1)
    assert world.refused == [("shop", "images_per_s")] * 3
    world.ask(shop({"models": ["vit"], "images_per_s": 1}), 1000, "digits")


def test_no_caller_pays_for_another(world: World) -> None:
    limit = {"images_per_s": 1}
    mine, theirs = shop(limit), shop(limit, name="other")
    token, address = (shop(limit, origin=origin) for origin in (Origin.TOKEN, Origin.ADDRESS))
    for caller in (mine, theirs, token, address):  # a token's subject that is a listed caller's name is somebody else
        world.ask(caller)
        assert world.wait_s(caller) == 1.0


def test_a_changed_limit_does_not_fill_the_bucket(world: World) -> None:
    world.ask(shop({"images_per_s": 1, "burst_images": 4}), 4)
    again = shop({"images_per_s": 2, "burst_images": 8})
    assert world.wait_s(again) == 0.5
    world.clock.now += 4
    world.ask(again, 8)
    with world.limiter.hold(again, "digits", 0):
        less = shop({"images_per_s": 1, "burst_images": 2})
        assert world.wait_s(less) == 1.0


def test_limits_of_the_same_models_are_counted_apart(world: World) -> None:
    caller = shop({"images_per_s": 10, "burst_images": 20}, {"images_per_s": 1, "burst_images": 4}, {"max_images": 8})
    world.ask(caller, 4)
    assert world.wait_s(caller, 4) == 4.0
    world.clock.now += 4
    with (
        world.limiter.hold(caller, "digits", 4),
        pytest.raises(LimitExceeded, match=r"max_images 8 .* 4 are under way"),
    ):
        world.ask(caller, 5)


def test_of_too_many_callers_the_oldest_idle_one_is_forgotten_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_counts, "SETS", 1)
    limit = {"images_per_s": 1, "burst_images": 4, "max_images": 8}
    busy = shop(limit, name="busy", origin=Origin.TOKEN)
    with world.limiter.hold(busy, "digits", 8):
        for number in range(3 * shared_counts.WAYS):
            world.clock.now += 0.01
            world.ask(shop(limit, name=f"caller {number}", origin=Origin.TOKEN), 4)
        assert len(world.usage.others) == shared_counts.WAYS
        assert world.wait_s(shop(limit, name=f"caller {number}", origin=Origin.TOKEN)) == 1.0
        assert world.wait_s(busy) is None
        world.ask(shop(limit, name="caller 0", origin=Origin.TOKEN), 4)


def test_strangers_do_not_displace_the_counts_of_configured_callers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_counts, "SETS", 1)
    limit = {"images_per_s": 1, "burst_images": 4}
    world.ask(shop(limit), 4)
    for number in range(100):
        world.ask(shop(limit, name=f"caller {number}", origin=Origin.TOKEN), 4)
    assert world.wait_s(shop(limit)) == 1.0


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"burst_images": 4, "max_images": 1},
        {"images_per_s": 0},
        {"images_per_s": -1},
        {"images_per_s": float("inf")},
        {"images_per_s": float("nan")},
        {"images_per_s": 1, "burst_images": 0},
        {"max_images": 0},
        {"models": [], "max_images": 1},
        {"max_image": 1},
    ],
)
def test_limits_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Limit(**given)
