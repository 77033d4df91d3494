"""The life of models, on programs that compile and run when the test says so."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.required import required
from tests.server.models.house import Gate, GateAt, House, model

from xlaserve.config import AutoBuckets, Bucket, ExampleSettings, Mode, ModelSettings, model_files
from xlaserve.engine import under_way
from xlaserve.engine.buckets import demand
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Inputs
from xlaserve.engine.under_way import UnderWay
from xlaserve.engine.warmup.difference import Difference
from xlaserve.errors import ModelFailed, ModelNotReady
from xlaserve.models.load_turns import LoadTurns
from xlaserve.models.version import State

REFUSED = ValueError(
    "Detected unsupported operations: ResizeBicubic (No registered 'ResizeBicubic' OpKernel for XLA_CPU_JIT devices)"
    '{{node a/ResizeBicubic}}\nThe op is created at: \nFile "a/b/own.py", line 3, in shrink\nmuch more'
)
"""TensorFlow's error where XLA can't compile a model."""


async def test_a_model_loads_compiles_and_serves(house: House) -> None:
    await house.repository.load_all()
    assert house.changes == [("a", State.LOADING), ("a", State.COMPILING), ("a", State.READY)]
    assert await house.ask(images=5) == [1] * 5
    assert house.repository.is_ready
    assert house.repository.serving() == {"a": True}


async def test_the_files_of_a_model_are_not_looked_at_on_the_event_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, threads = model_files.state, set[int]()

    def state(settings: ModelSettings) -> frozenset[model_files.File]:
        threads.add(threading.get_ident())
        return look(settings)

    monkeypatch.setattr(model_files, "state", state)
    await house.repository.load_all()
    assert threads
    assert threading.get_ident() not in threads


async def test_warm_up_covers_every_mode_and_bucket_and_is_in_the_ledger(house: House) -> None:
    await house.repository.load_all()
    expected = [(mode, Bucket(batch, 2, 2)) for mode in (Mode.XLA, Mode.GRAPH) for batch in (1, 2)]
    (version,) = house.repository.index()
    assert house.compiled == expected
    assert [(entry.mode, entry.bucket) for entry in version.ledger] == expected
    assert list(version.ledger) == house.entries


async def test_progress_is_seen_while_a_model_compiles(house: House) -> None:
    house.compiling.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.compiling.reached()
    (version,) = house.repository.index()
    assert version.state is State.COMPILING
    assert version.progress == "0 of 4 programs compiled"
    assert not house.repository.is_ready
    with pytest.raises(ModelNotReady, match="model a is compiling"):
        house.repository.get("a")
    house.compiling.open()
    await loading
    assert version.progress == ""


async def test_a_failure_in_warm_up_fails_the_model_with_one_line(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.compile_error = RuntimeError("unsupported operation: ResizeBicubic\n  at line 10")
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.state is State.FAILED
    assert version.reason == "RuntimeError: unsupported operation: ResizeBicubic"
    assert version.model is None, "its memory is given back"
    with pytest.raises(ModelFailed, match="ResizeBicubic"):
        house.repository.get("a")
    assert "at line 10" in caplog.text


async def test_a_failure_is_told_by_the_line_that_names_the_cause(house: House) -> None:
    house.compile_error = ValueError("Graph execution error:\n\nDetected at node a\nno kernel in '/srv/my models/a.so'")
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.reason == "ValueError: no kernel in 'a.so'"


@pytest.mark.parametrize("error", [ModelFailed(""), RuntimeError(), RuntimeError("\n\nlate")])
async def test_an_error_without_words_is_a_reason_all_the_same(house: House, error: Exception) -> None:
    house.compile_error = error
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.reason.strip()


@pytest.mark.parametrize("error", [SystemExit("no licence"), KeyboardInterrupt("no licence")])
async def test_a_model_whose_code_exits_fails_and_the_server_goes_on(
    make_house: Callable[..., House], error: BaseException
) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("a"), model("b")]
    house.load_errors["a"] = error
    await house.repository.load_all()
    assert house.repository.serving() == {"a": False, "b": True}
    version, _ = house.repository.index()
    assert version.reason == f"the model's own code raised {type(error).__name__}: no licence"


async def test_buckets_that_come_out_alike_are_counted_once(house: House) -> None:
    house.configured = [model("a", buckets=(1, [1, 2, 2], 4))]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.programs_total == len(version.ledger) == 4


async def test_auto_buckets_are_chosen_for_recorded_demand_and_serve_alone(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(executable: object, bucket: Bucket, lanes: int, *, inputs: Inputs) -> Cost:
        return Cost(1.0 + bucket.batch, 1.0 + bucket.batch)

    monkeypatch.setattr("xlaserve.models.loader.measure", cost)
    demand.write(tmp_path / "demand.json", {(2, 2): Counter({3: 100})})
    choice = AutoBuckets(max_batch=4, demand=tmp_path / "demand.json")
    house.configured = [model("a", buckets="auto", auto_buckets=choice)]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.model is not None
    assert version.model.buckets == (Bucket(3, 2, 2),)
    assert sorted(house.compiled) == [(Mode.GRAPH, Bucket(3, 2, 2))] + [
        (Mode.XLA, Bucket(batch, 2, 2)) for batch in (1, 2, 3, 4)
    ]
    assert version.programs_total == len(version.ledger) == 5
    assert await house.ask(images=5) == [1] * 5


async def test_a_mode_that_fails_in_a_late_candidate_serves_no_earlier_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter(range(1, 100))
    monkeypatch.setattr("xlaserve.models.loader.measure", lambda *_, **__: Cost(*[1 / next(costs)] * 2))
    house.compile_errors[Mode.OPENVINO, Bucket(3, 2, 2)] = ModelFailed("no kernel")
    house.configured = [model("a", modes=("auto",), buckets="auto", auto_buckets=AutoBuckets(max_batch=4))]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert (Mode.OPENVINO, Bucket(1, 2, 2)) in house.compiled
    assert version.left_out == {Mode.OPENVINO}
    assert version.warnings == ["auto does without openvino: no kernel"]
    assert set(version.auto.values()) <= {Mode.XLA, Mode.GRAPH}
    assert await house.ask(images=5) == [1] * 5


async def test_auto_does_without_xla_where_that_fails_and_says_so_once(house: House) -> None:
    house.configured = [model("a", modes=("auto",), buckets=(1, 2))]
    house.compile_errors = {(Mode.XLA, Bucket(batch, 2, 2)): REFUSED for batch in (1, 2)}
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.state is State.READY
    assert version.left_out == {Mode.XLA}
    assert version.warnings == ["auto does without xla: XLA has no kernel for ResizeBicubic, at own.py:3"]
    assert set(version.auto.values()) <= {Mode.GRAPH, Mode.OPENVINO}
    assert await house.ask(images=2) == [1] * 2


@pytest.mark.parametrize("modes", [("xla",), ("graph", "xla"), ("auto", "xla")])
async def test_a_mode_that_is_offered_fails_the_model_in_one_line(
    house: House, modes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    house.configured = [model("a", modes=modes, buckets=(1, 2))]
    house.compile_errors[Mode.XLA, Bucket(1, 2, 2)] = REFUSED
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.state is State.FAILED
    assert version.reason == (
        "XLA has no kernel for ResizeBicubic, at own.py:3; `modes: [graph]` or `[auto]` serve what XLA can't compile"
    )
    assert not any("much more" in record.getMessage() or record.exc_info for record in caplog.records)


async def test_a_model_without_python_fails_with_the_operation_and_its_node(house: House) -> None:
    house.configured = [model("a", modes=("xla",), buckets=(1,))]
    house.compile_errors[Mode.XLA, Bucket(1, 2, 2)] = ValueError(
        str(REFUSED).partition("File")[0] + "dummy_file_name:10:f"
    )
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.reason == (
        "XLA has no kernel for ResizeBicubic, node a/ResizeBicubic;"
        " `modes: [graph]` or `[auto]` serve what XLA can't compile"
    )


async def test_where_auto_has_no_mode_left_the_model_fails_with_the_first_reason(house: House) -> None:
    house.configured = [model("a", modes=("auto",), buckets=(1,))]
    house.compile_errors = {
        (Mode.XLA, Bucket(1, 2, 2)): ModelFailed("of another number of rows"),
        (Mode.GRAPH, Bucket(1, 2, 2)): ModelFailed("the same"),
        (Mode.OPENVINO, Bucket(1, 2, 2)): ModelFailed("not installed", lacks_mode=True),
    }
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert (version.state, version.reason) == (State.FAILED, "of another number of rows")


async def test_an_unreadable_demand_fails_the_model_before_any_compilation(house: House, tmp_path: Path) -> None:
    choice = AutoBuckets(demand=tmp_path / "none.json")
    house.configured = [model("a", buckets="auto", auto_buckets=choice)]
    with pytest.raises(ModelFailed, match=r"auto_buckets\.demand: none\.json: No such file or directory"):
        await house.repository.load_all()
    assert not house.compiled


async def test_with_ready_when_first_bucket_no_request_waits_for_the_others(make_house: Callable[..., House]) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(4, 1, 2))]
    gate = house.compiling = GateAt(3)  # two modes of the first bucket come before
    await house.repository.load_all()
    assert house.repository.is_ready
    await gate.reached()
    assert await house.ask(images=4) == [1] * 4
    assert [(entry.bucket.batch, entry.in_background) for entry in house.entries] == [(1, False)] * 2
    gate.open()
    await required(house.repository.index()[0].growth)
    assert [(entry.bucket.batch, entry.in_background) for entry in house.entries[2:]] == [(2, True)] * 2 + [
        (4, True)
    ] * 2
    assert await house.ask(images=4) == [1] * 4


@pytest.mark.parametrize("ready_when", ["all", "first_bucket"])
async def test_what_compiles_is_noted_as_a_load_with_its_step(
    make_house: Callable[..., House], ready_when: str
) -> None:
    house = make_house(ready_when=ready_when)
    house.configured = [model("a", buckets=(1, 2), modes=(Mode.XLA,))]
    gate = house.compiling = GateAt(2)
    file = under_way.create()
    house.repository.loader.under_way = UnderWay(file)
    loading = asyncio.create_task(house.repository.load_all())
    await gate.reached()
    suspect = under_way.Suspect(is_load=True, title="a", steps="compiling mode xla, bucket 2x2x2")
    assert under_way.suspects(file, "") == {under_way.key_of(house.configured[0]): suspect}
    gate.open()
    await loading
    if ready_when == "first_bucket":
        await required(house.repository.index()[0].growth)
    assert not under_way.suspects(file, "")
    os.close(file)


async def test_a_bucket_that_never_compiles_does_not_keep_others_from_compiling(
    make_house: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model(name, buckets=(1, 2), modes=(Mode.XLA,)) for name in "ab"]
    house.repository.loader.background_turns = LoadTurns(patience_s=0.05)
    gate = house.compiling = GateAt(2)
    loading = asyncio.create_task(house.repository.load_all())
    await gate.reached()
    house.compiling = Gate()
    await loading
    _, other = house.repository.index()
    await required(other.growth)
    assert [(entry.model, entry.bucket.batch) for entry in house.entries] == [("a", 1), ("b", 1), ("b", 2)]
    assert "model a: compiling mode xla, bucket 2x2x2 has taken" in caplog.text
    await asyncio.wait_for(house.repository.unload("a"), 20)
    gate.open()


async def test_a_bucket_that_fails_to_compile_beside_traffic_leaves_the_others(
    make_house: Callable[..., House],
) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(1, 2, 4), modes=(Mode.XLA,))]

    def fail() -> None:
        house.compile_error = ValueError("no kernel")

    house.compiling = GateAt(2, fail)
    await house.repository.load_all()
    await required(house.repository.index()[0].growth)
    assert [entry.bucket.batch for entry in house.entries] == [1]
    assert await house.ask(images=3) == [1] * 3


async def test_auto_serves_a_bucket_without_the_mode_that_fails_in_it(make_house: Callable[..., House]) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(1, 2), modes=("auto",))]
    house.compile_errors[Mode.OPENVINO, Bucket(2, 2, 2)] = ModelFailed("no kernel")
    await house.repository.load_all()
    (version,) = house.repository.index()
    await required(version.growth)
    assert [entry.mode for entry in house.entries if entry.bucket.batch == 2] == [Mode.XLA, Mode.GRAPH]
    assert version.auto[Bucket(2, 2, 2)] in {Mode.XLA, Mode.GRAPH}
    assert version.warnings == ["auto does without openvino: no kernel"]


def photos(folder: Path, answer: float) -> ExampleSettings:
    """Makes examples of a model whose loading with this number is right."""
    Image.new("RGB", (3, 3)).save(folder / "photo.png")
    np.savez(folder / "predictions.npz", files=["photo.png"], scores=np.full((1, 1), answer))
    return ExampleSettings(folder=folder)


async def test_a_model_is_compared_with_its_examples_before_it_is_ready(house: House, tmp_path: Path) -> None:
    house.configured = [model("a", examples=photos(tmp_path, 1.0))]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.examples == {mode: Difference(0.0, 1.0, 1) for mode in (Mode.XLA, Mode.GRAPH)}
    assert version.examples_text == "graph: {0}; xla: {0}".format("largest difference 0, agreement 1.000 of 1 images")


async def test_a_model_that_answers_its_examples_otherwise_never_serves(house: House, tmp_path: Path) -> None:
    house.configured = [model("a", examples=photos(tmp_path, 2.0))]
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert (version.state, version.examples) == (State.FAILED, {})
    assert version.reason.startswith("examples: mode graph: largest difference 0.5")


async def test_a_reload_that_fails_its_examples_keeps_the_model_before_it(house: House, tmp_path: Path) -> None:
    house.configured = [model("a", examples=photos(tmp_path, 1.0))]
    await house.repository.load_all()
    with pytest.raises(ModelFailed, match="examples"):  # the second loading answers 2
        await house.repository.load("a")
    assert await house.ask() == [1]
