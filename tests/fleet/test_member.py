"""A server and its entry, on fakes: who is told what, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from xlaserve.planning.virtual_time import VirtualTimeLoop
from xlaserve_fleet.addresses import LEASE_S, RENEW_S, TELL_TIMEOUT_S, Entry
from xlaserve_fleet.member import Member
from xlaserve_fleet.policy import BUSY, WAIT
from xlaserve_fleet.process import Found, Recovering, ServerFailed

DRAIN_S = 3.0


class FakeProcess:
    def __init__(self, said: list[str]) -> None:
        self.found = Found("10.0.0.3:1", "10.0.0.3:2", "10.0.0.3:3")
        self.pid: int | None = None
        self.has_ended = False
        self.hangs = False
        self.is_recovering = False
        self._said = said

    async def start(self) -> None:
        self.pid = 7
        self._said.append("started")

    async def check(self) -> None:
        if self.is_recovering:
            raise Recovering("the server is NOT_SERVING")
        if self.hangs:
            raise ServerFailed("the server does not answer")

    async def load(self) -> dict[str, float]:
        return {WAIT: 0.25, BUSY: 0.5}

    async def stop(self) -> None:
        await asyncio.sleep(DRAIN_S)
        self.has_ended = True
        self._said.append("stopped")


class FakeNames:
    def __init__(self, said: list[str]) -> None:
        self._said = said
        self.renewed_at: list[float] = []
        self.entry: Entry | None = None
        self.is_away = False

    async def renew(self, entry: Entry) -> None:
        if self.is_away:
            raise ConnectionError
        self.renewed_at.append(asyncio.get_running_loop().time())
        if self.entry is None or self.entry.state != entry.state:
            self._said.append(entry.state)
        self.entry = entry

    async def remove(self, key: str) -> None:
        assert key == "a"
        if self.is_away:
            await asyncio.Event().wait()
        self._said.append("removed")
        self.entry = None


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def process(said: list[str]) -> FakeProcess:
    return FakeProcess(said)


@pytest.fixture
def names(said: list[str]) -> FakeNames:
    return FakeNames(said)


@pytest.fixture
def member(virtual_time: VirtualTimeLoop, process: FakeProcess, names: FakeNames) -> Member:
    return Member("a", process, names, {"node": "n"})


async def test_a_server_is_listed_from_when_it_is_ready_until_it_has_drained(member: Member, said: list[str]) -> None:
    await member.start()
    await member.stop()
    assert said == ["started", "ready", "draining", "stopped", "removed"]


async def test_the_entry_says_where_the_server_is_and_what_it_does(member: Member, names: FakeNames) -> None:
    await member.start()
    await member.load()
    await asyncio.sleep(RENEW_S + 1)
    about = {"node": "n", "pid": 7, "metrics": "10.0.0.3:3", WAIT: 0.25, BUSY: 0.5}
    assert names.entry == Entry("a", "10.0.0.3:1", "10.0.0.3:2", "ready", about)
    await member.stop()


async def test_the_entry_is_renewed_well_before_its_lease_ends(member: Member, names: FakeNames) -> None:
    await member.start()
    await asyncio.sleep(60)
    gaps = [b - a for a, b in zip(names.renewed_at, names.renewed_at[1:], strict=False)]
    assert max(gaps) < LEASE_S / 2
    await member.stop()


async def test_a_server_that_ends_by_itself_leaves_the_list_at_once(
    member: Member, process: FakeProcess, said: list[str]
) -> None:
    await member.start()
    process.has_ended = True
    await asyncio.sleep(0.2)
    assert said[-1] == "removed"
    await member.stop()
    assert "draining" not in said


async def test_everything_goes_on_without_the_name_service(
    member: Member, names: FakeNames, said: list[str], virtual_time: VirtualTimeLoop
) -> None:
    names.is_away = True
    await member.start()
    await asyncio.sleep(10)
    assert said == ["started"]
    names.is_away = False
    await asyncio.sleep(RENEW_S + 1)
    assert said == ["started", "ready"]
    names.is_away = True
    at = virtual_time.time()
    await member.stop()
    assert said == ["started", "ready", "stopped"]
    assert virtual_time.time() - at <= DRAIN_S + TELL_TIMEOUT_S + 1


async def test_a_server_that_hangs_is_not_renewed_until_it_is_well(
    member: Member, process: FakeProcess, names: FakeNames
) -> None:
    await member.start()
    process.hangs = True
    with pytest.raises(ServerFailed):
        await member.check()
    renewals = len(names.renewed_at)
    await asyncio.sleep(LEASE_S)
    assert len(names.renewed_at) == renewals
    process.hangs = False
    await member.check()
    await asyncio.sleep(RENEW_S + 0.2)
    assert len(names.renewed_at) == renewals + 1
    await member.stop()


async def test_a_server_that_recovers_by_itself_is_not_listed_and_not_replaced(
    member: Member, process: FakeProcess, names: FakeNames
) -> None:
    await member.start()
    process.is_recovering = True
    await member.check()
    renewals = len(names.renewed_at)
    await asyncio.sleep(LEASE_S)
    assert len(names.renewed_at) == renewals
    process.is_recovering = False
    await member.check()
    await asyncio.sleep(RENEW_S + 0.2)
    assert len(names.renewed_at) == renewals + 1
    await member.stop()
