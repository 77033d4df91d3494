"""Resolutions without buckets, in virtual time: compilations take as long as the test says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.fakes import outputs_of

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Batch, Run
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Compilation, Executable, Images, Outputs, Warmed
from xlaserve.engine.warmup.background import Background
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.compiler import MIN_RUNS
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.verify import SAMPLE_IMAGES, Verifier
from xlaserve.errors import InvalidArgument, ModelFailed, ShuttingDown
from xlaserve.models.task import Embedding

RUN_S = 1.0
COMPILE_S = 100.0
NEVER = math.inf
SQUARE, WIDE, TALL, HUGE = (8, 8), (4, 8), (8, 4), (16, 16)
GRAPH_ANSWER = 0.0
ANSWERS = {Mode.XLA: 1.0, Mode.EAGER: 2.0, Mode.OPENVINO: 4.0, Mode.GRAPH: GRAPH_ANSWER}


class Compiler(Executor):
    """Compiles one after the other, each for COMPILE_S."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.submitted = 0
        self._loop = loop
        self._free_at = 0.0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.submitted += 1
        future: Future[Any] = Future()
        self._free_at = max(self._free_at, self._loop.time()) + COMPILE_S

        def end() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self._loop.call_at(self._free_at, end)
        return future


class House:
    """A model with a bucket of 4 for SQUARE, on one lane on which every batch takes RUN_S, or 3 in graph mode."""

    platform = "fake"

    def __init__(
        self,
        modes: tuple[Mode, ...] = (Mode.XLA,),
        verifier: Verifier | None = None,
        *,
        sides: tuple[int | None, int | None] = (None, None),
        resolutions: int = 2,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.compiler = Compiler(self.loop)
        self.compiled: list[tuple[Mode, Bucket]] = []
        self.compile_errors: dict[Mode, Exception] = {}
        self.refused: set[tuple[int, ...]] = set()
        self.seconds_of: Callable[[Mode, Bucket], float] = lambda mode, bucket: RUN_S
        self.ledger = Ledger("model", "1")
        self.running = 0
        self.expecting_depth = 0
        lanes = Lanes(1)
        self.batcher = Batcher(
            name="model",
            programs={(mode, Bucket(4, *SQUARE)): self._warmed(mode, RUN_S) for mode in modes},
            lanes=lanes,
            worker=self,  # type: ignore[arg-type]
            observer=self,
            max_images=1000,
            max_bytes=1_000_000,
            clock=self.loop.time,
        )
        settings = ModelSettings(name="model", source="fake", modes=modes, max_background_resolutions=resolutions)
        self.background = Background(
            settings=settings,
            any_size=self._executable(Mode.GRAPH),
            sides=sides,
            modes=settings.compiled_modes,
            buckets=[Bucket(1, *SQUARE), Bucket(2, *SQUARE), Bucket(4, *SQUARE)],
            batcher=self.batcher,
            beside=BesideTraffic(
                program=self,
                lanes=lanes,
                worker=self,  # type: ignore[arg-type]
                ledger=self.ledger,
                compiling=self.compiler,
                expecting=lambda step: self,
                verifier=verifier,
            ),
        )

    def __enter__(self) -> None:
        self.expecting_depth += 1

    def __exit__(self, *args: object) -> None:
        self.expecting_depth -= 1

    # A program

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        assert self.expecting_depth == 1
        if mode in self.compile_errors:
            raise self.compile_errors[mode]
        self.compiled.append((mode, bucket))
        return Compilation(self._executable(mode), trace_s=1.0, compile_s=2.0)

    def _executable(self, mode: Mode) -> Executable:
        def executable(images: Images) -> Outputs:
            if images.shape[1:3] in self.refused:
                raise ValueError("negative dimension\nof a convolution")
            return (np.full((len(images), 1), ANSWERS[mode], np.float32),)

        return executable

    def _warmed(self, mode: Mode, seconds: float) -> Warmed:
        return Warmed(self._executable(mode), Cost(seconds, seconds))

    # A worker

    def reserve(self, buckets: object) -> None: ...

    def free(self, buckets: object) -> None: ...

    def submit(self, batch: Batch, done: Callable[[Run | BaseException], object]) -> None:
        assert self.running <= 1  # one on the lane, and one that is gathered
        self.running += 1
        try:
            outputs = batch.executable(np.zeros((*batch.bucket, 3), np.uint8))
            mode = next(mode for mode in ANSWERS if ANSWERS[mode] == outputs[0][0, 0])
            seconds = self.seconds_of(mode, batch.bucket)
            result: Run | BaseException = Run(outputs, 0.0, 0.0, seconds)
        except Exception as error:
            result, seconds = error, RUN_S
        self.loop.call_later(seconds, self._end, result, done)

    def _end(self, result: Run | BaseException, done: Callable[[Run | BaseException], object]) -> None:
        self.running -= 1
        done(result)

    # An observer

    def batch_ran(self, *args: object) -> None: ...

    def batch_failed(self, *args: object) -> None: ...

    # A request

    async def ask(self, size: tuple[int, int], images: int = 1, mode: Mode = Mode.XLA) -> tuple[Mode, float]:
        """Returns the mode that a request ran in, and when it was answered."""
        mode = await self.background.open(size, mode)
        result = await self.batcher.run(np.zeros((images, *size, 3), np.uint8), mode, NEVER)
        answers = set(outputs_of(result)[0][:, 0])
        if mode is not Mode.AUTO:
            assert answers == {ANSWERS[mode]}
        return mode, self.loop.time()


@pytest_asyncio.fixture
async def make(virtual_time: object) -> AsyncIterator[Callable[..., House]]:
    houses = []

    def make_house(*args: Any, **options: Any) -> House:
        houses.append(House(*args, **options))
        return houses[-1]

    yield make_house
    for house in houses:
        await house.background.close()
        await house.batcher.drain(100.0)
        await asyncio.sleep(10 * COMPILE_S)


Make = Callable[..., House]


async def test_a_request_waits_for_runs_and_never_for_a_compilation(make: Make) -> None:
    house = make()
    assert await house.ask(WIDE) == (Mode.GRAPH, (MIN_RUNS + 1) * RUN_S)
    for _ in range(20):
        before = house.loop.time()
        mode, answered = await house.ask(WIDE, images=4)
        assert mode is Mode.GRAPH
        assert answered - before <= RUN_S
    assert house.compiler.submitted == 1
    assert not house.compiled


async def test_once_its_buckets_have_compiled_a_resolution_runs_in_them(make: Make) -> None:
    house = make()
    await house.ask(WIDE)
    await asyncio.sleep(4 * COMPILE_S)
    assert house.compiled == [(Mode.XLA, Bucket(batch, *WIDE)) for batch in (1, 2, 4)]
    mode, _ = await house.ask(WIDE, images=3)
    assert mode is Mode.XLA


async def test_no_request_runs_in_a_mode_of_which_a_bucket_is_missing(make: Make) -> None:
    house = make()
    await house.ask(WIDE)
    await asyncio.sleep(2.5 * COMPILE_S)
    assert len(house.compiled) == 2
    assert (await house.ask(WIDE))[0] is Mode.GRAPH


async def test_what_compiled_in_the_background_is_in_the_ledger_as_such(make: Make) -> None:
    house = make()
    await house.ask(WIDE)
    await asyncio.sleep(4 * COMPILE_S)
    assert [(entry.mode, entry.bucket) for entry in house.ledger] == house.compiled
    for entry in house.ledger:
        assert (entry.in_background, entry.trace_s, entry.compile_s) == (True, 1.0, 2.0)
        assert entry.cost == Cost(RUN_S, RUN_S)


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_what_a_resolution_is_verified_with_is_dropped_once_none_of_it_is_compiled_any_more(
    make: Make, is_wrong: bool
) -> None:
    asked: list[int] = []

    def reference(images: Images) -> Outputs:
        asked.append(len(images))
        return (np.full((len(images), 1), ANSWERS[Mode.XLA] + is_wrong, np.float32),)

    verifier = Verifier(task=Embedding(1), reference=reference, buckets=())
    house = make(verifier=verifier)
    await house.ask(WIDE)
    await asyncio.sleep(10 * COMPILE_S)
    assert (await house.ask(WIDE))[0] is (Mode.GRAPH if is_wrong else Mode.XLA)
    before = len(asked)
    executable = house._executable(Mode.GRAPH)
    with pytest.raises(ModelFailed):
        verifier.verify(Mode.XLA, Bucket(1, *WIDE), Compilation(executable, 0.0, 0.0), again=pytest.fail)
    assert len(asked) >= before + SAMPLE_IMAGES


async def test_requests_that_come_together_share_one_trial_and_one_compilation(make: Make) -> None:
    house = make()
    answers = await asyncio.gather(*(house.ask(WIDE) for _ in range(4)))
    assert {mode for mode, _ in answers} == {Mode.GRAPH}
    # One batch of all four after the trial.
    assert {answered for _, answered in answers} == {(MIN_RUNS + 1) * RUN_S}
    assert house.compiler.submitted == 1


@pytest.mark.timeout(30)
async def test_new_resolutions_that_come_together_are_all_served(make: Make) -> None:
    house = make(resolutions=3)
    answers = await asyncio.gather(*(house.ask(size) for size in (WIDE, TALL, (2, 2))))
    assert {mode for mode, _ in answers} == {Mode.GRAPH}
    assert max(answered for _, answered in answers) <= 3 * (MIN_RUNS + 1) * RUN_S
    await asyncio.sleep(20 * COMPILE_S)
    for size in (WIDE, TALL, (2, 2)):
        assert (await house.ask(size))[0] is Mode.XLA


async def test_a_first_request_that_is_cancelled_leaves_the_others_their_trial(make: Make) -> None:
    house = make()
    first = asyncio.create_task(house.ask(WIDE))
    await asyncio.sleep(RUN_S / 2)
    second = asyncio.create_task(house.ask(WIDE))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second)[0] is Mode.GRAPH


async def test_no_more_resolutions_are_taken_than_are_allowed_and_those_known_are_named(make: Make) -> None:
    house = make()
    await house.ask(WIDE)
    await house.ask(TALL)
    expected = (
        r"pixels: expected shape \[n, 4, 8, 3\] or \[n, 8, 4, 3\] or \[n, 8, 8, 3\];"
        r" no more are taken \(max_background_resolutions\), got 2 x 2"
    )
    with pytest.raises(InvalidArgument, match=expected):
        house.background.unmatched.check((2, 2))
    with pytest.raises(InvalidArgument, match="no more are taken"):
        await house.ask((2, 2))
    house.background.unmatched.check(WIDE)
    await asyncio.sleep(10 * COMPILE_S)
    assert {bucket[1:] for _, bucket in house.compiled} == {WIDE, TALL}


async def test_no_bucket_has_more_pixels_than_the_largest_that_was_configured(make: Make) -> None:
    house = make()
    await house.ask(HUGE)
    await asyncio.sleep(10 * COMPILE_S)
    assert house.compiled == [(Mode.XLA, Bucket(1, *HUGE))]
    with pytest.raises(InvalidArgument, match="expected at most 256 pixels an image, as the largest bucket has"):
        house.background.unmatched.check((16, 17))


async def test_sides_that_the_network_fixes_stay_as_they_are(make: Make) -> None:
    house = make(sides=(None, 8))
    house.background.unmatched.check(WIDE)
    with pytest.raises(InvalidArgument, match=r"expected shape \[n, any, 8, 3\], as the network takes no other"):
        house.background.unmatched.check(TALL)


async def test_what_the_network_cannot_run_is_refused_from_then_on_and_takes_one_place(make: Make) -> None:
    house = make()
    house.refused.add(WIDE)
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="pixels: expected a size that the network can take, got 4 x 8"):
            await house.ask(WIDE)
    assert house.compiler.submitted == 0
    assert (await house.ask(TALL))[0] is Mode.GRAPH
    with pytest.raises(InvalidArgument, match="no more are taken"):
        await house.ask((2, 2))


async def test_a_resolution_that_does_not_compile_stays_in_graph_mode(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    house = make()
    house.compile_errors[Mode.XLA] = ValueError("no kernel")
    await house.ask(WIDE)
    await asyncio.sleep(10 * COMPILE_S)
    assert (await house.ask(WIDE))[0] is Mode.GRAPH
    assert house.compiler.submitted == 1
    assert "model model: 4 x 8 stays in graph mode, as it did not compile" in caplog.text


async def test_auto_does_without_an_optional_mode_that_fails_at_a_resolution(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    house = make((Mode.AUTO,))
    house.compile_errors[Mode.OPENVINO] = ModelFailed("it computes something else")
    await house.ask(WIDE, mode=Mode.AUTO)
    await asyncio.sleep(20 * COMPILE_S)
    assert (await house.ask(WIDE, mode=Mode.AUTO))[0] is Mode.AUTO
    assert "model model: auto does without openvino at 4 x 8: it computes something else" in caplog.text


async def test_a_resolution_stays_in_graph_mode_where_a_mode_that_is_offered_fails(make: Make) -> None:
    house = make((Mode.AUTO, Mode.OPENVINO))
    house.compile_errors[Mode.OPENVINO] = ModelFailed("it computes something else")
    await house.ask(WIDE, mode=Mode.AUTO)
    await asyncio.sleep(20 * COMPILE_S)
    assert (await house.ask(WIDE, mode=Mode.AUTO))[0] is Mode.GRAPH


async def test_graph_mode_itself_needs_no_compilation(make: Make) -> None:
    house = make((Mode.GRAPH,))
    assert (await house.ask(WIDE, mode=Mode.GRAPH))[0] is Mode.GRAPH
    await asyncio.sleep(10 * COMPILE_S)
    assert house.compiler.submitted == 0


async def test_each_offered_mode_is_compiled_and_auto_takes_the_fastest_for_each_bucket(make: Make) -> None:
    house = make((Mode.AUTO, Mode.EAGER))
    # XLA is slower for single images.
    house.seconds_of = lambda mode, bucket: {Mode.GRAPH: 1.0 * bucket.batch, Mode.EAGER: 9.0}.get(mode, 1.5)
    assert (await house.ask(WIDE, mode=Mode.AUTO))[0] is Mode.GRAPH
    await asyncio.sleep(20 * COMPILE_S)
    assert {mode for mode, _ in house.compiled} == {Mode.EAGER, Mode.XLA, Mode.OPENVINO}
    assert (await house.ask(WIDE, mode=Mode.AUTO))[0] is Mode.AUTO
    assert (await house.ask(WIDE, mode=Mode.EAGER))[0] is Mode.EAGER
    single = await house.batcher.run(np.zeros((1, *WIDE, 3), np.uint8), Mode.AUTO, NEVER)
    several = await house.batcher.run(np.zeros((4, *WIDE, 3), np.uint8), Mode.AUTO, NEVER)
    assert (outputs_of(single)[0][0, 0], outputs_of(several)[0][0, 0]) == (GRAPH_ANSWER, ANSWERS[Mode.XLA])


async def test_timing_takes_its_turn_with_the_traffic(make: Make) -> None:
    house = make()
    await house.ask(WIDE)

    async def flood() -> None:
        while True:
            await house.batcher.run(np.zeros((4, *SQUARE, 3), np.uint8), Mode.XLA, NEVER)

    tasks = [asyncio.create_task(flood()) for _ in range(5)]
    await asyncio.sleep(5 * COMPILE_S)
    assert (await house.ask(WIDE))[0] is Mode.XLA
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_unloading_ends_trials_and_begins_no_compilation_more(make: Make) -> None:
    house = make()
    await house.ask(WIDE)
    await asyncio.sleep(COMPILE_S / 2)
    waits = asyncio.create_task(house.ask(TALL))
    await asyncio.sleep(RUN_S / 2)
    house.background.stop_compiling()
    await house.background.close()
    with pytest.raises(ShuttingDown):
        await waits
    await asyncio.sleep(10 * COMPILE_S)
    assert house.compiler.submitted == 1
    assert not house.batcher.largest(Mode.XLA, *WIDE)
