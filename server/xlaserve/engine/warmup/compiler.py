"""Compiles and warms a model ahead of traffic: every bucket in every mode, run, timed and written to the ledger."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, Rows
from xlaserve.engine.program import Compilation, Executable, Program, Warmed, run_batch
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.sample import noise_of
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import ShuttingDown

MIN_RUNS = 3
MAX_RUNS = 20
AUTO_MARGIN = 0.05
TIMING_BUDGET_S = 0.5
"""A program is timed until it has run MIN_RUNS times and this long, or MAX_RUNS times."""
MAX_COMPILE_THREADS = 8
"""Each compilation takes memory, some hundreds of megabytes for a large network."""


Timer = Callable[[Executable, Bucket], Cost]
"""Runs a program, and returns its cost."""


LeaveOut = Callable[[Mode, Exception], object]
"""Called with a mode that failed, and its error; raises where the model can't serve without that mode."""


At = Callable[[str], AbstractContextManager[object]]
"""Returns a context that records a step of a load, in words, for as long as it takes."""


def unnoted(step: str) -> AbstractContextManager[object]:
    """Records no step."""
    return nullcontext()


def raised(mode: Mode, error: Exception) -> NoReturn:
    """Raises the error: no mode is left out."""
    raise error


def warm_up(
    *,
    program: Program,
    modes: Iterable[Mode],
    buckets: Iterable[Bucket],
    timer: Timer,
    ledger: Ledger,
    stop: threading.Event,
    threads: int = 1,
    verifier: Verifier | None = None,
    leave_out: LeaveOut = raised,
    at: At = unnoted,
) -> dict[tuple[Mode, Bucket], Warmed]:
    """Compiles `program` for every mode and bucket, the smallest bucket first, verifies each, times and returns them.

    A mode that fails is left out where `leave_out` allows it, but not all modes: then the first one's error is raised.
    Each step is recorded with `at`.

    With several `threads`, that many of XLA's programs compile at the same time. All are timed afterwards, when no
    compilation takes processors from them. Blocks. Raises ShuttingDown once `stop` is set, and the errors of programs.
    """
    smallest_first = sorted(buckets, key=lambda bucket: (math.prod(bucket), bucket))
    wanted = [(mode, bucket) for mode in modes for bucket in smallest_first]

    def check_stop() -> None:
        if stop.is_set():
            raise ShuttingDown(f"model {ledger.model}: warm-up was stopped")

    def compile_one(mode: Mode, bucket: Bucket) -> Compilation:
        check_stop()
        with at(f"compiling mode {mode}, bucket {bucket}"):
            return program.compile(mode, bucket)

    early: dict[tuple[Mode, Bucket], Compilation | Exception] = {}
    if threads > 1:
        early = _in_parallel(compile_one, [each for each in wanted if each[0].traits.is_jit], threads)
    warmed: dict[tuple[Mode, Bucket], Warmed] = {}
    left_out: dict[Mode, Exception] = {}
    for mode, bucket in wanted:
        if mode in left_out:
            continue
        check_stop()
        try:
            compilation = early.get((mode, bucket)) or compile_one(mode, bucket)
            if isinstance(compilation, Exception):
                raise compilation
            verified = None
            if verifier is not None:
                with at(f"running mode {mode}, bucket {bucket}"):
                    again = partial(compile_one, mode, bucket)
                    compilation, verified = verifier.verify(mode, bucket, compilation, again)
        except ShuttingDown:
            raise
        except Exception as error:
            leave_out(mode, error)
            left_out[mode] = error
            continue
        if (cost := compilation.cost) is None:
            with at(f"running mode {mode}, bucket {bucket}"):
                cost = timer(compilation.executable, bucket)
            compilation.keep_cost(cost)
        warmed[mode, bucket] = ledger.record(mode, bucket, compilation, cost, verified)
    if left_out and left_out.keys() == {mode for mode, _ in wanted}:
        raise next(iter(left_out.values()))
    return {key: one for key, one in warmed.items() if key[0] not in left_out}


def compile_threads(cores: int) -> int:
    """Returns how many programs should compile at the same time.

    One compilation keeps about one and a half cores busy (ResNet50 on two cores: 14.0 processor seconds in 9.6 s), so
    that on two cores a second one at the same time would gain little.
    """
    return max(1, min(cores // 2, MAX_COMPILE_THREADS))


def _in_parallel(
    compile_one: Callable[[Mode, Bucket], Compilation], wanted: Sequence[tuple[Mode, Bucket]], threads: int
) -> dict[tuple[Mode, Bucket], Compilation | Exception]:
    """Returns the result or the error of each compilation; once one of a mode has failed, the others fail with its
    error.

    Raises ShuttingDown.
    """
    made: dict[tuple[Mode, Bucket], Compilation | Exception] = {}
    failed: dict[Mode, Exception] = {}

    def compile_unless_failed(mode: Mode, bucket: Bucket) -> Compilation | Exception:
        if mode in failed:
            return failed[mode]
        try:
            return compile_one(mode, bucket)
        except ShuttingDown:
            raise
        except Exception as error:
            return failed.setdefault(mode, error)

    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        futures = [pool.submit(compile_unless_failed, *each) for each in wanted]
        try:
            for each, future in zip(wanted, futures, strict=True):
                made[each] = future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return made


def fastest(warmed: Mapping[tuple[Mode, Bucket], Warmed]) -> dict[Bucket, Mode]:
    """Returns for each bucket the mode that runs it fastest with all lanes busy.

    The first of `auto`'s choice gives way only to one that is faster by more than AUTO_MARGIN: noise must not decide.
    """
    preferred = Mode.AUTO.traits.choice[0]
    seconds: dict[Bucket, dict[Mode, float]] = {}
    for (mode, bucket), program in warmed.items():
        handicap = 1.0 if mode is preferred else 1.0 + AUTO_MARGIN
        seconds.setdefault(bucket, {})[mode] = program.cost.loaded_s * handicap
    return {bucket: min(by_mode, key=by_mode.__getitem__) for bucket, by_mode in seconds.items()}


def measure(
    executable: Executable,
    bucket: Bucket,
    lanes: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    inputs: Inputs = RGB_IMAGE,
) -> Cost:
    """Returns the median seconds of several runs: alone, and with all `lanes` running the same."""
    run = partial(run_batch, executable, *noise(bucket, inputs))
    alone_s = statistics.median(time_runs(run, clock=clock))
    if lanes == 1:
        return Cost(alone_s, alone_s)
    with ThreadPoolExecutor(lanes, thread_name_prefix="warm-up") as pool:
        runs = [pool.submit(time_runs, run, clock=clock) for _ in range(lanes)]
        loaded_s = statistics.median(second for run in runs for second in run.result())
    return Cost(alone_s, loaded_s)


def noise(bucket: Bucket, inputs: Inputs = RGB_IMAGE) -> Rows:
    """Returns rows to time a bucket with, the same ones every time.

    Noise, not zeros: no arithmetic may be cheaper than on real images.
    """
    batch, height, width = bucket
    return tuple(
        noise_of(np.dtype(spec.dtype), (batch, *spec.row_shape(height, width)), seed, is_image=spec.is_image)
        for seed, spec in enumerate(inputs)
    )


def time_runs(
    run: Callable[[], object], most: int = MAX_RUNS, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Returns the seconds of each of several runs: MIN_RUNS, and more within TIMING_BUDGET_S, `most` in all."""
    seconds: list[float] = []
    while len(seconds) < MIN_RUNS or (len(seconds) < most and sum(seconds) < TIMING_BUDGET_S):
        start = clock()
        run()
        seconds.append(clock() - start)
    return seconds
