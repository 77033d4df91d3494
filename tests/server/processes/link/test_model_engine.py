"""Answers, deadlines and errors of every `ModelEngine`: in this process and in another one, alone and spread."""

from __future__ import annotations

import asyncio
import math
import random
import time

import numpy as np
import pytest
from tests.fakes import outputs_of
from tests.server.processes.link.engines import Engines, until, until_admitted
from tests.server.processes.link.models import LARGE, MAP_SIDE, SMALL, TALL, pictures
from tests.server.processes.link.requests import ask, begin, numbers, takes

from xlaserve.config import Mode
from xlaserve.engine.request import EncodedRequest, EngineRequest
from xlaserve.engine.trace_context import new
from xlaserve.errors import DeadlineExceeded, DeadlineUnreachable, ExecutionFailed, ModelNotReady, ShuttingDown


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


@pytest.mark.parametrize("in_place", [False, True])
async def test_images_of_one_channel_take_a_third_of_the_bytes(engines: Engines, in_place: bool) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (3, *SMALL, 1), dtype=np.uint8)
    with engines.engine("grey").admit(3, pixels.nbytes) as admitted:
        given = admitted.buffer(3, SMALL) if in_place else (pixels,)
        given[0][...] = pixels
        result = await admitted.run(EngineRequest(given, Mode.XLA, math.inf))
    assert outputs_of(result)[0].tolist() == pixels[:, -1, -1, 0].tolist()


async def test_pixels_that_are_not_contiguous_are_taken(engines: Engines) -> None:
    pixels = np.broadcast_to(pictures(7)[:, :1, :1], (1, *SMALL, 3))
    with engines.engine("numbers").admit(1, pixels.nbytes) as admitted:
        result = await admitted.run(EngineRequest((pixels,), Mode.XLA, math.inf))
    assert outputs_of(result)[0] == [7]


async def test_answers_outlive_their_request(engines: Engines) -> None:
    answers = [await ask(engines, "numbers", number, number + 1) for number in range(0, 100, 2)]
    assert [int(number) for answer in answers for number in outputs_of(answer)[0]] == [*range(100)]


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


async def test_encoded_images_are_refused_if_decoding_would_take_too_long(engines: Engines) -> None:
    engine = engines.engine("numbers")
    now = time.perf_counter()
    request = EncodedRequest(1, now + 0.001, 2, [(Mode.XLA, *SMALL)], decode_s=1.0, decoding=0)
    engine.check_encoded(request)  # nothing waits
    engine.check_encoded(request._replace(deadline=now + 9.0, decoding=3))
    with pytest.raises(DeadlineUnreachable, match="model numbers: the deadline is in 0"):
        engine.check_encoded(request._replace(deadline=now + 0.5, decoding=3))


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
