from __future__ import annotations

import asyncio

import pytest

from xlaserve.fleet.addresses import DRAINING, LEASE_S, READY, SETTLE_S, Addresses, Entry
from xlaserve.oracle.virtual_time import VirtualTimeLoop

WALL_S = 1_700_000_000.0


def entry(key: str, state: str = READY, **about: object) -> Entry:
    return Entry(key, f"10.0.0.3:{key}1", f"10.0.0.3:{key}2", state, about)


def told(key: str, state: str = READY) -> dict[str, str]:
    return {"id": key, "address": f"10.0.0.3:{key}1", "http": f"10.0.0.3:{key}2", "state": state}


@pytest.fixture
def addresses(virtual_time: VirtualTimeLoop) -> Addresses:
    return Addresses(virtual_time.time, lambda: WALL_S)


async def test_the_list_has_who_registered(addresses: Addresses) -> None:
    addresses.renew(entry("2"))
    addresses.renew(entry("1", DRAINING))
    assert (await addresses.listing())["servers"] == [told("1", DRAINING), told("2")]
    addresses.remove("1")
    addresses.remove("unknown")
    assert (await addresses.listing())["servers"] == [told("2")]


async def test_each_change_that_clients_see_is_a_generation(addresses: Addresses) -> None:
    first = addresses.generation
    addresses.renew(entry("1"))
    addresses.renew(entry("1", wait_s=0.5))
    assert addresses.generation == first + 1
    addresses.renew(entry("1", DRAINING))
    addresses.remove("1")
    addresses.remove("1")
    assert addresses.generation == first + 3
    assert addresses.entries == []


async def test_a_poll_with_the_last_generation_waits_for_the_next(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    seen = await addresses.listing()
    polling = asyncio.create_task(addresses.listing(seen["generation"], 20))
    await asyncio.sleep(5)
    assert not polling.done()
    addresses.renew(entry("1"))
    at = virtual_time.time()
    assert await polling == {"servers": [told("1")], "generation": seen["generation"] + 1}
    assert virtual_time.time() == at


async def test_a_poll_ends_with_the_same_list_when_its_time_is_over(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    seen = await addresses.listing()
    at = virtual_time.time()
    assert await addresses.listing(seen["generation"], 20) == seen
    assert virtual_time.time() - at == pytest.approx(20)


async def test_a_poll_after_another_generation_is_answered_at_once(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    seen = await addresses.listing()
    at = virtual_time.time()
    for other in (seen["generation"] - 1, seen["generation"] + 1):
        assert await addresses.listing(other, 20) == seen
    assert virtual_time.time() == at


async def test_who_does_not_renew_goes(addresses: Addresses, virtual_time: VirtualTimeLoop) -> None:
    addresses.renew(entry("1"))
    addresses.renew(entry("2"))
    await asyncio.sleep(LEASE_S - 1)
    addresses.renew(entry("2"))
    addresses.expire()
    assert [one.id for one in addresses.entries] == ["1", "2"]
    await asyncio.sleep(2)
    addresses.expire()
    assert [one.id for one in addresses.entries] == ["2"]


async def test_a_list_is_not_told_before_every_server_had_time_to_renew(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    started_at = virtual_time.time()
    asking = asyncio.create_task(addresses.listing())
    addresses.renew(entry("1"))
    await asyncio.sleep(SETTLE_S - 1)
    addresses.renew(entry("2"))
    assert [one["id"] for one in (await asking)["servers"]] == ["1", "2"]
    assert virtual_time.time() - started_at == pytest.approx(SETTLE_S)


async def test_generations_grow_over_a_restart(virtual_time: VirtualTimeLoop) -> None:
    before = Addresses(virtual_time.time, lambda: WALL_S)
    for key in range(100):
        before.renew(entry(str(key)))
    after = Addresses(virtual_time.time, lambda: WALL_S + 1)
    assert after.generation > before.generation
