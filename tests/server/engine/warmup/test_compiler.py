from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from itertools import cycle

import numpy as np
import pytest
from tests.fakes import FakeProgram

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs, Program, Warmed
from xlaserve.engine.warmup.compiler import (
    MAX_RUNS,
    MIN_RUNS,
    TIMING_BUDGET_S,
    compile_threads,
    fastest,
    measure,
    warm_up,
)
from xlaserve.engine.warmup.ledger import Entry, Ledger
from xlaserve.errors import ShuttingDown

WAIT_S = 30.0
"""No test waits this long: it only ends one that would hang."""

BUCKETS = (Bucket(1, 2, 2), Bucket(4, 2, 2), Bucket(4, 3, 2))


class CountingProgram(FakeProgram):
    """Compiles to executables that count their runs, or raises where `error_at` says so."""

    def __init__(self, error_at: tuple[Mode, Bucket] | None = None) -> None:
        super().__init__(self._count_runs)
        self.ran: dict[tuple[Mode, Bucket], list[tuple[int, ...]]] = {}
        self.on_compile: Callable[[], object] = lambda: None
        self._error_at = error_at

    def _count_runs(self, mode: Mode, bucket: Bucket) -> Compilation:
        if (mode, bucket) == self._error_at:
            raise ValueError("no kernel")
        shapes = self.ran[mode, bucket] = []

        def executable(images: Images) -> Outputs:
            shapes.append(images.shape)
            return (np.zeros((len(images), 1), np.float32),)

        self.on_compile()
        return Compilation(executable, trace_s=0.25, compile_s=bucket.batch)


def warm(
    program: Program, ledger: Ledger, stop: threading.Event | None = None, lanes: int = 1, threads: int = 1
) -> Mapping[tuple[Mode, Bucket], Warmed]:
    return warm_up(
        program=program,
        modes=(Mode.XLA, Mode.GRAPH),
        buckets=BUCKETS,
        timer=partial(measure, lanes=lanes),
        ledger=ledger,
        stop=stop or threading.Event(),
        threads=threads,
    )


def taking(durations_s: list[float]) -> tuple[Executable, Callable[[], float]]:
    """An executable and a clock by which its runs take `durations_s`, over and over."""
    now = 0.0
    durations = cycle(durations_s)

    def executable(images: Images) -> Outputs:
        nonlocal now
        now += next(durations)
        return ()

    return executable, lambda: now


def test_every_mode_and_bucket_is_compiled_run_and_entered_in_order() -> None:
    program, ledger = CountingProgram(), Ledger("digits", "3")
    before = datetime.now(UTC)
    warmed = warm(program, ledger)
    order = [(mode, bucket) for mode in (Mode.XLA, Mode.GRAPH) for bucket in BUCKETS]
    assert program.compiled == order
    assert list(warmed) == order
    assert [(entry.mode, entry.bucket) for entry in ledger] == order
    for entry in ledger:
        assert (entry.model, entry.version, entry.trace_s, entry.compile_s) == ("digits", "3", 0.25, entry.bucket.batch)
        assert entry.cost == warmed[entry.mode, entry.bucket].cost
        assert before <= entry.at <= datetime.now(UTC)
    for (_, bucket), shapes in program.ran.items():
        assert len(shapes) >= MIN_RUNS
        assert set(shapes) == {(*bucket, 3)}


def test_a_program_that_does_not_compile_fails_the_warm_up() -> None:
    ledger = Ledger("digits", "3")
    with pytest.raises(ValueError, match="no kernel"):
        warm(CountingProgram(error_at=(Mode.XLA, BUCKETS[1])), ledger)
    assert [entry.bucket for entry in ledger] == [BUCKETS[0]]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_mode_that_can_be_left_out_is_as_a_whole(bucket: Bucket, threads: int) -> None:
    left_out = []
    warmed = warm_up(
        program=CountingProgram(error_at=(Mode.XLA, bucket)),
        modes=(Mode.XLA, Mode.GRAPH),
        buckets=BUCKETS,
        timer=partial(measure, lanes=1),
        ledger=Ledger("digits", "3"),
        stop=threading.Event(),
        threads=threads,
        leave_out=lambda mode, error: left_out.append((mode, str(error))),
    )
    assert list(warmed) == [(Mode.GRAPH, bucket) for bucket in BUCKETS]
    assert left_out == [(Mode.XLA, "no kernel")]


def test_where_every_mode_fails_the_first_error_is_raised() -> None:
    def compile(mode: Mode, bucket: Bucket) -> Compilation:
        raise ValueError(f"{mode} fails")

    with pytest.raises(ValueError, match="xla fails"):
        warm_up(
            program=FakeProgram(compile),
            modes=(Mode.XLA, Mode.GRAPH),
            buckets=BUCKETS,
            timer=partial(measure, lanes=1),
            ledger=Ledger("digits", "3"),
            stop=threading.Event(),
            leave_out=lambda mode, error: None,
        )


def test_warm_up_stops_when_it_is_told_to() -> None:
    program, ledger, stop = CountingProgram(), Ledger("digits", "3"), threading.Event()
    program.on_compile = lambda: stop.set() if len(program.compiled) == 2 else None
    with pytest.raises(ShuttingDown):
        warm(program, ledger, stop)
    assert len(program.compiled) == len(ledger) == 2


def test_the_smallest_bucket_is_compiled_first() -> None:
    program = CountingProgram()
    buckets = (Bucket(8, 2, 2), Bucket(1, 9, 9), Bucket(2, 2, 2))
    warm_up(
        program=program,
        modes=(Mode.XLA,),
        buckets=buckets,
        timer=partial(measure, lanes=1),
        ledger=Ledger("digits", "3"),
        stop=threading.Event(),
    )
    assert [bucket for _, bucket in program.compiled] == sorted(buckets, key=math.prod)


def test_xla_programs_compile_together_and_are_timed_once_all_are_there() -> None:
    program, ledger = CountingProgram(), Ledger("digits", "3")
    together = threading.Barrier(len(BUCKETS), timeout=WAIT_S)
    program.on_compile = lambda: together.wait() if len(ledger) == 0 else None
    warmed = warm(program, ledger, threads=len(BUCKETS))
    assert list(warmed) == [(entry.mode, entry.bucket) for entry in ledger]
    assert set(program.compiled[: len(BUCKETS)]) == {(Mode.XLA, bucket) for bucket in BUCKETS}
    assert program.compiled[len(BUCKETS) :] == [(Mode.GRAPH, bucket) for bucket in BUCKETS]


def test_what_does_not_compile_among_others_fails_the_warm_up() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        warm(CountingProgram(error_at=(Mode.XLA, BUCKETS[0])), Ledger("digits", "3"), threads=2)


def test_a_known_cost_is_not_measured_and_a_new_one_is_kept() -> None:
    known = Cost(1.0, 2.0)
    kept: list[Cost] = []
    ran: list[Bucket] = []

    def compilation(mode: Mode, bucket: Bucket) -> Compilation:
        def executable(images: Images) -> Outputs:
            ran.append(bucket)
            return ()

        cost = known if bucket == BUCKETS[0] else None
        return Compilation(executable, 0.0, 0.0, from_cache=cost is not None, cost=cost, keep_cost=kept.append)

    ledger = Ledger("digits", "3")
    warmed = warm(FakeProgram(compilation), ledger)
    assert warmed[Mode.XLA, BUCKETS[0]].cost == known
    assert set(ran) == set(BUCKETS[1:])
    assert kept == [entry.cost for entry in ledger if entry.bucket != BUCKETS[0]]
    assert [entry.from_cache for entry in ledger] == [bucket == BUCKETS[0] for bucket in BUCKETS] * 2


def test_small_machines_compile_one_program_after_the_other() -> None:
    assert [compile_threads(cores) for cores in (1, 2, 3, 4, 16, 64)] == [1, 1, 1, 2, 8, 8]


def test_a_cost_is_the_median_of_several_runs() -> None:
    executable, clock = taking([9.0, 0.25, 0.5])
    assert measure(executable, BUCKETS[0], lanes=1, clock=clock) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("run_s", "runs"),
    [(10.0, MIN_RUNS), (TIMING_BUDGET_S / 8, 8), (TIMING_BUDGET_S / 1024, MAX_RUNS)],
)
def test_slow_programs_are_run_a_few_times_and_fast_ones_more_often(run_s: float, runs: int) -> None:
    executable, clock = taking([run_s])
    count = 0

    def counting(images: Images) -> Outputs:
        nonlocal count
        count += 1
        return executable(images)

    measure(counting, BUCKETS[0], lanes=1, clock=clock)
    assert count == runs


def test_programs_are_timed_on_noise_and_not_on_zeros() -> None:
    seen: list[Images] = []

    def executable(images: Images) -> Outputs:
        seen.append(images)
        return ()

    bucket = Bucket(2, 16, 16)
    measure(executable, bucket, lanes=1)
    assert seen[0].shape == (2, 16, 16, 3)
    assert seen[0].dtype == np.uint8
    assert len(np.unique(seen[0])) > 200


def test_the_loaded_cost_is_measured_with_every_lane_running() -> None:
    lanes = 3
    together = threading.Barrier(lanes, timeout=WAIT_S)
    runs = threading.local()

    def executable(images: Images) -> Outputs:
        if threading.current_thread() is not threading.main_thread():
            runs.count = getattr(runs, "count", 0) + 1
            if runs.count <= MIN_RUNS:  # as many as every lane is sure to do
                together.wait()
        return ()

    cost = measure(executable, BUCKETS[0], lanes)
    assert cost.alone_s > 0
    assert cost.loaded_s > 0


def test_a_failure_under_load_surfaces() -> None:
    def executable(images: Images) -> Outputs:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("two do not fit")
        return ()

    with pytest.raises(MemoryError, match="two do not fit"):
        measure(executable, BUCKETS[0], lanes=2)


def test_the_ledger_hears_of_each_program_as_it_is_ready() -> None:
    heard: list[Entry] = []
    program = CountingProgram()
    counts: list[int] = []
    program.on_compile = lambda: counts.append(len(heard))
    ledger = Ledger("digits", "3", heard.append)
    warm(program, ledger)
    assert counts == list(range(len(program.compiled)))
    assert heard == list(ledger)


def test_auto_takes_the_fastest_mode_but_leaves_xla_only_for_a_clear_gain() -> None:
    def warmed(seconds: float) -> Warmed:
        return Warmed(lambda images: (), Cost(seconds, seconds))

    small, middle, large = (Bucket(batch, 8, 8) for batch in (1, 4, 8))
    programs = {
        (Mode.XLA, small): warmed(1.0),
        (Mode.GRAPH, small): warmed(0.5),
        (Mode.XLA, middle): warmed(1.0),
        (Mode.GRAPH, middle): warmed(0.97),
        (Mode.XLA, large): warmed(1.0),
        (Mode.GRAPH, large): warmed(1.5),
        (Mode.EAGER, large): warmed(0.9),
    }
    assert fastest(programs) == {small: Mode.GRAPH, middle: Mode.XLA, large: Mode.EAGER}
