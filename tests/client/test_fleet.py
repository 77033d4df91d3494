"""Which server of a fleet takes the next call; no sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import grpc
import pytest
from tests.fakes import Clock

from xlaserve_client.errors import Unavailable
from xlaserve_client.fleet import CALLS_PER_HEDGE, FIRST_BAN_S, MAX_BAN_S, MAX_HEDGES_SAVED, Fleet, Server
from xlaserve_client.name_service import Listed, Listing, NameService

OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Channels:
    """Opens channels, which are the names of servers, and remembers which are open."""

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()

    def make(self, address: str) -> str:
        self.open[address] += 1
        return address

    def end(self, channel: str) -> None:
        self.open[channel] -= 1
        self.open += Counter()  # drops what is not positive
        assert self.open[channel] >= 0


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def channels() -> Channels:
    return Channels()


@pytest.fixture
def fleet(clock: Clock, channels: Channels) -> Fleet[str]:
    return Fleet(NameService("head", 7000), channels.make, channels.end, clock=clock)


def listing(ready: str, draining: str = "", generation: int = 1) -> Listing:
    """Lists servers, each named by a letter."""
    return Listing(generation, tuple(Listed(name, name, name in ready) for name in ready + draining))


def taken(fleet: Fleet[str], count: int) -> list[Server[str]]:
    return [fleet.take() for _ in range(count)]


def taken_until(fleet: Fleet[str], address: str) -> Server[str]:
    """Takes servers until it is that one; the others answer."""
    while (server := fleet.take()).address != address:
        fleet.release(server, OK)
    return server


def names(servers: Sequence[Server[str]]) -> str:
    return "".join(server.address for server in servers)


def test_servers_with_as_many_calls_take_turns(fleet: Fleet[str]) -> None:
    fleet.update(listing("abc"))
    chosen = []
    for _ in range(6):
        chosen.append(fleet.take())
        fleet.release(chosen[-1], OK)
    assert names(chosen) == "abcabc"
    assert names(taken(fleet, 6)) == "abcabc"


def test_the_server_with_the_fewest_outstanding_calls_is_next(fleet: Fleet[str]) -> None:
    fleet.update(listing("abc"))
    first = taken(fleet, 9)
    for server in first:
        if server.address == "b":
            fleet.release(server, OK)
    assert names(taken(fleet, 3)) == "bbb"
    assert sorted(names(taken(fleet, 3))) == ["a", "b", "c"]


def test_a_draining_server_gets_no_calls_and_then_its_channel_is_closed(fleet: Fleet[str], channels: Channels) -> None:
    fleet.update(listing("ab"))
    a, b = taken(fleet, 2)
    fleet.release(b, OK)
    fleet.update(listing("b", draining="a"))
    assert names(taken(fleet, 3)) == "bbb"
    assert channels.open == Counter("ab")
    fleet.release(a, OK)
    assert channels.open == Counter("b")


def test_a_server_that_is_gone_and_idle_loses_its_channel_at_once(fleet: Fleet[str], channels: Channels) -> None:
    fleet.update(listing("ab"))
    for server in taken(fleet, 2):
        fleet.release(server, OK)
    fleet.update(listing("b"))
    assert channels.open == Counter("b")


def test_a_channel_is_opened_for_the_first_call_only(fleet: Fleet[str], channels: Channels) -> None:
    fleet.update(listing("abcdefgh"))
    assert not channels.open
    fleet.release(fleet.take(), OK)
    assert channels.open == Counter("a")


def test_a_server_that_stays_listed_keeps_its_channel_and_its_calls(fleet: Fleet[str], channels: Channels) -> None:
    fleet.update(listing("ab"))
    taken(fleet, 1)
    for generation in range(2, 1000):
        fleet.update(listing("a" + "bcdef"[generation % 5], generation=generation))
        server = fleet.take()
        assert server.address != "a"
        fleet.release(server, OK)
    assert channels.open["a"] == 1
    assert channels.open.total() <= 2


def test_another_server_at_the_same_address_has_a_channel_of_its_own(fleet: Fleet[str], channels: Channels) -> None:
    fleet.update(Listing(1, (Listed("h:1", "old", True),)))
    old = fleet.take()
    fleet.release(old, UNAVAILABLE)
    fleet.update(Listing(2, (Listed("h:1", "new", True), Listed("h:1", "old", False))))
    new = fleet.take()
    assert (new is not old, new.failures, channels.open.total()) == (True, 0, 1)


def test_a_server_that_was_unavailable_is_left_out_for_a_growing_time(fleet: Fleet[str], clock: Clock) -> None:
    fleet.update(listing("ab"))
    bans_s = []
    for _ in range(8):
        fleet.release(taken_until(fleet, "a"), UNAVAILABLE)
        began = clock.now
        while (server := fleet.take()).address == "b":
            fleet.release(server, OK)
            clock.now += FIRST_BAN_S / 4
        fleet.release(server, grpc.StatusCode.CANCELLED)
        bans_s.append(clock.now - began)
    expected = [min(FIRST_BAN_S * 2**n, MAX_BAN_S) for n in range(8)]
    assert bans_s == pytest.approx(expected, abs=FIRST_BAN_S / 2)


def test_calls_that_fail_together_are_one_failure(fleet: Fleet[str], clock: Clock) -> None:
    fleet.update(listing("a"))
    for server in taken(fleet, 50):
        fleet.release(server, UNAVAILABLE)
    assert (server.failures, server.banned_until) == (1, clock.now + FIRST_BAN_S)


def test_an_excluded_server_is_tried_with_one_call_until_it_answers(fleet: Fleet[str], clock: Clock) -> None:
    fleet.update(listing("ab"))
    a, _ = taken(fleet, 2)
    fleet.release(a, UNAVAILABLE)
    clock.now += FIRST_BAN_S
    assert names(taken(fleet, 10)) == "a" + "b" * 9
    fleet.release(a, OK)
    assert names(taken(fleet, 3)) == "aaa"


@pytest.mark.parametrize("status", [grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_what_the_caller_ended_says_nothing_of_a_server(fleet: Fleet[str], status: grpc.StatusCode) -> None:
    fleet.update(listing("a"))
    for before in (OK, UNAVAILABLE):
        fleet.release(fleet.take(), before)
        server = fleet.take()
        failures = server.failures
        fleet.release(server, status)
        assert server.failures == failures == int(before is UNAVAILABLE)


def test_where_all_are_left_out_they_are_chosen_all_the_same(fleet: Fleet[str]) -> None:
    fleet.update(listing("abc"))
    for server in taken(fleet, 3):
        fleet.release(server, UNAVAILABLE)
    assert sorted(names(taken(fleet, 3))) == ["a", "b", "c"]


def test_a_call_goes_to_a_server_that_it_has_not_been_to(fleet: Fleet[str]) -> None:
    fleet.update(listing("ab"))
    a, b, *_ = taken(fleet, 5)
    assert fleet.take({b}).address == "a"
    assert fleet.take({a}).address == "b"
    assert fleet.take({a, b}).address in "ab"
    fleet.release(b, UNAVAILABLE)
    assert fleet.take({a}).address == "a"  # it answered then, and b did not


def test_second_copies_are_a_small_share_of_calls(fleet: Fleet[str]) -> None:
    fleet.update(listing("ab"))
    copies = 0
    for _ in range(1000):
        server = fleet.take()
        spare = fleet.take_spare({server})
        if spare is not None:
            assert spare is not server
            copies += 1
            fleet.release(spare, OK)
        fleet.release(server, OK)
    assert copies == 1000 // CALLS_PER_HEDGE + 1
    for _ in range(10_000):
        fleet.release(fleet.take(), OK)
    busy = fleet.take()
    assert sum(fleet.take_spare({busy}) is not None for _ in range(1000)) == MAX_HEDGES_SAVED


def test_a_copy_goes_neither_to_the_same_server_nor_to_an_excluded_one(fleet: Fleet[str]) -> None:
    fleet.update(listing("a"))
    assert fleet.take_spare({fleet.take()}) is None
    fleet.update(listing("ab"))
    a, b = (fleet.take(), fleet.take())[::-1]
    fleet.release(b, UNAVAILABLE)
    assert fleet.take_spare({a}) is None


def test_the_last_list_holds_while_the_name_service_is_away(fleet: Fleet[str], clock: Clock) -> None:
    fleet.update(listing("a"))
    fleet.service_failed("Connection refused")
    clock.now += 3600
    assert fleet.take().address == "a"


@pytest.mark.parametrize("without", [listing(""), listing("", "ab")], ids=["empty", "all draining"])
def test_a_list_without_a_ready_server_takes_none_away(fleet: Fleet[str], without: Listing) -> None:
    fleet.update(listing("ab"))
    fleet.update(without)
    assert names(taken(fleet, 2)) == "ab"
    fleet.update(listing("c"))
    assert names(taken(fleet, 2)) == "cc"


@pytest.mark.parametrize(
    ("heard", "problem", "said"),
    [
        (None, "", "has not answered yet"),
        (None, "Connection refused", "could not be asked 1.5 s ago: Connection refused"),
        (listing("", "ab"), "", "listed 2 servers, none of them ready, 4.0 s ago"),
        (listing(""), "no", "listed 0 servers, none of them ready, 4.0 s ago, and could not be asked 1.5 s ago: no"),
    ],
    ids=["not yet", "never", "draining", "lost"],
)
def test_where_no_server_is_ready_it_is_said_what_was_asked_and_when(
    fleet: Fleet[str], clock: Clock, heard: Listing | None, problem: str, said: str
) -> None:
    if heard is not None:
        fleet.update(heard)
    clock.now += 2.5
    if problem:
        fleet.service_failed(problem)
    clock.now += 1.5
    with pytest.raises(Unavailable) as caught:
        fleet.take()
    assert str(caught.value) == (
        f"fleet://head:7000: UNAVAILABLE: no server is ready: http://head:7000/v1/servers {said}"
    )


def test_closing_closes_every_channel_with_calls_or_without(fleet: Fleet[str], channels: Channels) -> None:
    fleet.update(listing("abc"))
    a, b, c = taken(fleet, 3)
    fleet.release(b, OK)
    fleet.update(listing("ab", draining="c"))
    fleet.close()
    assert not channels.open
    fleet.release(a, grpc.StatusCode.CANCELLED)
    fleet.release(c, grpc.StatusCode.CANCELLED)
    fleet.update(listing("abc"))
    assert not channels.open
    with pytest.raises(ValueError, match="closed"):
        fleet.take()
