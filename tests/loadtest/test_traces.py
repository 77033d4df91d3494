"""Traces over real sockets: what a server receives when, and what is saved of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.loadtest.conftest import StartPuppet
from tests.required import required

from xlaserve_loadtest import cli
from xlaserve_loadtest.analysis.changes import differences
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.lines import Run
from xlaserve_loadtest.record.run_file import read_run

MODELS = json.dumps({"a": "xla,graph", "b": "graph,xla,eager"})

Received = list[tuple[int, str, str, str, tuple[int, ...], str]]
"""When, model, mode, input, shape, hash of the content."""
Replay = Callable[..., tuple[Run, Received]]


@pytest.fixture
def loadtest(given_ceiling: None, tmp_path: Path, start_puppet: StartPuppet) -> Replay:
    """Runs the command against a server of two models; returns the run, and what the server received."""
    log = tmp_path / "log.jsonl"
    target = start_puppet("--models", MODELS, "--any-size", "--log", str(log))

    def run(*arguments: str) -> tuple[Run, Received]:
        log.unlink(missing_ok=True)
        record = tmp_path / "one.run.jsonl.gz"
        options = ("--target", target, "--warmup", "0.1", "--no-control", "--equality-images", "0")
        assert cli.main([*options, "--record", str(record), *arguments]) == 0
        lines: list[Any] = [json.loads(line) for line in log.read_text().splitlines()]
        return read_run(record), [(*line[:4], tuple(line[4]), line[5]) for line in lines]

    return run


def in_blocks(run: Run, received: Received) -> list[tuple[list[int], Received]]:
    """Returns, for each block, when its measured requests were due, and what was received for each.

    Several workers of a busy machine may send out of order, but not those of the same model and number of images.
    """
    found = []
    for block in run.blocks:
        rows = np.sort(run.requests[run.requests["block"] == block.index], order="scheduled_ns")
        arm = next(arm for arm in run.header.arms if arm.name == block.arm)
        inside: dict[tuple[str, int], Received] = {}
        for line in sorted(received):
            if block.start_ns <= line[0] < block.end_ns:
                inside.setdefault((line[1], line[4][0]), []).append(line)
        pairs = [(row, inside[arm.served[row["model"]], int(row["images"])].pop(0)) for row in rows]
        assert not any(inside.values())
        measured = [(int(row["scheduled_ns"]), line) for row, line in pairs if row["measured"]]
        found.append(([at_ns for at_ns, _ in measured], [line for _, line in measured]))
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests 50 ms apart, of two models, numbers of images, sizes and files."""
    Image.new("RGB", (8, 6), "red").save(tmp_path / "red.png")
    (tmp_path / "more").mkdir()
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "more" / "blue.png")
    lines: list[dict[str, object]] = [
        {"model": "a", "images": 2, "file": "red.png"},
        {"model": "b", "file": "more/blue.png"},
        {"model": "b", "images": 3, "size": "10x12"},
        {"model": "a", "images": 4},
        {"model": "a", "file": "red.png"},
    ] * 2
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"at_s": 0.05 * turn, **line}) + "\n" for turn, line in enumerate(lines)))
    return path


@pytest.mark.parametrize("workers", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_server_receives_each_traced_request_at_its_time_in_every_arm(
    loadtest: Replay, trace: Path, workers: str
) -> None:
    run, received = loadtest("--replay", str(trace), "--size", "7x9", "--workers", workers)
    files = [trace.parent / "red.png", trace.parent / "more" / "blue.png"]
    red, blue = ((len(file.read_bytes()), file.read_bytes()) for file in files)

    def encoded(content: tuple[int, bytes], images: int) -> str:
        return hashlib.sha256((content[0].to_bytes(4, "little") + content[1]) * images).hexdigest()

    expected = [
        ("a", (2,), encoded(red, 2)),
        ("b", (1,), encoded(blue, 1)),
        ("b", (3,), None),
        ("a", (4,), None),
        ("a", (1,), encoded(red, 1)),
    ] * 2
    assert [arm.models for arm in run.header.arms] == [("a", "b")] * 2
    assert {block.arm for block in run.blocks} == {"xla", "graph"}
    contents = set()
    for due_ns, inside in in_blocks(run, received):
        first_ns = due_ns[0]
        assert [at_ns - first_ns for at_ns in due_ns] == [50_000_000 * turn for turn in range(10)]
        assert [line[1] for line in inside] == [model for model, _, _ in expected]
        assert [line[4] for line in inside] == [shape for _, shape, _ in expected]
        assert all(line[5] == content for line, (_, _, content) in zip(inside, expected, strict=True) if content)
        # Nothing came before its time, and not long after it, however busy the machine is.
        late_ns = [line[0] - at_ns for line, at_ns in zip(inside, due_ns, strict=True)]
        assert min(late_ns) >= 0
        assert float(np.median(late_ns)) < 500e6
        contents.add(tuple(line[5] for line in inside))
    # All blocks of all arms had the same contents.
    assert len(contents) == 1
    kinds = {(line[1], line[4]) for line in received}
    assert kinds == {(model, shape) for model, shape, _ in expected}


def test_a_report_names_its_trace_and_each_of_its_models(loadtest: Replay, trace: Path) -> None:
    run, _ = loadtest("--replay", str(trace), "--mode", "xla", "--size", "7x9", "--workers", "1")
    (document,) = run.header.configuration["loops"]
    assert document["sha256"] == hashlib.sha256(trace.read_bytes()).hexdigest()
    assert (document["path"], document["requests"], document["kinds"]) == (str(trace), 10, 5)
    summary = summarize(run)
    differs = "2 models, 2 sizes, 1 to 4 images, 2 files"
    text = f"Replayed: {trace}: 10 requests in 0.5 s, of 5 kinds ({differs}), SHA-256 {document['sha256'][:12]}…."
    assert text in summary.notes
    assert [(model, point.requests) for model, point in summary.by_model] == [("a", 6), ("b", 4)]
    (arm,) = run.header.arms
    assert arm.model == "a:0.6,b:0.4"


def test_runs_of_different_traces_are_not_concluded_from(loadtest: Replay, trace: Path) -> None:
    options = ("--replay", str(trace), "--mode", "xla", "--size", "7x9", "--workers", "1")
    one, same = loadtest(*options)[0], loadtest(*options)[0]
    trace.write_text(trace.read_text() + "# the same requests\n")
    other = loadtest(*options)[0]
    assert "trace" not in {found.name for found in differences(one, same)}
    assert "trace" in {found.name for found in differences(one, other) if found.is_reason}


def test_a_run_of_a_mix_that_was_saved_is_sent_again(loadtest: Replay, tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    mix = ("--mix", "a:0.6,b:0.4", "--images-per-request", "1:0.5,2:0.5", "--size", "8x8:0.5,6x4:0.5")
    first = loadtest(*mix, *("--mode", "xla", "--rate", "40", "--duration", "1", "--save-arrivals", str(saved)))
    again = loadtest("--replay", str(saved), "--mode", "xla", "--workers", "2")
    (one_ns, one), (two_ns, two) = (in_blocks(*ran)[0] for ran in (first, again))
    starts = [required(ran[0].blocks[0].window_ns)[0] for ran in (first, again)]
    assert [at_ns - starts[0] for at_ns in one_ns] == [at_ns - starts[1] for at_ns in two_ns]
    assert len(one_ns) > 20
    rows = [ran[0].requests[ran[0].requests["measured"]] for ran in (first, again)]
    model, images = (
        [own[np.argsort(own["scheduled_ns"], kind="stable")][what].tolist() for own in rows]
        for what in ("model", "images")
    )
    assert (model[0], images[0]) == (model[1], images[1])
    shapes = [sorted(line[3:5] for line in inside) for inside in (one, two)]
    assert shapes[0] == shapes[1]
    assert len(set(shapes[0])) == 4


def test_the_duration_cuts_a_trace(loadtest: Replay, trace: Path) -> None:
    run, _ = loadtest("--replay", str(trace), "--mode", "xla", "--size", "7x9", "--duration", "0.22")
    assert run.header.configuration["loops"][0]["requests"] == 5
    assert int(run.requests["measured"].sum()) == 5


def test_models_together_run_in_the_modes_that_all_have(
    loadtest: Replay, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = loadtest("--replay", str(trace), "--mode", "all", "--size", "7x9", "--duration", "0.12")
    assert [arm.name for arm in run.header.arms] == ["xla", "graph"]
    assert "mode eager is left out: a has no such" in capsys.readouterr().err


def test_a_model_that_the_target_lacks_is_named(
    tmp_path: Path, start_puppet: StartPuppet, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text('{"at_s": 0, "model": "digits"}\n{"at_s": 1, "model": "cats"}\n')
    options = ("--target", start_puppet(), "--out", str(tmp_path))
    assert cli.main([*options, "--replay", str(tmp_path / "trace.jsonl")]) == 1
    assert "NOT_FOUND: no model cats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        ("[1, 2]", (), "line 1: expected a request on each line, got a JSON list"),
        ('{"at_s": 0, "model": "a"}', ("--model", "b"), "names the model of each request: --mix and --model are of"),
        ('{"at_s": 0, "model": "a"}', ("--mix", "b,c"), "names the model of each request: --mix and --model are of"),
        ('{"at_s": 0, "model": "a"}\n1', ("--model", "b,c"), "names models: expected --mix, or one --model"),
        ('{"at_s": 0, "model": "a"}', ("--target", "null"), "names a model: --target null has one"),
        ('{"at_s": 0, "model": "a"}', ("--arm", "x=h:1,model=b"), "names models: no --arm can have one of its own"),
        ("2", ("--duration", "1"), "its first request is due after 2 s, and --duration is shorter"),
        ("2", ("--save-arrivals", "/nowhere/x"), "--save-arrivals: expected a file in a folder that exists"),
        ('{"at_s": 0, "file": "trace.jsonl"}', ("--in-process",), "--in-process takes pixels"),
        ('{"at_s": 0, "file": "trace.jsonl"}', ("--save-arrivals", "/here.jsonl"), "expected a file in the folder of"),
    ],
)
def test_a_trace_that_does_not_fit_the_options_is_refused(
    tmp_path: Path, text: str, arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(SystemExit):
        cli.main(["--replay", str(tmp_path / "trace.jsonl"), *arguments])
    assert reason in capsys.readouterr().err
