"""How a front follows engines that come and go, on fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.server.processes.test_merged_catalogue import facts

from xlaserve.admission.shared_counts import Kind, SharedCounts, Upgrade
from xlaserve.config import Mode
from xlaserve.errors import EngineLost, ModelFailed, XlaserveError
from xlaserve.models.version import State, Version
from xlaserve.processes import remote_engine
from xlaserve.processes.link.front_end import engine_link as link
from xlaserve.processes.mirror import Mirror
from xlaserve.processes.passed_changes import PassOn, refuse
from xlaserve.processes.published import Catalogue, Loading
from xlaserve.processes.remote_engines import RemoteEngines
from xlaserve.telemetry import tally
from xlaserve.telemetry.findings import Findings, Likeness, Pair, TimeRatio
from xlaserve.telemetry.metrics import Metrics
from xlaserve.wire.shared.call import Calls


class Shown:
    """Notes what a directory is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.was_told = asyncio.Event()

    def take(self, catalogue: object, engines: object) -> None:
        self._note("take")

    def in_use(self) -> list[object]:
        return []

    def lose(self) -> None:
        self._note("lose")

    def _note(self, what: str) -> None:
        self.told.append(what)
        self.was_told.set()

    async def next(self) -> None:
        self.was_told.clear()
        await self.was_told.wait()


@pytest.mark.timeout(20)
async def test_an_engine_that_ends_once_it_has_said_what_it_has_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(catalogue=Catalogue(False, (), {}, {}), device=None, unexpected=(), is_watched=None)
    ended = SimpleNamespace(details=about, models={}, is_lost=True, close=lambda: None)

    async def connect(*_: object, on_models: Callable[[Any], object], tally: object) -> Any:
        on_models(ended)
        raise EngineLost("the other process has gone")

    monkeypatch.setattr(link, "connect", connect)
    monkeypatch.setattr(remote_engine, "RETRY_S", 1000)
    shown = Shown()
    following = asyncio.create_task(RemoteEngines([Path("engine")], cast(Mirror, shown), Metrics()).follow())
    while "lose" not in shown.told:
        await shown.next()
    assert shown.told == ["take", "lose"]
    following.cancel()
    await asyncio.wait([following])


class Link:
    """A link to an engine that answers every question as it is told."""

    is_superseded = False

    def __init__(self, error: XlaserveError | None = None) -> None:
        self.error = error
        self.was_asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.asked: list[tuple[str, str]] = []

    async def ask(self, question: str, *, name: str, **_: object) -> None:
        self.asked.append((question, name))
        self.was_asked.set()
        await self.answers.wait()
        if self.error is not None:
            raise self.error


def linked(*links: Link | None, usage: SharedCounts | None = None, pass_on: PassOn = refuse) -> RemoteEngines:
    addresses = [Path(str(number)) for number, _ in enumerate(links)]
    engines = RemoteEngines(addresses, Mirror(Metrics()), Metrics(), usage, pass_on)
    for engine, one in zip(engines._engines, links, strict=True):
        engine.link = cast(Any, one)
    return engines


async def test_a_change_is_made_in_all_engines_that_are_there() -> None:
    lost, there, other = Link(EngineLost("it has ended")), Link(), Link()
    await linked(lost, None, there, other).load("m")
    assert there.asked == other.asked == [("load", "m")]


async def test_what_the_first_engine_can_t_change_is_changed_in_none() -> None:
    lost, first, other = Link(EngineLost("it has ended")), Link(ModelFailed("no such file")), Link()
    with pytest.raises(ModelFailed, match="no such file"):
        await linked(lost, first, other).load("m")
    assert not other.asked


async def test_what_only_some_engines_can_change_is_changed_in_the_others() -> None:
    first, failing, last = Link(), Link(ModelFailed("no memory")), Link()
    with pytest.raises(ModelFailed, match="no memory"):
        await linked(first, failing, last).load("m")
    assert last.asked == [("load", "m")]


async def test_nothing_is_changed_where_no_engine_is_there() -> None:
    with pytest.raises(EngineLost, match="it has ended"):
        await linked(None, Link(EngineLost("it has ended"))).load("m")


async def test_a_change_made_by_one_engine_is_made_by_all_if_its_caller_gives_up() -> None:
    first, slow, last = Link(), Link(), Link()
    slow.answers.clear()
    engines = linked(first, slow, last)
    loading = asyncio.create_task(engines.load("m"))
    await slow.was_asked.wait()
    loading.cancel()
    await asyncio.wait([loading])
    slow.answers.set()
    await asyncio.wait(engines._changing)
    assert last.asked == [("load", "m")]


async def test_a_change_that_the_first_engine_has_not_made_is_given_up() -> None:
    slow, other = Link(), Link()
    slow.answers.clear()
    loading = asyncio.create_task(linked(slow, other).load("m"))
    await slow.was_asked.wait()
    loading.cancel()
    await asyncio.wait([loading])
    assert not other.asked


@pytest.mark.usefixtures("virtual_time")
async def test_a_change_waits_for_a_starting_server_and_is_made_if_that_fails() -> None:
    usage, engine = SharedCounts(), Link()
    usage.upgrade = Upgrade.STARTING
    loading = asyncio.create_task(linked(engine, usage=usage).load("m"))
    await asyncio.sleep(600)
    assert (engine.asked, usage.amount(Kind.CHANGES).total) == ([], 0)
    engine.answers.clear()
    usage.upgrade = Upgrade.NONE
    await engine.was_asked.wait()
    assert usage.amount(Kind.CHANGES).total == 1
    engine.answers.set()
    await loading
    assert (engine.asked, usage.amount(Kind.CHANGES).total) == ([("load", "m")], 0)


@pytest.mark.usefixtures("virtual_time")
async def test_once_another_server_serves_it_makes_the_changes() -> None:
    usage, engine, passed, in_flight = SharedCounts(), Link(), [], []
    calls = Calls(Mirror(Metrics()), Metrics(), cast(Any, SimpleNamespace(clock=None)))

    async def pass_on(question: str, arguments: Mapping[str, object]) -> None:
        passed.append((question, arguments))
        in_flight.append(calls.in_flight)

    usage.upgrade = Upgrade.STARTING
    engines = linked(engine, usage=usage, pass_on=pass_on)
    engines.serve(calls)
    loading = asyncio.create_task(engines.load("m"))
    await asyncio.sleep(600)
    assert not passed
    usage.upgrade = Upgrade.DONE
    await loading
    await engines.update("m", {"stable": "1"}, ())
    assert passed == [
        ("load", {"name": "m"}),
        ("update", {"name": "m", "labels": {"stable": "1"}, "versions": []}),
    ]
    assert (engine.asked, usage.amount(Kind.CHANGES).total) == ([], 0)
    assert (in_flight, calls.in_flight) == ([1, 1], 0), "the end of this server does not wait for them"


class Front:
    """A front of two engines, which show version 1 as their loadings 1 and 1001, and version 2 as 2 and 1002."""

    def __init__(self) -> None:
        self.engines = linked(None, None)
        for first, engine in zip((0, 1000), self.engines._engines, strict=True):
            loadings = tuple(Loading(first + number, State.READY, "", True, facts(str(number))) for number in (1, 2))
            about = SimpleNamespace(catalogue=Catalogue(True, loadings, {}, {}))
            models = {loading.number: SimpleNamespace(release=lambda: None) for loading in loadings}
            engine.link = cast(Any, SimpleNamespace(details=about, models=models, ask=self._count))
            engine.is_known = True
        self.engines._show_together()
        self.counted: tally.Json = tally.NOTHING

    async def _count(self, question: str, *, of_fronts: bool) -> tally.Json:
        assert question == "count"
        return self.counted if of_fronts else tally.NOTHING

    def version(self, number: str) -> Version:
        return self.engines.directory.find("a", number)

    def tell(self, engine: int) -> tally.Json:
        return json.loads(json.dumps(self.engines._own_tally(engine)))


async def test_what_all_fronts_have_found_of_shadows_is_shown_by_each() -> None:
    fronts = [Front(), Front()]
    pair = Pair(Mode.XLA, "2", Mode.GRAPH)
    for number, front in enumerate(fronts):
        found = Findings()
        found.add(Likeness(float(number), None, 0.25))
        found.time_ratios.append(TimeRatio(number, 2.0))
        front.version("1").shadows[pair] = found
    counted = tally.added(*(front.tell(0) for front in fronts))
    for front in fronts:
        front.counted = counted
        await front.engines.count()
        (shown,) = front.engines.shadows(front.version("1")).items()
        assert shown[0] == pair
        assert (shown[1].agreement.count, shown[1].agreement.value, len(shown[1].time_ratios)) == (2, 0.5, 2)
        assert not front.engines.shadows(front.version("2"))
    assert {*fronts[0].tell(1)["shadows"]} == {"1001"}, "as that engine numbers it"


async def test_what_is_compared_with_a_version_that_is_gone_is_not_told() -> None:
    front = Front()
    front.version("1").shadows[Pair(Mode.XLA, "3", Mode.XLA)] = Findings()
    assert front.tell(0)["shadows"] == {}
