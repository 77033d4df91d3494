"""How many calls there may be at a time, and how long one may wait for its client.

HTTP/2 lets a client send the headers of a call and no message, or leave an answer unread, for any number of calls,
while it answers every ping of keepalive. Such calls are ended after a time limit, and earlier where new ones find no
place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextvars import Context
from itertools import islice
from typing import Any, Final, NamedTuple, Self

from xlaserve.admission.shared_counts import Account, Kind, SharedCounts
from xlaserve.config import Settings
from xlaserve.errors import QueueFull

STALL_CHECK_S: Final = 1.0
"""How often the time limit is checked."""
ROOM_SHARE: Final = 16
"""Transfers that are ended together are at most all places divided by this: to reset them takes as long as one."""
CROWDED_TRANSFER_S: Final = 5.0
"""How long a message or an answer may take where there is no room for further calls."""
MAX_PROBES: Final = 256
"""Calls of probes at a time."""
CROWDED_PROBE_S: Final = 0.0
"""CROWDED_TRANSFER_S for probes: each is tiny, so that the oldest is the likeliest to be held."""

CallTask = asyncio.Task[Any]
"""The task that answers a call."""
End = Callable[[Collection[CallTask], str], None]
"""Ends calls of one protocol soon, for a reason that their clients are told where that is possible."""

log = logging.getLogger(__name__)


class CallAdmission:
    """Admits `max_calls` calls at a time.

    A call that transfers a message or an answer for longer than `max_transfer_s` is ended. Where there is no place for
    a new call, those that have transferred for longer than `crowded_transfer_s` are ended, some at a time. If there are
    none, the call that has been idle for longest is ended, provided that this was longer than `crowded_transfer_s`.
    `limit` names `max_calls` in refusals. Calls whose address is told are bounded by `max_per_address` as well. With
    several fronts both bounds hold for them together, by their `usage`: a front that finds no place for a call has the
    others look within STALL_CHECK_S whether they can end some of theirs.
    """

    def __init__(
        self,
        max_calls: int,
        max_transfer_s: float,
        crowded_transfer_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        limit: str = "max_concurrent_calls",
        max_per_address: int | None = None,
        usage: SharedCounts | None = None,
    ) -> None:
        usage = usage or SharedCounts()
        self._admitted = usage.amount(Kind.CALLS)
        self._refused = usage.amount(Kind.CALLS_REFUSED)
        self._refused_elsewhere = self._refused.elsewhere
        """Up to the last look at stalled calls."""
        self._accounts = usage.others
        self._max_calls = max_calls
        self._max_transfer_s = max_transfer_s
        self._crowded_transfer_s = min(crowded_transfer_s, max_transfer_s)
        self._clock = clock
        self._limit = limit
        self._max_per_address = max_per_address
        self._calls: dict[CallTask, End] = {}
        self._addresses: dict[CallTask, Account] = {}
        # Both in the order of their times.
        self._transfers: dict[CallTask, float] = {}
        self._idle: dict[CallTask, float] = {}
        self._late: set[CallTask] = set()
        """Calls that have begun since `drain`."""
        self._is_draining = False
        self._ended: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, end: End, *, has_begun: bool = False) -> None:
        """Admits the current task's call, whose message is to arrive, and which `end` can end. Raises QueueFull.

        `has_begun` says of a call that a part of it came before `drain`.
        """
        if self._admitted.total >= self._max_calls:
            self._make_room()
            if self._admitted.total >= self._max_calls:
                self._refused.own += 1
                raise QueueFull(f"{self._limit}: expected at most {self._max_calls} calls at a time, got one more")
        call = current_call()
        self._calls[call] = end
        self._admitted.own = len(self._calls)
        self._transfers[call] = self._clock()
        call.add_done_callback(self._leave)
        if self._is_draining and not has_begun:
            self._late.add(call)
        if self._timer is None:
            self._watch()

    def drain(self) -> None:
        """Tells calls that begin from now on from those that have begun."""
        self._is_draining = True

    def has_begun(self, call: CallTask) -> bool:
        """Whether a call under way began before `drain`."""
        return call in self._calls and call not in self._late

    @property
    def has_transfers(self) -> bool:
        """Whether the message of a call that began before `drain` arrives, or its answer leaves."""
        return any(call not in self._late for call in self._transfers)

    @property
    def bounds_addresses(self) -> bool:
        """Whether it has to be told the addresses of calls."""
        return self._max_per_address is not None

    def locate(self, address: str) -> None:
        """Counts the current task's call for an address, once. Raises QueueFull."""
        call, most = current_call(), self._max_per_address
        if most is None or call in self._addresses or call not in self._calls:
            return
        account = self._accounts.look(f"calls from {address}")
        if account.under_way >= most:
            raise QueueFull(f"max_calls_per_address: expected at most {most} calls at a time, got one more")
        account.begin(1, 0.0, self._clock())
        self._addresses[call] = account

    def work(self, call: CallTask) -> None:
        """Notes that the server works on the call, and does not wait for its client."""
        self._transfers.pop(call, None)
        self._idle.pop(call, None)

    def transfer(self, call: CallTask) -> None:
        """Notes that an answer is on its way to the client."""
        self._wait(self._transfers, call)

    def idle(self, call: CallTask) -> None:
        """Notes that nothing needs to be done until the client or the server says more."""
        self._wait(self._idle, call)

    def _wait(self, times: dict[CallTask, float], call: CallTask) -> None:
        self.work(call)
        if call in self._calls:  # else it has been ended, and is about to leave
            times[call] = self._clock()

    def _make_room(self) -> None:
        until = self._clock() - self._crowded_transfer_s
        stalled = [*islice(_since(self._transfers, until), max(1, self._max_calls // ROOM_SHARE))]
        stalled = stalled or [*islice(_since(self._idle, until), 1)]
        self._end_all(stalled, f"{self._limit}: gave way to a new call, as there were {self._max_calls}")

    def _end_stalled(self) -> None:
        stalled = [*_since(self._transfers, self._clock() - self._max_transfer_s)]
        self._end_all(stalled, f"max_transfer_s: expected each message and answer within {self._max_transfer_s:g} s")
        for reason, count in self._ended.items():
            log.warning("ended %d calls that waited for their clients: %s", count, reason)
        self._ended.clear()
        self._timer = None
        if (refused := self._refused.elsewhere) != self._refused_elsewhere:
            self._refused_elsewhere = refused
            if self._admitted.total >= self._max_calls:
                self._make_room()
        if self._calls:
            self._watch()

    def _watch(self) -> None:
        # Not in this call's context, as what is logged will not be about it.
        self._timer = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._end_stalled, context=Context())

    def _end_all(self, calls: Collection[CallTask], reason: str) -> None:
        ended: defaultdict[End, list[CallTask]] = defaultdict(list)
        for call in calls:
            self._ended[reason] += 1
            ended[self._calls[call]].append(call)
            self._leave(call)
        for end, of_protocol in ended.items():
            end(of_protocol, reason)

    def _leave(self, call: CallTask) -> None:
        self._calls.pop(call, None)
        self._late.discard(call)
        self._admitted.own = len(self._calls)
        if (account := self._addresses.pop(call, None)) is not None:
            account.end(1)
        self.work(call)


class Admissions(NamedTuple):
    """The admission of calls, by kind, for all protocols."""

    calls: CallAdmission
    probes: CallAdmission
    """Admits small calls by which others learn whether the server is well, however many other calls there are."""

    @classmethod
    def of(cls, settings: Settings, usage: SharedCounts | None = None) -> Self:
        """Returns what admits as many calls as `settings` allow. Each front has its own places for probes."""
        calls = CallAdmission(
            settings.max_concurrent_calls,
            settings.max_transfer_s,
            CROWDED_TRANSFER_S,
            max_per_address=settings.max_calls_per_address,
            usage=usage,
        )
        return cls(calls, CallAdmission(MAX_PROBES, settings.max_transfer_s, CROWDED_PROBE_S, limit="probes"))


def current_call() -> CallTask:
    """Returns the task that answers the call in whose method this is."""
    task = asyncio.current_task()
    assert task is not None
    return task


def _since(times: dict[CallTask, float], until: float) -> Iterator[CallTask]:
    for call, began in times.items():
        if began > until:
            return
        yield call
