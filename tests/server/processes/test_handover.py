"""The state that a server hands over to the one that takes its place, without another server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.server.models.house import House, model

from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.config.versions import grouped
from xlaserve.errors import ConfigError
from xlaserve.models.listing import Ended
from xlaserve.models.version import State
from xlaserve.processes import handover
from xlaserve.processes.engine_replacement import InitialModels
from xlaserve.processes.handover import (
    CHANGES_LOOK_S,
    CHANGES_S,
    GO,
    HANDED_OVER,
    READY,
    ClientOverrides,
    Predecessor,
    changes_are_made,
    command,
)

PATIENCE_S = 30.0


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    labelled = model("b", version="1", version_labels=(("stable", "1"),))
    house.configured = [
        model("a"),
        labelled,
        model("b", version="2", version_labels=labelled.version_labels),
        model("c"),
    ]
    await house.repository.load_all()
    yield house
    await house.close()


def changes(house: House) -> ClientOverrides:
    found = ClientOverrides.of(InitialModels(grouped(house.configured), house.repository.listing()))
    told = json.loads(json.dumps(found._asdict()))
    return ClientOverrides(**told)


async def test_models_that_are_as_configured_only_serve(house: House) -> None:
    assert changes(house) == ClientOverrides(serving=["a", "b", "c"])


async def test_what_clients_have_changed_is_handed_over(house: House) -> None:
    await house.repository.unload("a")
    await house.repository.update("b", {"stable": "2"}, ())
    found = changes(house)
    assert found == ClientOverrides({"a": ["1"]}, {"b": {"stable": "2"}}, ["b", "c"])
    listings = found.listings(grouped(house.configured))
    assert listings["a"].ended == {"1": Ended(State.UNLOADED)}
    assert listings["b"].model.labels == {"stable": "2"}
    assert not listings["b"].ended
    assert listings["c"].model == grouped(house.configured)["c"]


async def test_what_is_not_configured_any_more_is_left_out(house: House) -> None:
    await house.repository.update("b", {"stable": "2", "next": "1"}, ())
    await house.repository.unload("c")
    listings = changes(house).listings(grouped([model("b", version="1")]))
    assert [*listings] == ["b"]
    assert listings["b"].model.labels == {"next": "1"}


@pytest.fixture
def handed() -> tuple[dict[str, str], socket.socket, dict[str, object]]:
    ours, theirs = socket.socketpair()
    regions = os.memfd_create("regions")
    told: dict[str, object] = {
        "ports": {"grpc_port": 8001, "http_port": 8000},
        "metrics": None,
        "regions": regions,
        "changes": {"unloaded": {"a": ["1"]}, "serving": ["b"], "of_a_later_version": 1},
        "channel": theirs.detach(),
        "successor_addresses": ["/tmp/b/successor", "/tmp/a/successor"],
        "of_a_later_version": 1,
    }
    return environment(told), ours, told


def environment(told: object) -> dict[str, str]:
    file = os.memfd_create("handed-over")
    os.write(file, json.dumps(told).encode())
    return {HANDED_OVER: str(file), "HOME": "/"}


async def test_a_successor_says_that_it_serves_and_awaits_its_predecessors_end(
    handed: tuple[dict[str, str], socket.socket, dict[str, object]],
) -> None:
    there, ours, told = handed
    with ours:
        before = Predecessor.of(there)
        assert before is not None
        assert there == {"HOME": "/"}  # what it starts follows nobody
        assert before.ports == told["ports"]
        assert before.changes == ClientOverrides({"a": ["1"]}, {}, ["b"])
        assert before.successor_addresses == [Path("/tmp/b/successor"), Path("/tmp/a/successor")]
        assert not os.get_inheritable(before.regions)
        ours.send(GO)
        await before.leaves()
        assert ours.recv(8) == READY
    os.close(before.regions)


async def test_a_predecessor_that_has_ended_is_not_waited_for(
    handed: tuple[dict[str, str], socket.socket, dict[str, object]],
) -> None:
    _, ours, told = handed
    del told["successor_addresses"]  # its version is an older one
    before = Predecessor.of(environment(told))
    assert before is not None
    assert not before.successor_addresses
    ours.close()
    await before.leaves()
    os.close(before.regions)


@pytest.mark.parametrize("told", [{}, [], {"ports": {}, "metrics": "x", "regions": 0, "changes": {}, "channel": 0}])
def test_what_can_not_be_understood_is_refused(told: object) -> None:
    with pytest.raises(ConfigError, match=HANDED_OVER):
        Predecessor.of(environment(told))
    assert Predecessor.of({}) is None


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(("takes_s", "expected"), [(0.0, True), (CHANGES_S / 2, True), (CHANGES_S * 2, False)])
async def test_an_upgrade_waits_for_changes_that_have_begun_but_not_for_ever(takes_s: float, expected: bool) -> None:
    usage, loop = SharedCounts(), asyncio.get_running_loop()
    under_way = usage.amount(Kind.CHANGES)
    under_way.own = 1
    began_at = loop.time()
    loop.call_later(takes_s, setattr, under_way, "own", 0)
    assert await changes_are_made(usage) is expected
    assert loop.time() - began_at == pytest.approx(min(takes_s, CHANGES_S), abs=3 * CHANGES_LOOK_S)


READS_AGAIN = 7
STARTING = f"""
import json, os, signal, socket, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
signal.signal(signal.SIGHUP, lambda *_: sys.exit({READS_AGAIN}))
with open(int(os.environ[{HANDED_OVER!r}]), "rb") as file:
    file.seek(0)
    channel = socket.socket(fileno=json.load(file)["channel"])
channel.send({READY!r})
time.sleep({PATIENCE_S})
"""
"""A server that is ended by SIGHUP until it listens for it."""


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_server_that_starts_reads_its_configuration_again_once_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_early: bool
) -> None:
    go_on = tmp_path / "go on"
    monkeypatch.setattr(handover, "command", lambda: [sys.executable, "-c", STARTING, str(go_on)])
    regions = os.memfd_create("regions")
    successor = handover.Successor({}, None, regions, ClientOverrides())
    os.close(regions)
    if is_early:
        successor.request_reload()
    go_on.touch()
    async with asyncio.timeout(PATIENCE_S):
        assert await successor.is_ready(), "the signal has ended it"
        if not is_early:
            successor.request_reload()
        assert await asyncio.to_thread(successor._popen.wait, PATIENCE_S) == READS_AGAIN
    successor.go()


@pytest.mark.parametrize(
    ("started", "again"),
    [
        (["/new/bin/python", "/link/bin/xlaserve", "serve"], ["/link/bin/xlaserve", "serve"]),
        (["python", "-m", "xlaserve", "serve"], ["python", "-m", "xlaserve", "serve"]),
        (["python", "script.py", "serve"], ["python", "script.py", "serve"]),
    ],
)
def test_a_program_is_started_again_as_it_is_installed_by_now(started: list[str], again: list[str]) -> None:
    assert command(started, lambda path: path == "/link/bin/xlaserve") == again
