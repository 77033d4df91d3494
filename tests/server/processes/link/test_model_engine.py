"""What holds for every `ModelEngine`, in this process and in another one."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.fakes import outputs_of
from tests.server.processes.link.engines import (
    EngineProcess,
    Engines,
    EnginesElsewhere,
    EnginesHere,
    until,
    until_admitted,
    until_nothing_is_held,
)
from tests.server.processes.link.models import (
    BROKEN,
    COST_S,
    LARGE,
    MAP_SIDE,
    MAX_BYTES,
    MAX_IMAGES,
    OTHER,
    SMALL,
    TALL,
    pictures,
)

from xlaserve.config import Mode
from xlaserve.engine.batching.queue import DEFAULT_PRIORITY, Result
from xlaserve.engine.model_engine import ModelEngine
from xlaserve.engine.program import Images
from xlaserve.engine.trace_context import TraceContext, new
from xlaserve.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    InvalidArgument,
    ModelNotReady,
    QueueFull,
    ShuttingDown,
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("engine") / "socket") as process:
        yield process


@pytest_asyncio.fixture(params=["here", "elsewhere", "spread"])
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    engines: EnginesHere | EnginesElsewhere
    if request.param == "here":
        engines = EnginesHere()
    else:
        engines = await EnginesElsewhere.connect(request.getfixturevalue("process"))
        engines.is_spread = request.param == "spread"
    yield engines
    engines.gate.open()
    try:
        await until_nothing_is_held(engines)
    finally:
        engines.gate.close()
        await engines.stop()


async def ask(
    engines: Engines,
    name: str,
    *numbers: int,
    size: tuple[int, int] = SMALL,
    mode: Mode = Mode.XLA,
    deadline: float = math.inf,
    priority: int = DEFAULT_PRIORITY,
    trace: TraceContext | None = None,
    in_place: bool = False,
) -> Result:
    """Runs images as a request does: admits them, runs them, and leaves."""
    pixels: Images = pictures(*numbers, size=size)
    with engines.engine(name).admit(len(pixels), pixels.nbytes) as admitted:
        if in_place:
            buffer = admitted.buffer((len(pixels), *size, 3))
            buffer[...] = pixels
            pixels = buffer
        return await admitted.run(pixels, mode, deadline, priority, trace)


def begin(*arguments: Any, **named: Any) -> asyncio.Task[Result]:
    return asyncio.create_task(ask(*arguments, **named))


def takes(engine: ModelEngine) -> bool:
    try:
        with engine.admit(1, 1):
            return True
    except ModelNotReady:
        return False


async def numbers(asked: Any) -> list[int]:
    first, doubled = outputs_of(await asked)
    assert (first * 2 == doubled[:, 0]).all()
    return [int(number) for number in first]


async def test_each_request_gets_its_own_rows(engines: Engines) -> None:
    draw = random.Random(3)
    wanted = [[draw.randrange(2**24) for _ in range(draw.randrange(1, 13))] for _ in range(200)]
    sizes = [draw.choice((SMALL, TALL)) for _ in wanted]
    modes = [draw.choice((Mode.XLA, Mode.GRAPH)) for _ in wanted]
    asked = [
        ask(engines, "numbers", *each, size=size, mode=mode, in_place=draw.random() < 0.5)
        for each, size, mode in zip(wanted, sizes, modes, strict=True)
    ]
    assert await asyncio.gather(*map(numbers, asked)) == wanted


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("images", [1, 2, 5, 8])
async def test_large_images_are_answered(engines: Engines, images: int, in_place: bool) -> None:
    wanted = [*range(images)]
    assert await numbers(ask(engines, "numbers", *wanted, size=LARGE, in_place=in_place)) == wanted


async def test_large_outputs_come_whole(engines: Engines) -> None:
    (maps,) = outputs_of(await ask(engines, "maps", *range(20)))
    assert maps.shape == (20, MAP_SIDE, MAP_SIDE)
    assert (maps == np.arange(20, dtype=np.uint8)[:, None, None]).all()


async def test_pixels_that_are_not_contiguous_are_taken(engines: Engines) -> None:
    pixels = np.broadcast_to(pictures(7)[:, :1, :1], (1, *SMALL, 3))
    with engines.engine("numbers").admit(1, pixels.nbytes) as admitted:
        result = await admitted.run(pixels, Mode.XLA, math.inf)
    assert outputs_of(result)[0] == [7]


async def test_answers_outlive_their_request(engines: Engines) -> None:
    answers = [await ask(engines, "numbers", number, number + 1) for number in range(0, 100, 2)]
    assert [int(number) for answer in answers for number in outputs_of(answer)[0]] == [*range(100)]


async def test_all_is_given_back_as_soon_as_an_answer_is_dropped(engines: Engines) -> None:
    gc.disable()
    try:
        result = await ask(engines, "numbers", 1, in_place=True)
        del result
        await until_nothing_is_held(engines, collects=False)
    finally:
        gc.enable()


async def test_all_is_given_back_once_nobody_waits_even_without_the_garbage_collector(engines: Engines) -> None:
    gc.disable()
    try:
        under_way = begin(engines, "gated", 1)
        await engines.gate.started()
        waits = begin(engines, "gated", 2)
        await asyncio.sleep(0)
        for task in (under_way, waits):
            task.cancel()
        await asyncio.wait([under_way, waits])
        del under_way, waits, task
        engines.gate.open()
        await until_nothing_is_held(engines, collects=False)
    finally:
        gc.enable()


async def test_higher_priorities_get_their_share_first(engines: Engines) -> None:
    running = begin(engines, "gated", 0)
    await engines.gate.started()
    order: list[int] = []
    waiting = []
    for priority, images in ((3, 12), (1, 4)):
        task = begin(engines, "gated", *range(images), priority=priority)
        task.add_done_callback(lambda _, priority=priority: order.append(priority))  # type: ignore[misc]
        waiting.append(task)
        await asyncio.sleep(0.01)  # so that they come in this order
    engines.gate.open()
    await asyncio.gather(running, *waiting)
    assert order == [1, 3]


async def test_a_job_whose_deadline_passes_while_it_waits_fails_alone(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    deadline = time.perf_counter() + 0.1
    late, patient = begin(engines, "gated", 2, deadline=deadline), begin(engines, "gated", 3)
    await asyncio.sleep(0.11)
    engines.gate.open()
    with pytest.raises(DeadlineExceeded, match="gated: the deadline passed while the request waited"):
        await late
    assert [*await asyncio.gather(numbers(running), numbers(patient))] == [[1], [3]]


async def test_what_cannot_make_its_deadline_is_refused_on_arrival(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waiting = [begin(engines, "gated", *range(8)) for _ in range(10)]
    await until_admitted(engines, "gated", 81)
    with pytest.raises(DeadlineUnreachable, match="model gated: the deadline is in") as refused:
        await ask(engines, "gated", 2, deadline=time.perf_counter() + 0.0005)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    engines.gate.open()
    await asyncio.gather(running, *waiting)


async def test_encoded_images_are_refused_before_they_are_decoded_where_that_takes_too_long(engines: Engines) -> None:
    engine = engines.engine("numbers")
    shapes = [(Mode.XLA, *SMALL)]
    engine.check_encoded(1, time.perf_counter() + 0.001, 2, shapes=shapes, decode_s=1.0, decoding=0)  # nothing waits
    engine.check_encoded(1, time.perf_counter() + 9.0, 2, shapes=shapes, decode_s=1.0, decoding=3)
    with pytest.raises(DeadlineUnreachable, match="model numbers: the deadline is in 0"):
        engine.check_encoded(1, time.perf_counter() + 0.5, 2, shapes=shapes, decode_s=1.0, decoding=3)


async def test_a_request_that_is_cancelled_while_it_waits_is_not_run(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    cancelled, other = begin(engines, "gated", 2, 3), begin(engines, "gated", 4)
    await until_admitted(engines, "gated", 4)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    engines.gate.open()
    assert [*await asyncio.gather(numbers(running), numbers(other))] == [[1], [4]]


async def test_a_request_that_is_cancelled_at_once_is_given_back(engines: Engines) -> None:
    tasks = [begin(engines, "numbers", number) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    answers = [int(outputs_of(result)[0][0]) for result in results if isinstance(result, Result)]
    assert answers == [*range(1, 20, 2)]


async def test_a_request_that_is_cancelled_while_it_runs_leaves_at_once_and_its_memory_later(engines: Engines) -> None:
    cancelled = begin(engines, "gated", *range(8), in_place=True)
    await engines.gate.started()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(cancelled), 1)
    if isinstance(engines, EnginesElsewhere):
        await asyncio.sleep(0.02)
        assert engines.link.jobs == 1, "the batch still reads its memory"
        assert engines.link.arena.used_bytes
    engines.gate.open()


async def test_a_queue_is_bounded_in_images(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    with engines.engine("gated").admit(MAX_IMAGES - 1, 0):
        with pytest.raises(QueueFull, match=f"1 more images exceed max_queue_images {MAX_IMAGES}") as full:
            await ask(engines, "gated", 2)
        assert full.value.retry_after_s is not None
    engines.gate.open()
    await running


async def test_a_queue_is_bounded_in_bytes(engines: Engines) -> None:
    with (
        engines.engine("numbers").admit(1, MAX_BYTES - 1),
        pytest.raises(QueueFull, match=f"2 more bytes exceed max_queue_bytes {MAX_BYTES}"),
    ):
        engines.engine("numbers").admit(1, 2)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_models_that_hold_all_that_they_may_leave_the_others_theirs(
    engines: Engines, size: tuple[int, int]
) -> None:
    """However many images that is, and whatever room their outputs take, those of class maps above all."""
    with ExitStack() as held:
        for name in ("gated", "maps", "nan", "slow"):
            for images in (1, 2, 3, 50) * 1000:
                shape = (images, *size, 3)
                try:
                    admitted = held.enter_context(engines.engine(name).admit(images, math.prod(shape)))
                except QueueFull as full:
                    assert "exceed max_queue" in str(full)
                    break
                held.push(partial(_drop, [admitted.buffer(shape)]))
        wanted = [*range(50)]
        assert await numbers(ask(engines, "numbers", *wanted, size=size, in_place=True)) == wanted


def _drop(held: list[Images], *_: object) -> None:
    held.clear()


async def test_what_could_never_be_taken_is_an_invalid_argument(engines: Engines) -> None:
    engine = engines.engine("numbers")
    with pytest.raises(InvalidArgument, match="images: expected at most"):
        engine.admit(MAX_IMAGES + 1, 1)
    with pytest.raises(InvalidArgument, match="images: expected at most"):
        engine.admit(1, MAX_BYTES + 1)


async def test_a_program_that_raises_fails_its_requests_and_tells_nothing(engines: Engines) -> None:
    with pytest.raises(ExecutionFailed, match=r"^model failing could not run this batch$"):
        await ask(engines, "failing", 1)
    assert await numbers(ask(engines, "numbers", 1)) == [1]


async def test_numbers_that_are_none_are_answered(engines: Engines) -> None:
    (answer,) = outputs_of(await ask(engines, "nan", 1, 2, 3))
    assert np.isnan(answer).all()
    assert len(answer) == 3


async def test_batches_that_memory_does_not_hold_run_in_smaller_ones(engines: Engines) -> None:
    wanted = [*range(13)]
    assert await numbers(ask(engines, "short of memory", *wanted)) == wanted


async def test_a_model_that_drains_finishes_what_it_has_and_takes_no_more(engines: Engines) -> None:
    old = engines.engine("gated")
    tasks = [begin(engines, "gated", 1)]
    await engines.gate.started()
    tasks.append(begin(engines, "gated", 2))
    await until_admitted(engines, "gated", 2)
    drained = asyncio.create_task(engines.renew("gated", 20.0))
    await until(lambda: not takes(old))
    with pytest.raises(ModelNotReady, match="model gated is draining"):
        old.admit(1, 1)
    engines.gate.open()
    assert await asyncio.gather(*map(numbers, tasks)) == [[1], [2]]
    await drained
    with pytest.raises(ModelNotReady):
        old.admit(1, 1)
    assert await numbers(ask(engines, "gated", 3)) == [3]


async def test_what_does_not_finish_in_time_fails_when_a_model_is_unloaded(engines: Engines) -> None:
    tasks = [begin(engines, "gated", 1)]
    await engines.gate.started()
    tasks.append(begin(engines, "gated", 2))
    await until_admitted(engines, "gated", 2)
    await engines.renew("gated", 0.05)
    for task in tasks:
        with pytest.raises(ShuttingDown, match="model gated was unloaded before this could run"):
            await task
    engines.gate.open()


async def test_a_traced_request_knows_its_batches(engines: Engines) -> None:
    trace = new()
    before = time.perf_counter()
    result = await ask(engines, "numbers", 1, 2, trace=trace)
    (batch,) = result.traced
    assert [(span.trace_id, span.span_id, span.is_sampled) for span in batch.requests] == [trace[:3]]
    assert (batch.model, batch.mode, batch.bucket[1:], batch.images) == ("numbers", Mode.XLA, SMALL, 2)
    assert before <= batch.began <= batch.ended <= time.perf_counter(), "on one clock"


async def test_stages_are_timed(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waiting = begin(engines, "gated", 2)
    await until_admitted(engines, "gated", 2)
    await asyncio.sleep(0.05)
    engines.gate.open()
    assert (await running).timings.execute_s >= 0.05
    timings = (await waiting).timings
    assert 0.02 <= timings.queue_s <= 20
    assert 0 <= timings.gather_s <= 1


async def test_what_is_outstanding_is_told_in_seconds(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waiting = [begin(engines, "gated", *range(8)) for _ in range(200)]  # more than a second
    await until_admitted(engines, "gated", 1601)
    engines.gate.open(1)
    await running
    await until(lambda: engines.engine("gated").outstanding_s() > 0)
    engines.gate.open()
    await asyncio.gather(*waiting)


async def when_idle(engines: Engines, name: str, *numbers: int, within_s: float = 20.0) -> Result:
    return await engines.engine(name).run_when_idle(pictures(*numbers), Mode.XLA, time.perf_counter() + within_s)


@pytest.mark.parametrize("images", [1, 3, 8])
async def test_an_idle_device_runs_a_batch_that_no_request_waits_for(engines: Engines, images: int) -> None:
    result = await when_idle(engines, "numbers", *range(images))
    (batch,) = result.batches
    assert [*batch.rows] == [*range(images)]
    assert [int(number) for number in batch.outputs[0]] == [*range(images)], "without the rows of the padding"
    assert result.timings.execute_s > 0
    assert result.timings.queue_s == 0


async def test_it_is_known_how_many_images_run_in_one_batch(engines: Engines) -> None:
    engine = engines.engine("numbers")
    assert engine.largest(Mode.XLA, *SMALL) == max(COST_S)
    assert engine.largest(Mode.EAGER, *SMALL) == 0
    assert engine.largest(Mode.XLA, *OTHER) == 0
    with pytest.raises(InvalidArgument, match="pixels: expected at most 8 images of this size in a batch, got 9"):
        await when_idle(engines, "numbers", *range(9))


async def test_a_batch_that_no_request_waits_for_begins_once_the_device_is_idle(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    with pytest.raises(DeadlineExceeded, match="model gated: the device was not idle"):
        await when_idle(engines, "gated", 2, within_s=0.03)
    waits = asyncio.create_task(when_idle(engines, "gated", 3))
    await asyncio.sleep(0.05)
    assert not waits.done()
    engines.gate.open()
    assert await numbers(waits) == [3]
    assert await numbers(running) == [1]


async def test_what_no_request_waits_for_is_in_no_bound(engines: Engines) -> None:
    waits = asyncio.create_task(when_idle(engines, "gated", *range(8)))
    await engines.gate.started()
    with engines.engine("gated").admit(MAX_IMAGES, MAX_BYTES):
        engines.gate.open()
    await waits


async def test_a_batch_that_no_request_waits_for_and_nobody_else_is_given_back(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waits = asyncio.create_task(when_idle(engines, "gated", 2))
    await asyncio.sleep(0.02)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    engines.gate.open(1)
    await running
    runs = asyncio.create_task(when_idle(engines, "gated", 3))
    await engines.gate.started()
    runs.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runs
    engines.gate.open()
    assert await numbers(ask(engines, "gated", 4)) == [4]


async def test_a_batch_that_no_request_waits_for_may_fail(engines: Engines) -> None:
    with pytest.raises(ExecutionFailed, match=r"^model failing could not run this batch$"):
        await when_idle(engines, "failing", 1)


async def test_what_waits_for_an_idle_device_does_not_keep_a_model_from_its_end(engines: Engines) -> None:
    running = begin(engines, "gated", 1)
    await engines.gate.started()
    waits = asyncio.create_task(when_idle(engines, "gated", 2))
    await asyncio.sleep(0.02)
    drained = asyncio.create_task(engines.renew("gated", 20.0))
    with pytest.raises(ModelNotReady):
        await waits
    engines.gate.open()
    await running
    await drained


@pytest_asyncio.fixture
async def any_size(engines: Engines) -> AsyncIterator[Engines]:
    """A model, not used before, that takes other resolutions too."""
    await engines.renew("any size", 0.0)
    yield engines


async def ask_unmatched(
    engines: Engines, *numbers: int, size: tuple[int, int] = OTHER, mode: Mode = Mode.XLA
) -> tuple[Mode, list[int]]:
    """Returns the mode that images of a size without buckets ran in, and what was answered."""
    pixels = pictures(*numbers, size=size)
    with engines.engine("any size").admit(len(pixels), pixels.nbytes, size) as admitted:
        opened = await admitted.open(size, mode)
        result = await admitted.run(pixels, opened, math.inf)
    return opened, [int(number) for number in outputs_of(result)[0]]


async def test_a_resolution_without_buckets_runs_in_graph_mode_until_they_are_there(any_size: Engines) -> None:
    assert any_size.engine("any size").largest(Mode.GRAPH, *OTHER) == 0
    assert await ask_unmatched(any_size, 1, 2) == (Mode.GRAPH, [1, 2])
    assert await ask_unmatched(any_size, 3) == (Mode.GRAPH, [3])
    await any_size.compile()
    await until(lambda: any_size.engine("any size").largest(Mode.XLA, *OTHER) == max(COST_S))
    assert await ask_unmatched(any_size, 4) == (Mode.XLA, [4])


async def test_requests_that_come_together_open_a_resolution_together(any_size: Engines) -> None:
    asked = [asyncio.create_task(ask_unmatched(any_size, number)) for number in range(20)]
    await asyncio.sleep(0)
    asked[0].cancel()  # which takes nothing from the others
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [(Mode.GRAPH, [number]) for number in range(1, 20)]


async def test_a_resolution_that_is_not_taken_is_refused_before_it_is_admitted(any_size: Engines) -> None:
    for size, expected in (((2, 3), r"shape \[n, any, 2, 3\]"), ((2**22, 2), "at most 3276800 pixels")):
        with pytest.raises(InvalidArgument, match=f"pixels: expected {expected}"):
            any_size.engine("any size").admit(1, 1, size)
    with pytest.raises(InvalidArgument, match="pixels: expected a size that has buckets, got 3 x 2"):
        any_size.engine("numbers").admit(1, 1, OTHER)


async def test_no_more_resolutions_are_opened_than_there_are_places(any_size: Engines) -> None:
    sizes = [(height, 2) for height in range(6, 26)]
    outcomes = await asyncio.gather(*(ask_unmatched(any_size, 7, size=size) for size in sizes), return_exceptions=True)
    assert outcomes[:3] == [(Mode.GRAPH, [7])] * 3
    for outcome in outcomes[3:]:
        assert isinstance(outcome, InvalidArgument)
        assert "no more are taken (max_background_resolutions)" in str(outcome)
    assert await ask_unmatched(any_size, 8, size=sizes[0]) == (Mode.GRAPH, [8])


async def test_a_resolution_that_can_t_be_run_is_refused_each_time(any_size: Engines) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="pixels: expected a size that the network can take, got 5 x 2"):
            await ask_unmatched(any_size, 1, size=BROKEN)
