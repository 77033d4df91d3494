"""Resolutions without buckets, in virtual time: compilations take as long as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.fakes import outputs_of
from tests.server.engine.warmup.background_model import (
    ANSWERS,
    COMPILE_S,
    GRAPH_ANSWER,
    HUGE,
    NEVER,
    RUN_S,
    SQUARE,
    TALL,
    WIDE,
    BackgroundModel,
)

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Outputs
from xlaserve.engine.request import EngineRequest
from xlaserve.engine.warmup.compiler import MIN_RUNS
from xlaserve.engine.warmup.verify import SAMPLE_IMAGES, Verifier
from xlaserve.errors import InvalidArgument, ModelFailed, ShuttingDown
from xlaserve.models.task import Embedding


@pytest_asyncio.fixture
async def make(virtual_time: object) -> AsyncIterator[Callable[..., BackgroundModel]]:
    models = []

    def make_model(*args: Any, **options: Any) -> BackgroundModel:
        models.append(BackgroundModel(*args, **options))
        return models[-1]

    yield make_model
    for model in models:
        await model.background.close()
        await model.batcher.drain(100.0)
        await asyncio.sleep(10 * COMPILE_S)


Make = Callable[..., BackgroundModel]


async def test_a_request_waits_for_runs_and_never_for_a_compilation(make: Make) -> None:
    model = make()
    assert await model.ask(WIDE) == (Mode.GRAPH, (MIN_RUNS + 1) * RUN_S)
    for _ in range(20):
        before = model.loop.time()
        mode, answered = await model.ask(WIDE, images=4)
        assert mode is Mode.GRAPH
        assert answered - before <= RUN_S
    assert model.compiler.submitted == 1
    assert not model.compiled


async def test_once_its_buckets_have_compiled_a_resolution_runs_in_them(make: Make) -> None:
    model = make()
    await model.ask(WIDE)
    await asyncio.sleep(4 * COMPILE_S)
    assert model.compiled == [(Mode.XLA, Bucket(batch, *WIDE)) for batch in (1, 2, 4)]
    mode, _ = await model.ask(WIDE, images=3)
    assert mode is Mode.XLA


async def test_no_request_runs_in_a_mode_of_which_a_bucket_is_missing(make: Make) -> None:
    model = make()
    await model.ask(WIDE)
    await asyncio.sleep(2.5 * COMPILE_S)
    assert len(model.compiled) == 2
    assert (await model.ask(WIDE))[0] is Mode.GRAPH


async def test_what_compiled_in_the_background_is_in_the_ledger_as_such(make: Make) -> None:
    model = make()
    await model.ask(WIDE)
    await asyncio.sleep(4 * COMPILE_S)
    assert [(entry.mode, entry.bucket) for entry in model.ledger] == model.compiled
    for entry in model.ledger:
        assert (entry.in_background, entry.trace_s, entry.compile_s) == (True, 1.0, 2.0)
        assert entry.cost == Cost(RUN_S, RUN_S)


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_verification_data_of_a_resolution_ends_with_its_last_program(make: Make, is_wrong: bool) -> None:
    asked: list[int] = []

    def reference(images: Images) -> Outputs:
        asked.append(len(images))
        return (np.full((len(images), 1), ANSWERS[Mode.XLA] + is_wrong, np.float32),)

    verifier = Verifier(task=Embedding(1), reference=reference, buckets=())
    model = make(verifier=verifier)
    await model.ask(WIDE)
    await asyncio.sleep(10 * COMPILE_S)
    assert (await model.ask(WIDE))[0] is (Mode.GRAPH if is_wrong else Mode.XLA)
    before = len(asked)
    executable = model._executable(Mode.GRAPH)
    with pytest.raises(ModelFailed):
        verifier.verify(Mode.XLA, Bucket(1, *WIDE), Compilation(executable, 0.0, 0.0), again=pytest.fail)
    assert len(asked) >= before + SAMPLE_IMAGES


async def test_requests_that_come_together_share_one_trial_and_one_compilation(make: Make) -> None:
    model = make()
    answers = await asyncio.gather(*(model.ask(WIDE) for _ in range(4)))
    assert {mode for mode, _ in answers} == {Mode.GRAPH}
    # One batch of all four after the trial.
    assert {answered for _, answered in answers} == {(MIN_RUNS + 1) * RUN_S}
    assert model.compiler.submitted == 1


@pytest.mark.timeout(30)
async def test_new_resolutions_that_come_together_are_all_served(make: Make) -> None:
    model = make(resolutions=3)
    answers = await asyncio.gather(*(model.ask(size) for size in (WIDE, TALL, (2, 2))))
    assert {mode for mode, _ in answers} == {Mode.GRAPH}
    assert max(answered for _, answered in answers) <= 3 * (MIN_RUNS + 1) * RUN_S
    await asyncio.sleep(20 * COMPILE_S)
    for size in (WIDE, TALL, (2, 2)):
        assert (await model.ask(size))[0] is Mode.XLA


async def test_a_first_request_that_is_cancelled_leaves_the_others_their_trial(make: Make) -> None:
    model = make()
    first = asyncio.create_task(model.ask(WIDE))
    await asyncio.sleep(RUN_S / 2)
    second = asyncio.create_task(model.ask(WIDE))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second)[0] is Mode.GRAPH


async def test_resolutions_beyond_the_bound_are_refused_and_the_known_ones_named(make: Make) -> None:
    model = make()
    await model.ask(WIDE)
    await model.ask(TALL)
    expected = (
        r"pixels: expected shape \[n, 4, 8, 3\] or \[n, 8, 4, 3\] or \[n, 8, 8, 3\];"
        r" no more are taken \(max_background_resolutions\), got 2 x 2"
    )
    with pytest.raises(InvalidArgument, match=expected):
        model.background.unmatched.check((2, 2))
    with pytest.raises(InvalidArgument, match="no more are taken"):
        await model.ask((2, 2))
    model.background.unmatched.check(WIDE)
    await asyncio.sleep(10 * COMPILE_S)
    assert {bucket[1:] for _, bucket in model.compiled} == {WIDE, TALL}


async def test_no_bucket_has_more_pixels_than_the_largest_that_was_configured(make: Make) -> None:
    model = make()
    await model.ask(HUGE)
    await asyncio.sleep(10 * COMPILE_S)
    assert model.compiled == [(Mode.XLA, Bucket(1, *HUGE))]
    with pytest.raises(InvalidArgument, match="expected at most 256 pixels an image, as the largest bucket has"):
        model.background.unmatched.check((16, 17))


async def test_sides_that_the_network_fixes_stay_as_they_are(make: Make) -> None:
    model = make(sides=(None, 8))
    model.background.unmatched.check(WIDE)
    with pytest.raises(InvalidArgument, match=r"expected shape \[n, any, 8, 3\], as the network takes no other"):
        model.background.unmatched.check(TALL)


async def test_a_size_that_the_network_cannot_run_stays_refused_in_one_place(make: Make) -> None:
    model = make()
    model.refused.add(WIDE)
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="pixels: expected a size that the network can take, got 4 x 8"):
            await model.ask(WIDE)
    assert model.compiler.submitted == 0
    assert (await model.ask(TALL))[0] is Mode.GRAPH
    with pytest.raises(InvalidArgument, match="no more are taken"):
        await model.ask((2, 2))


async def test_a_resolution_that_does_not_compile_stays_in_graph_mode(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    model.compile_errors[Mode.XLA] = ValueError("no kernel")
    await model.ask(WIDE)
    await asyncio.sleep(10 * COMPILE_S)
    assert (await model.ask(WIDE))[0] is Mode.GRAPH
    assert model.compiler.submitted == 1
    assert "model model: 4 x 8 stays in graph mode, as it did not compile" in caplog.text


async def test_auto_does_without_an_optional_mode_that_fails_at_a_resolution(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = make((Mode.AUTO,))
    model.compile_errors[Mode.OPENVINO] = ModelFailed("it computes something else")
    await model.ask(WIDE, mode=Mode.AUTO)
    await asyncio.sleep(20 * COMPILE_S)
    assert (await model.ask(WIDE, mode=Mode.AUTO))[0] is Mode.AUTO
    assert "model model: auto does without openvino at 4 x 8: it computes something else" in caplog.text


async def test_a_resolution_stays_in_graph_mode_when_an_offered_mode_fails(make: Make) -> None:
    model = make((Mode.AUTO, Mode.OPENVINO))
    model.compile_errors[Mode.OPENVINO] = ModelFailed("it computes something else")
    await model.ask(WIDE, mode=Mode.AUTO)
    await asyncio.sleep(20 * COMPILE_S)
    assert (await model.ask(WIDE, mode=Mode.AUTO))[0] is Mode.GRAPH


async def test_graph_mode_itself_needs_no_compilation(make: Make) -> None:
    model = make((Mode.GRAPH,))
    assert (await model.ask(WIDE, mode=Mode.GRAPH))[0] is Mode.GRAPH
    await asyncio.sleep(10 * COMPILE_S)
    assert model.compiler.submitted == 0


async def test_each_offered_mode_is_compiled_and_auto_takes_the_fastest(make: Make) -> None:
    model = make((Mode.AUTO, Mode.EAGER))
    # XLA is slower for single images.
    model.seconds_of = lambda mode, bucket: {Mode.GRAPH: 1.0 * bucket.batch, Mode.EAGER: 9.0}.get(mode, 1.5)
    assert (await model.ask(WIDE, mode=Mode.AUTO))[0] is Mode.GRAPH
    await asyncio.sleep(20 * COMPILE_S)
    assert {mode for mode, _ in model.compiled} == {Mode.EAGER, Mode.XLA, Mode.OPENVINO}
    assert (await model.ask(WIDE, mode=Mode.AUTO))[0] is Mode.AUTO
    assert (await model.ask(WIDE, mode=Mode.EAGER))[0] is Mode.EAGER
    single = await model.batcher.run(EngineRequest((np.zeros((1, *WIDE, 3), np.uint8),), Mode.AUTO, NEVER))
    several = await model.batcher.run(EngineRequest((np.zeros((4, *WIDE, 3), np.uint8),), Mode.AUTO, NEVER))
    assert (outputs_of(single)[0][0, 0], outputs_of(several)[0][0, 0]) == (GRAPH_ANSWER, ANSWERS[Mode.XLA])


async def test_timing_takes_its_turn_with_the_traffic(make: Make) -> None:
    model = make()
    await model.ask(WIDE)

    async def flood() -> None:
        while True:
            await model.batcher.run(EngineRequest((np.zeros((4, *SQUARE, 3), np.uint8),), Mode.XLA, NEVER))

    tasks = [asyncio.create_task(flood()) for _ in range(5)]
    await asyncio.sleep(5 * COMPILE_S)
    assert (await model.ask(WIDE))[0] is Mode.XLA
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_unloading_ends_trials_and_begins_no_compilation_more(make: Make) -> None:
    model = make()
    await model.ask(WIDE)
    await asyncio.sleep(COMPILE_S / 2)
    waits = asyncio.create_task(model.ask(TALL))
    await asyncio.sleep(RUN_S / 2)
    model.background.stop_compiling()
    await model.background.close()
    with pytest.raises(ShuttingDown):
        await waits
    await asyncio.sleep(10 * COMPILE_S)
    assert model.compiler.submitted == 1
    assert not model.batcher.largest(Mode.XLA, *WIDE)
