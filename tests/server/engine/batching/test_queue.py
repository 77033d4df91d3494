from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.config import Mode
from xlaserve.engine.batching.costs import Costs
from xlaserve.engine.batching.queue import PATIENCE_S, Job, Piece, Queue
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.request import WEIGHTS, EngineRequest

BEST = 8


def make_queue() -> Queue:
    return Queue((Mode.XLA, 2, 2), Costs({1: Cost(1.0, 1.0), BEST: Cost(2.0, 2.0)}, 1))


def put(queue: Queue, images: int = 1, priority: int = 2, arrived: float = 0.0, within_s: float = math.inf) -> Job:
    rows = np.zeros((images, 2, 2, 3), np.uint8)
    job = Job(queue, EngineRequest((rows,), Mode.XLA, arrived + within_s, priority), arrived, cast(Any, None))
    queue.append(job)
    return job


def taken(pieces: Sequence[Piece]) -> Counter[int]:
    """Returns how many images of each priority there are."""
    return Counter(piece.job.request.priority for piece in pieces for _ in range(piece.start, piece.stop))


class Put(NamedTuple):
    images: int
    priority: int
    within_s: float


class Take(NamedTuple):
    images: int


class Remove(NamedTuple):
    which: float


steps = st.one_of(
    st.builds(Put, st.integers(1, 20), st.sampled_from(sorted(WEIGHTS)), st.sampled_from([0.5, 3.0, 100.0, math.inf])),
    st.builds(Take, st.integers(1, 30)),
    st.builds(Remove, st.floats(0, 0.999)),
)


@given(st.lists(steps, max_size=60))
def test_every_image_is_taken_once_and_none_of_a_removed_job(asked: list[Put | Take | Remove]) -> None:
    queue = make_queue()
    jobs: list[Job] = []
    seen: Counter[tuple[int, int]] = Counter()
    removed: set[int] = set()

    def take(images: int, now: float) -> None:
        pieces = queue.take(min(images, queue.images), now)
        assert sum(piece.stop - piece.start for piece in pieces) <= images
        for job, start, stop in pieces:
            assert id(job) not in removed
            seen.update((id(job), image) for image in range(start, stop))

    for now, step in enumerate(asked):
        if isinstance(step, Put):
            jobs.append(put(queue, step.images, step.priority, float(now), step.within_s))
        elif isinstance(step, Take):
            take(step.images, float(now))
        elif jobs:
            job = jobs[int(step.which * len(jobs))]
            queue.remove(job)
            removed.add(id(job))
        lines = queue.lines.values()
        assert queue.images == sum(line.images for line in lines)
        assert all(line.images == sum(job.waiting for job in line.jobs) for line in lines)
        assert all(job.waiting for line in lines for job in line.jobs)
        assert all(list(line.jobs) == sorted(line.jobs, key=lambda job: job.rank) for line in lines)
        assert (queue.due(0.0) == math.inf) is (not queue.images)
    take(queue.images, float(len(asked)))
    assert not any(line.jobs for line in queue.lines.values())
    assert set(seen.values()) <= {1}
    kept = sum(job.images for job in jobs if id(job) not in removed)
    assert sum(1 for job, _ in seen if job not in removed) == kept


@pytest.mark.parametrize("batch", [1, 7, 8, 30])
def test_priorities_that_wait_share_images_by_their_weights(batch: int) -> None:
    queue = make_queue()
    for priority in WEIGHTS:
        for _ in range(1000):
            put(queue, 1, priority)
    found: Counter[int] = Counter()
    while sum(found.values()) < 700:
        found += taken(queue.take(batch, 0.0))
        for priority, weight in WEIGHTS.items():
            assert abs(found[priority] - sum(found.values()) * weight / sum(WEIGHTS.values())) <= max(WEIGHTS.values())


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), min_size=10, max_size=40))
def test_the_lowest_priority_gets_its_share_of_any_batches(batches: list[tuple[int, int]]) -> None:
    queue = make_queue()
    put(queue, 10_000, 3)
    put(queue, 10_000, 1)
    all_taken, lowest = 0, 0
    for batch, images in batches:
        put(queue, images, 1)
        lowest += taken(queue.take(batch, 0.0))[3]
        all_taken += batch
        assert lowest >= all_taken / (WEIGHTS[1] + WEIGHTS[3]) * WEIGHTS[3] - 1


def test_a_priority_that_was_quiet_is_next_but_has_saved_up_no_credit() -> None:
    queue = make_queue()
    put(queue, 1000, 3)
    queue.take(500, 0.0)
    put(queue, 1000, 1)
    first = taken(queue.take(5, 0.0))
    assert first[1] >= 4
    assert taken(queue.take(100, 0.0))[3] == pytest.approx(20, abs=1)


def test_the_nearest_deadline_is_next_and_equal_ones_in_their_order() -> None:
    queue = make_queue()
    late = put(queue, within_s=5.0)
    alike = [put(queue, within_s=2.0) for _ in range(3)]
    soon = put(queue, within_s=1.0)
    assert [piece.job for piece in queue.take(5, 0.0)] == [soon, *alike, late]


def test_a_job_without_a_deadline_is_overtaken_for_a_bounded_time_only() -> None:
    queue = make_queue()
    patient, far = put(queue), put(queue, within_s=1000.0)
    before = [put(queue, arrived=PATIENCE_S - 2.0, within_s=1.0) for _ in range(2)]
    after = put(queue, arrived=PATIENCE_S, within_s=1.0)
    assert [piece.job for piece in queue.take(5, 0.0)] == [*before, patient, far, after]


def test_the_rest_of_a_split_job_stays_next_unless_a_deadline_is_nearer() -> None:
    queue = make_queue()
    whole = put(queue, 10, within_s=2.0)
    later = put(queue, 1, within_s=2.0)
    assert queue.take(8, 0.0) == [Piece(whole, 0, 8)]
    soon = put(queue, 1, within_s=1.0)
    assert queue.take(4, 0.0) == [Piece(soon, 0, 1), Piece(whole, 8, 10), Piece(later, 0, 1)]


def test_a_batch_waits_from_when_the_oldest_of_all_jobs_arrived() -> None:
    queue = make_queue()
    put(queue, arrived=1.0)
    put(queue, arrived=2.0, within_s=0.5)
    put(queue, arrived=3.0, priority=1)
    assert queue.due(0.25) == 1.25
    put(queue, BEST, arrived=4.0)
    assert queue.due(0.25) == -math.inf
