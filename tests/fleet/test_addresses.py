from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from xlaserve.planning.virtual_time import VirtualTimeLoop
from xlaserve_fleet.addresses import (
    BUNDLE_S,
    DRAINING,
    LEASE_S,
    READY,
    RENEW_S,
    SETTLE_S,
    STILL_S,
    TELL_TIMEOUT_S,
    Addresses,
    Entry,
)
from xlaserve_fleet.name_service import EXPIRE_EVERY_S

WALL_S = 1_700_000_000.0


def entry(key: str, state: str = READY, **about: object) -> Entry:
    return Entry(key, f"10.0.0.3:{key}1", f"10.0.0.3:{key}2", state, about)


def told(key: str, state: str = READY) -> dict[str, str]:
    return {"id": key, "address": f"10.0.0.3:{key}1", "http": f"10.0.0.3:{key}2", "state": state}


async def listing(addresses: Addresses, after: int | None = None, wait_s: float = 0.0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await addresses.listing(after, wait_s))
    return found


async def passes(addresses: Addresses, duration_s: float) -> None:
    """Has the leases looked at as the name service does, for a time."""
    for _ in range(round(duration_s / EXPIRE_EVERY_S)):
        await asyncio.sleep(EXPIRE_EVERY_S)
        addresses.expire()


@pytest.fixture
def addresses(virtual_time: VirtualTimeLoop) -> Addresses:
    return Addresses(virtual_time.time, lambda: WALL_S)


async def test_the_list_has_who_registered(addresses: Addresses) -> None:
    addresses.renew(entry("2"))
    addresses.renew(entry("1", DRAINING))
    assert (await listing(addresses))["servers"] == [told("1", DRAINING), told("2")]
    addresses.remove("1")
    addresses.remove("unknown")
    assert (await listing(addresses))["servers"] == [told("2")]


async def test_each_change_that_clients_see_is_a_generation(addresses: Addresses) -> None:
    first = addresses.generation
    addresses.renew(entry("1"))
    addresses.renew(entry("1", wait_s=0.5))
    assert addresses.generation == first + 1
    await asyncio.sleep(BUNDLE_S)
    addresses.renew(entry("1", DRAINING))
    await asyncio.sleep(BUNDLE_S)
    addresses.remove("1")
    addresses.remove("1")
    await asyncio.sleep(BUNDLE_S)
    assert addresses.generation == first + 3
    assert addresses.entries == []


async def test_changes_are_told_in_bundles_the_first_at_once(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    generation = (await listing(addresses))["generation"]
    at = virtual_time.time()
    told_at: list[float] = []

    async def follow(after: int) -> dict[str, Any]:
        while len((found := await listing(addresses, after, 20))["servers"]) < 100:
            told_at.append(virtual_time.time() - at)
            after = found["generation"]
        return found

    following = [asyncio.create_task(follow(generation)) for _ in range(10)]
    for key in range(100):
        await asyncio.sleep(0.005)
        addresses.renew(entry(str(key)))
    for found in await asyncio.gather(*following):
        assert found["generation"] == generation + 3
    assert virtual_time.time() - at == pytest.approx(0.005 + 2 * BUNDLE_S)
    assert told_at == pytest.approx([0.005] * 10 + [0.005 + BUNDLE_S] * 10)


async def test_a_list_is_encoded_once_for_all_who_ask(addresses: Addresses) -> None:
    addresses.renew(entry("1"))
    one, other = await asyncio.gather(addresses.listing(), addresses.listing())
    assert one is other


async def test_a_poll_with_the_last_generation_waits_for_the_next(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    seen = await listing(addresses)
    polling = asyncio.create_task(listing(addresses, seen["generation"], 20))
    await asyncio.sleep(5)
    assert not polling.done()
    addresses.renew(entry("1"))
    at = virtual_time.time()
    assert await polling == {"servers": [told("1")], "generation": seen["generation"] + 1}
    assert virtual_time.time() == at


async def test_a_poll_ends_with_the_same_list_when_its_time_is_over(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    seen = await listing(addresses)
    at = virtual_time.time()
    assert await listing(addresses, seen["generation"], 20) == seen
    assert virtual_time.time() - at == pytest.approx(20)


async def test_a_poll_after_another_generation_is_answered_at_once(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    seen = await listing(addresses)
    at = virtual_time.time()
    for other in (seen["generation"] - 1, seen["generation"] + 1):
        assert await listing(addresses, other, 20) == seen
    assert virtual_time.time() == at


async def test_who_does_not_renew_goes(addresses: Addresses, virtual_time: VirtualTimeLoop) -> None:
    addresses.renew(entry("1"))
    addresses.renew(entry("2"))
    await passes(addresses, LEASE_S - 1)
    addresses.renew(entry("2"))
    assert [one.id for one in addresses.entries] == ["1", "2"]
    await passes(addresses, 2)
    assert [one.id for one in addresses.entries] == ["2"]


async def test_nobody_goes_because_the_name_service_stood_still(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    addresses.renew(entry("1"))
    addresses.renew(entry("2"))
    await passes(addresses, 1)
    await asyncio.sleep(LEASE_S + STILL_S)
    addresses.expire()
    await passes(addresses, LEASE_S - 1)
    assert [one.id for one in addresses.entries] == ["1", "2"]
    addresses.renew(entry("2"))
    await passes(addresses, 2)
    assert [one.id for one in addresses.entries] == ["2"]


def test_a_server_whose_renewal_hangs_registers_before_the_first_list() -> None:
    assert SETTLE_S > RENEW_S + TELL_TIMEOUT_S


async def test_a_list_is_not_told_before_every_server_had_time_to_renew(
    addresses: Addresses, virtual_time: VirtualTimeLoop
) -> None:
    started_at = virtual_time.time()
    asking = asyncio.create_task(listing(addresses))
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
