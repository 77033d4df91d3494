"""Another server that is to take this one's place."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from tests.server.processes.server_world import FAST, PATIENCE_S, READY, GrowingWorld, World

from xlaserve.admission.shared_counts import Upgrade
from xlaserve.commands.upgrade import POLL_S
from xlaserve.processes import several_processes, upgrades
from xlaserve.processes.engines import ENGINE
from xlaserve.processes.handover import Predecessor
from xlaserve.processes.supervision import linux
from xlaserve.processes.upgrades import UPGRADING


async def test_fronts_wait_for_a_starting_server_and_are_added_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fronts that listen after those of the other server would be given its connections."""
    world = GrowingWorld(monkeypatch)
    world.start({**READY, "images_per_s": 300.0})
    fails = asyncio.Event()

    async def is_ready() -> bool:
        await fails.wait()
        return False

    other = SimpleNamespace(pid=7, is_ready=is_ready, end=AsyncMock(return_value="ended with status 1"))
    monkeypatch.setattr(several_processes, "Successor", lambda *_: other)
    world.server._metrics_endpoint, world.server._regions = None, 0
    world.server._upgrades.begin()
    upgrading = asyncio.create_task(world.server._upgrades.run())
    await asyncio.sleep(0)
    world.say(ENGINE, FAST)
    assert not world.added
    fails.set()
    await asyncio.wait_for(upgrading, PATIENCE_S)
    assert [role.name for role in world.added] == ["front 2", "front 3", "front 4"]
    assert world.server._usage.upgrade is Upgrade.NONE
    world.server._service_manager.close()


@pytest.mark.parametrize("fails", ["start", "is_ready"])
async def test_an_error_during_an_upgrade_leaves_a_server_that_can_be_upgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    world = GrowingWorld(monkeypatch)
    world.server._metrics_endpoint, world.server._regions = None, 0
    end = AsyncMock(return_value="ended with status 0")
    other = SimpleNamespace(pid=7, is_ready=AsyncMock(side_effect=KeyError("unforeseen")), end=end)
    start = Mock(return_value=other) if fails == "is_ready" else Mock(side_effect=KeyError("unforeseen"))
    monkeypatch.setattr(several_processes, "Successor", start)
    named = psutil.Process().name()
    world.server._was_ready = True
    for tried in (1, 2):
        world.server._upgrade()
        await asyncio.wait_for(asyncio.gather(*world.server._tasks), PATIENCE_S)
        assert world.server._usage.upgrade is Upgrade.NONE
        assert (start.call_count, end.call_count) == (tried, tried if fails == "is_ready" else 0)
        assert psutil.Process().name() == named
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["'unforeseen'"] * 2
    world.server._service_manager.close()


async def test_an_upgrade_that_fails_at_once_can_be_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "SHOWN_S", shown_s := 4 * POLL_S)
    world = GrowingWorld(monkeypatch)
    monkeypatch.setattr(world.server._upgrades, "_start", Mock(side_effect=OSError("no such file")))
    world.server._was_ready = True
    before = psutil.Process().name()
    began = time.monotonic()
    world.server._upgrade()
    await asyncio.sleep(POLL_S)
    assert psutil.Process().name() == UPGRADING
    await asyncio.wait_for(asyncio.gather(*world.server._tasks), PATIENCE_S)
    assert time.monotonic() - began >= shown_s
    assert psutil.Process().name() == before
    world.server._service_manager.close()


async def test_an_error_on_leaving_keeps_no_server_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    monkeypatch.setattr(linux, "set_title", Mock(side_effect=OSError("no /proc")))
    drain, successor = Mock(), Mock()
    world.server._metrics_endpoint, world.server._supervisor = None, cast(Any, SimpleNamespace(drain=drain))
    with pytest.raises(OSError, match="no /proc"):
        world.server._leave(successor)
    drain.assert_called_once_with()
    successor.go.assert_called_once_with()
    world.server._service_manager.close()


def test_a_server_that_stops_has_no_change_of_models_wait_for_an_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrowingWorld(monkeypatch)
    world.server._usage.upgrade = Upgrade.STARTING
    world.server.stopping()
    assert world.server._usage.upgrade is Upgrade.NONE
    world.server._service_manager.close()


async def test_servers_before_find_the_one_that_takes_their_place(tmp_path: Path) -> None:
    server = World().server
    server._changes_socket = tmp_path / "changes"
    (tmp_path / "before").mkdir()
    address, gone = tmp_path / "before" / "successor", tmp_path / "gone" / "successor"
    address.symlink_to(tmp_path / "a server whose place this one takes")
    before = SimpleNamespace(leaves=AsyncMock(), successor_addresses=[gone, address])
    await server._take_over(cast(Predecessor, before), {})
    assert address.readlink() == tmp_path / "changes"
    assert [*(tmp_path / "before").iterdir()] == [address]
    server._service_manager.close()
