from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Outputs
from xlaserve.engine.warmup.ledger import Entry, Ledger


def run(images: Images) -> Outputs:
    return ()


def record(ledger: Ledger, batch: int = 1) -> None:
    made = Compilation(run, trace_s=0.25, compile_s=1.5, from_cache=True)
    warmed = ledger.record(Mode.XLA, Bucket(batch, 2, 2), made, Cost(0.01, 0.02), in_background=True)
    assert (warmed.executable, warmed.cost) == (run, Cost(0.01, 0.02))


def test_an_entry_is_of_a_program_that_is_ready_now() -> None:
    ledger = Ledger("digits", "3")
    record(ledger)
    (at,) = (each.at for each in ledger)
    assert datetime.now(UTC) - at < timedelta(minutes=1)
    assert list(ledger) == [
        Entry("digits", "3", Mode.XLA, Bucket(1, 2, 2), 0.25, 1.5, Cost(0.01, 0.02), at, True, True, None)
    ]


def test_entries_come_in_the_order_of_compilation() -> None:
    ledger = Ledger("digits", "1")
    for batch in (1, 4, 2):
        record(ledger, batch)
    assert [each.bucket.batch for each in ledger] == [1, 4, 2]
    assert len(ledger) == 3


def test_reading_is_not_disturbed_by_what_is_recorded_meanwhile() -> None:
    ledger = Ledger("digits", "1")
    record(ledger)
    for _ in ledger:
        record(ledger)
    assert len(ledger) == 2


def test_who_listens_is_told_on_the_thread_that_records() -> None:
    heard: list[tuple[Entry, threading.Thread]] = []
    ledger = Ledger("digits", "1", lambda each: heard.append((each, threading.current_thread())))
    record(ledger)
    assert heard == [(*ledger, threading.current_thread())]


def test_several_threads_may_record() -> None:
    ledger = Ledger("digits", "1")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: record(ledger, number % 4), range(400)))
    assert Counter(each.bucket.batch for each in ledger) == dict.fromkeys(range(4), 100)
