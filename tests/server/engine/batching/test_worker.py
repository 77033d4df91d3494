from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.config import Bucket
from xlaserve.engine.batching import worker as worker_module
from xlaserve.engine.batching.worker import Batch, Run, Worker, gather
from xlaserve.engine.inputs import Images, Rows, pixels
from xlaserve.engine.program import Executable, Outputs

WAIT_S = 30.0
"""No test waits this long: it only ends one that would hang."""

Pictures = Callable[[Iterable[int]], Images]


@contextmanager
def working(lanes: int) -> Iterator[Worker]:
    worker = Worker(lanes)
    try:
        yield worker
    finally:
        worker.stop()


def submit(worker: Worker, batch: Batch) -> Future[Run]:
    future: Future[Run] = Future()

    def done(result: Run | BaseException) -> None:
        if isinstance(result, Run):
            future.set_result(result)
        else:
            future.set_exception(result)

    worker.submit(batch, done)
    return future


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 7))
def test_rows_are_gathered_in_order_and_padded_with_the_last_of_them(sizes: list[int], padding: int) -> None:
    rows = [np.full((size, 1, 1, 3), number, np.uint8) for number, size in enumerate(sizes, start=1)]
    buffer = np.zeros((sum(sizes) + padding, 1, 1, 3), np.uint8)
    gather([(each,) for each in rows], (buffer,))
    numbers = [number for number, size in enumerate(sizes, start=1) for _ in range(size)]
    assert buffer[:, 0, 0, 0].tolist() == numbers + [numbers[-1]] * padding


def test_what_a_buffer_held_before_is_gone(pictures: Pictures) -> None:
    buffer = pictures(range(100, 108))
    gather([(pictures([1, 2]),)], (buffer,))
    assert (buffer == pictures([1, 2, 2, 2, 2, 2, 2, 2])).all()


def test_a_batch_gives_a_row_for_each_of_its_images(pictures: Pictures, echo: Executable) -> None:
    with working(lanes=1) as worker:
        run = worker.run(Batch(echo, Bucket(8, 2, 2), [(pictures([5, 6]),), (pictures([7]),)]))
    assert run.outputs[0][:3].tolist() == [5, 6, 7]
    assert len(run.outputs[0]) == 8


def test_a_request_that_fits_its_bucket_is_not_copied(pictures: Pictures, echo: Executable) -> None:
    seen = []

    def executable(images: Images) -> Outputs:
        seen.append(images)
        return echo(images)

    images = pictures(range(8))
    with working(lanes=1) as worker:
        worker.run(Batch(executable, Bucket(4, 2, 2), [(images[4:],)]))
    assert np.shares_memory(seen[0], images)
    assert (seen[0] == images[4:]).all()


def test_a_request_that_fits_its_bucket_leaves_the_buffers_as_they_are(pictures: Pictures, echo: Executable) -> None:
    bucket = Bucket(2, 2, 2)
    with working(lanes=1) as worker:
        images = pictures([1, 2])
        worker.run(Batch(echo, bucket, [(images,)]))
        assert worker.run(Batch(echo, bucket, [(pictures([3]),)])).outputs[0].tolist() == [3, 3]
        assert (images == pictures([1, 2])).all()


def test_the_seconds_are_those_of_gathering_waiting_and_running(pictures: Pictures, echo: Executable) -> None:
    times = iter([10.0, 11.0, 13.0, 16.0])
    worker = Worker(1, clock=lambda: next(times))
    run = worker.run(Batch(echo, Bucket(2, 2, 2), [(pictures([1]),)]))
    worker.stop()
    assert (run.gather_s, run.wait_s, run.execute_s) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), SystemExit(1)])
def test_whatever_an_executable_raises_reaches_whoever_waits(
    pictures: Pictures, echo: Executable, error: BaseException
) -> None:
    def executable(images: Images) -> Outputs:
        raise error

    with working(lanes=1) as worker:
        bucket = Bucket(2, 2, 2)
        assert submit(worker, Batch(executable, bucket, [(pictures([1]),)])).exception(WAIT_S) is error
        assert submit(worker, Batch(echo, bucket, [(pictures([1]),)])).result(WAIT_S).outputs[0][0] == 1


def test_all_lanes_run_at_once_and_no_more(pictures: Pictures, echo: Executable) -> None:
    lanes = 3
    together = threading.Barrier(lanes, timeout=WAIT_S)
    lock = threading.Lock()
    running = 0
    most = 0

    def executable(images: Images) -> Outputs:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return echo(images)

    with working(lanes) as worker:
        batches = [submit(worker, Batch(executable, Bucket(2, 2, 2), [(pictures([1]),)])) for _ in range(4 * lanes)]
        for batch in batches:
            batch.result(WAIT_S)
    assert most == lanes


def test_buffers_are_reused_and_never_shared_by_batches_under_way(pictures: Pictures, echo: Executable) -> None:
    lanes = 3
    lock = threading.Lock()
    in_use: Counter[int] = Counter()
    buffers: dict[int, Images] = {}  # kept, so that no other array can take an address
    shared = []

    def executable(images: Images) -> Outputs:
        address = images.__array_interface__["data"][0]
        with lock:
            buffers[address] = images
            in_use[address] += 1
            shared.append(in_use[address] > 1)
        outputs = echo(images)
        with lock:
            in_use[address] -= 1
        return outputs

    bucket = Bucket(4, 2, 2)
    with working(lanes) as worker:
        worker.reserve([bucket])
        runs = [
            submit(worker, Batch(executable, bucket, [(pictures([n, n + 1]),), (pictures([n + 2]),)]))
            for n in range(200)
        ]
        for n, run in enumerate(runs):
            assert run.result(WAIT_S).outputs[0].tolist() == [n, n + 1, n + 2, n + 2]
    assert not any(shared)
    assert len(buffers) <= lanes + 1


def test_buffers_are_kept_as_long_as_somebody_has_reserved_them(pictures: Pictures, echo: Executable) -> None:
    kept: list[weakref.ref[Images]] = []

    def executable(images: Images) -> Outputs:
        kept.append(weakref.ref(images))
        return echo(images)

    bucket, other = Bucket(4, 2, 2), Bucket(8, 2, 2)
    with working(lanes=2) as worker:
        worker.reserve([bucket])
        worker.reserve([bucket])
        batch = Batch(executable, bucket, [(pictures([1]),)])
        worker.run(batch)
        worker.free([bucket])
        worker.run(batch)
        assert kept[0]() is kept[1]() is not None
        worker.free([bucket])
        assert kept[0]() is None
        worker.run(batch)
        worker.run(Batch(executable, other, [(pictures([1]),)]))
        assert [buffer() for buffer in kept] == [None] * 4


def test_models_with_other_channels_have_buffers_of_their_own() -> None:
    ran: list[tuple[int, ...]] = []

    def executable(images: Images) -> Outputs:
        ran.append(images.shape)
        return (images[:, 0, 0, 0].astype(np.float32),)

    bucket = Bucket(2, 2, 2)
    with working(lanes=1) as worker:
        for channels in (1, 3, 5):
            worker.reserve([bucket], pixels(channels))
        for channels in (3, 1, 5):
            worker.run(Batch(executable, bucket, [(np.full((1, 2, 2, channels), channels, np.uint8),)]))
            worker.free([bucket], pixels(channels))
    assert ran == [(2, 2, 2, 3), (2, 2, 2, 1), (2, 2, 2, 5)]


def test_a_bucket_reserved_while_its_batches_run_has_no_extra_buffers(pictures: Pictures, echo: Executable) -> None:
    bucket = Bucket(4, 2, 2)
    seen: dict[int, Images] = {}
    worker = Worker(1)

    def executable(images: Images) -> Outputs:
        seen[images.__array_interface__["data"][0]] = images
        if len(seen) == 1:
            worker.free([bucket])
            worker.reserve([bucket])
        return echo(images)

    worker.reserve([bucket])
    for _ in range(20):
        worker.run(Batch(executable, bucket, [(pictures([1]),)]))
    worker.stop()
    assert len(seen) <= 1 + 2


def test_gathering_a_batch_while_another_runs_leaves_its_images_untouched(
    pictures: Pictures, echo: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, gathered, may_end = threading.Event(), threading.Event(), threading.Event()

    def slow(images: Images) -> Outputs:
        runs.set()
        assert may_end.wait(WAIT_S)
        return echo(images)

    def telling(rows: Sequence[Rows], buffer: Rows) -> None:
        gather(rows, buffer)
        gathered.set()

    bucket = Bucket(4, 2, 2)
    with working(lanes=1) as worker:
        first = submit(worker, Batch(slow, bucket, [(pictures([1, 2]),)]))
        assert runs.wait(WAIT_S)
        monkeypatch.setattr(worker_module, "gather", telling)
        second = submit(worker, Batch(echo, bucket, [(pictures([3, 4]),)]))
        assert gathered.wait(WAIT_S)
        assert not second.done()
        may_end.set()
        assert first.result(WAIT_S).outputs[0].tolist() == [1, 2, 2, 2]
        assert second.result(WAIT_S).outputs[0].tolist() == [3, 4, 4, 4]


def test_stop_waits_for_what_is_under_way(pictures: Pictures, echo: Executable) -> None:
    worker = Worker(2)
    runs = [submit(worker, Batch(echo, Bucket(2, 2, 2), [(pictures([n]),)])) for n in range(20)]
    worker.stop()
    assert all(run.done() for run in runs)
    assert [run.result().outputs[0].tolist() for run in runs] == [[n, n] for n in range(20)]
    with pytest.raises(RuntimeError):
        worker.submit(Batch(echo, Bucket(2, 2, 2), [(pictures([1]),)]), lambda result: None)
