"""Which connection to a server takes the next call; no sockets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from tests.fakes import Clock

from xlaserve_client.paths import FRONT, MAX_PAUSE_S, TRIES_PER_FRONT, Path, Paths

Metadata = tuple[tuple[str, str], ...]


class Connection:
    def __init__(self, front: int, is_own: bool) -> None:
        self.front = front
        self.is_own = is_own
        self.calls = 0


class Server:
    """A server of several processes, of which each connection meets the one that `draw` says."""

    def __init__(self, fronts: int, draw: Callable[[list[int]], int]) -> None:
        self.fronts = fronts
        self.alive = [*range(1, fronts + 1)]
        self.clock = Clock(100.0)
        self.open: list[Connection] = []
        self.opened = 0
        self._draw = draw
        self.paths: Paths[Connection] = Paths(self._open, self.open.remove, self.clock)

    def _open(self, is_own: bool) -> Connection:
        self.opened += 1
        self.open.append(Connection(self._draw(self.alive), is_own))
        return self.open[-1]

    def after(self, connection: Connection) -> Metadata:
        """What an answer carries."""
        other = (("x-request-id", "1"),)
        return (*other, (FRONT, f"{connection.front}/{self.fronts}")) if self.fronts > 1 else other

    def answer(self, path: Path[Connection]) -> None:
        path.channel.calls += 1
        self.paths.release(path, self.after(path.channel))

    def call(self, at_once: int, times: int = 1) -> None:
        """Has so many calls under way, again and again."""
        for _ in range(times):
            for path in [self.paths.take() for _ in range(at_once)]:
                self.answer(path)

    def kill(self, front: int) -> None:
        """Its connections are to others then."""
        self.alive.remove(front)
        for connection in self.open:
            if connection.front == front:
                connection.front = self._draw(self.alive)

    @property
    def met(self) -> list[int]:
        return sorted(connection.front for connection in self.open)


@pytest.fixture
def chance() -> random.Random:
    return random.Random(7)


def test_a_server_of_one_process_has_one_connection(chance: random.Random) -> None:
    server = Server(1, chance.choice)
    server.call(32, times=10)
    assert (server.opened, server.open[0].is_own) == (1, False)


def test_calls_one_after_another_need_no_other_connection(chance: random.Random) -> None:
    server = Server(2, chance.choice)
    server.call(1, times=100)
    assert server.opened == 1


@pytest.mark.parametrize("fronts", [2, 3, 8])
def test_calls_at_once_come_to_have_a_connection_to_each_process(chance: random.Random, fronts: int) -> None:
    server = Server(fronts, chance.choice)
    server.call(32, times=50)
    server.clock.now += 10
    server.call(32, times=50)
    assert server.met == [*range(1, fronts + 1)]
    assert [connection.is_own for connection in server.open].count(False) <= 1
    before = Counter({connection.front: connection.calls for connection in server.open})
    server.call(24, times=10)
    after = Counter({connection.front: connection.calls for connection in server.open})
    assert {*(after - before).values()} == {240 // fronts}


def test_a_retired_connection_answers_its_calls_before_it_closes() -> None:
    draws = iter([1, 1, 2])
    server = Server(2, lambda alive: next(draws))
    server.call(1)
    first, second, third = (server.paths.take() for _ in range(3))
    assert server.opened == 2
    server.answer(second)
    assert third.channel is first.channel or third.channel is second.channel
    busy = [server.paths.take() for _ in range(2)]
    server.answer(first)
    server.answer(third)
    for path in busy:
        server.answer(path)
    assert server.met == [1, 2]


def test_no_call_goes_to_a_connection_that_is_given_up() -> None:
    draws = iter([1, 1, 2])
    server = Server(2, lambda alive: next(draws))
    server.call(1)
    first, second, third, fourth = (server.paths.take() for _ in range(4))
    assert fourth.channel is second.channel
    server.answer(second)
    assert second.is_leaving
    assert second.channel in server.open
    later = [server.paths.take() for _ in range(8)]
    assert second.channel not in [path.channel for path in later]
    server.answer(fourth)
    assert second.channel not in server.open
    for path in (first, third, *later):
        server.answer(path)


def test_tries_are_bounded_and_come_again_later() -> None:
    server = Server(2, lambda alive: 1)
    server.call(8, times=100)
    assert server.opened == 1 + TRIES_PER_FRONT * 2
    for _ in range(10):
        opened = server.opened
        server.clock.now += 2 * MAX_PAUSE_S
        server.call(8, times=100)
        assert server.opened == opened + TRIES_PER_FRONT * 2
    assert server.met == [1]


def test_processes_that_are_added_are_met_once_answers_tell_of_them(chance: random.Random) -> None:
    server = Server(1, chance.choice)
    server.call(32, times=5)
    assert server.opened == 1
    server.fronts, server.alive = 3, [1, 2, 3]
    server.call(32, times=50)
    assert server.met == [1, 2, 3]


def test_it_follows_processes_that_are_replaced(chance: random.Random) -> None:
    server = Server(3, chance.choice)
    server.call(32, times=50)
    assert server.met == [1, 2, 3]
    server.kill(2)
    server.call(32, times=50)
    assert server.met == [1, 3]
    server.alive.append(2)
    server.clock.now += MAX_PAUSE_S
    server.call(32, times=50)
    assert server.met == [1, 2, 3]


def test_a_proxy_that_spreads_the_calls_of_a_connection_is_left_to_it(chance: random.Random) -> None:
    server = Server(4, chance.choice)
    for _ in range(1000):
        under_way = [server.paths.take() for _ in range(8)]
        for path in under_way:
            path.channel.front = chance.choice(server.alive)
            server.answer(path)
        server.clock.now += 0.001
    assert server.opened <= 1 + TRIES_PER_FRONT


@pytest.mark.parametrize("after", [None, (), ((FRONT, "two of three"),), ((FRONT, "1"),), ((FRONT, b"1/2"),)])
def test_an_answer_that_does_not_say_where_it_comes_from_changes_nothing(after: Metadata | None) -> None:
    server = Server(1, lambda alive: 1)
    for _ in range(5):
        for path in [server.paths.take() for _ in range(4)]:
            server.paths.release(path, after)
    assert server.opened == 1


def test_closing_closes_all_once(chance: random.Random) -> None:
    server = Server(3, chance.choice)
    server.call(32, times=50)
    under_way = server.paths.take()
    server.paths.close()
    assert server.open == []
    server.paths.close()
    server.answer(under_way)
