from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.warmup.ledger import Entry, Ledger


def entry(model: str, batch: int = 1) -> Entry:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Entry(model, "1", Mode.XLA, Bucket(batch, 2, 2), 0.25, 1.5, Cost(0.01, 0.02), at)


def test_entries_come_in_the_order_of_compilation() -> None:
    ledger = Ledger()
    entries = [entry("digits", batch) for batch in (1, 4, 2)]
    for each in entries:
        ledger.record(each)
    assert list(ledger) == entries
    assert len(ledger) == 3


def test_reading_is_not_disturbed_by_what_is_recorded_meanwhile() -> None:
    ledger = Ledger()
    ledger.record(entry("digits"))
    for each in ledger:
        ledger.record(each)
    assert len(ledger) == 2


def test_who_listens_is_told_on_the_thread_that_records() -> None:
    heard: list[tuple[Entry, threading.Thread]] = []
    ledger = Ledger(lambda each: heard.append((each, threading.current_thread())))
    ledger.record(entry("digits"))
    assert heard == [(entry("digits"), threading.current_thread())]


def test_several_threads_may_record() -> None:
    ledger = Ledger()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: ledger.record(entry(str(number % 4))), range(400)))
    assert Counter(each.model for each in ledger) == {str(number): 100 for number in range(4)}
