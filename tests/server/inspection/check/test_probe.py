from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from xlaserve.config import Mode, ModelSettings, Settings
from xlaserve.engine.inputs import Images, Rows
from xlaserve.engine.program import Compilation, Outputs
from xlaserve.engine.warmup.compiler import warm_up
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.errors import ModelFailed
from xlaserve.inspection.check import probe
from xlaserve.inspection.check.probe import difference
from xlaserve.inspection.check.record import Assignment
from xlaserve.models import catalog, verification
from xlaserve.models.sources.noop import NoopProgram
from xlaserve.models.task import Detection, Segmentation

NOOP = ModelSettings(name="m", source="builtin:noop", buckets=(1, 4))


def model(task: Any = None) -> catalog.Model:
    loaded = catalog.load(NOOP)
    return loaded if task is None else catalog.Model(**{**vars(loaded), "task": task})


def probed(folder: Path, *modes: Mode) -> list[dict[str, Any]]:
    """What a process that checks `NOOP` writes."""
    said: list[dict[str, Any]] = []
    assignment = Assignment(settings=Settings(models=(NOOP,)), modes=modes, lowerings=True)
    probe.Probe(assignment, folder, said.append).check()
    return said


def floats(*values: float) -> Outputs:
    return (np.array([values], np.float32),)


def test_the_difference_is_the_largest_of_any_row_relative_to_eager() -> None:
    outputs = (np.array([[1.0, -4.0], [1.0, -4.5]], np.float32),)
    assert difference(model(), floats(1.0, -4.0), outputs) == (0.125, None)


def test_outputs_equal_everywhere_tell_nothing_unless_a_mode_differs() -> None:
    assert difference(model(), floats(0.0, 0.0), floats(0.0, 0.0)) == (None, None)
    assert difference(model(), floats(0.0, 0.0), floats(0.0, 0.5)) == (0.5, None)


def test_nan_is_as_far_as_can_be_unless_eager_gives_it_too() -> None:
    nan = float("nan")
    assert difference(model(), floats(1.0, 2.0), floats(1.0, nan))[0] == np.inf
    assert difference(model(), floats(2.0, nan), floats(2.0, nan))[0] == 0.0
    assert difference(model(), floats(2.0, nan), floats(2.0, 3.0))[0] == np.inf


def test_detections_are_compared_by_score_and_integers_by_differing_share() -> None:
    task = Detection(3, max_detections=2)

    def found(box: float, score: float, index: int) -> Outputs:
        return (
            np.full((1, 2, 4), box, np.float32),
            np.array([[1.0, score]], np.float32),
            np.array([[2, index]], np.int32),
            np.array([2], np.int32),
        )

    assert difference(model(task), found(1, 0.5, 1), found(9, 0.75, 0)) == (0.25, 0.5)
    pixels = np.arange(8, dtype=np.uint8).reshape(1, 2, 4)
    assert difference(model(Segmentation(8)), (pixels,), (pixels[:, ::-1],)) == (None, 1.0)


def test_a_model_is_tried_in_every_arm_eager_with_one_batch(tmp_path: Path) -> None:
    said = probed(tmp_path, Mode.EAGER, Mode.GRAPH, Mode.XLA)
    programs = [line["program"] for line in said if "program" in line]
    assert [(program["arm"], program["batch"]) for program in programs] == [
        *(("eager", 1), ("graph", 1), ("graph", 4), ("xla", 1)),
        ("xla", 4),
    ]
    assert [program["difference"] for program in programs] == [None, 0.0, 0.0, 0.0, 0.0]
    assert all(program["run_ms"] >= 0 for program in programs)
    facts = {key: value for line in said for key, value in line.items()}
    assert (facts["task"], facts["size"]) == ("classification", (224, 224))
    assert facts["machine"]["packages"]["numpy"] == np.__version__


def test_a_mode_that_fails_or_is_slow_leaves_the_others_to_be_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = NoopProgram.compile

    def compile(self: NoopProgram, mode: Mode, bucket: Any) -> Compilation:
        if mode is Mode.GRAPH:
            raise ValueError("no such kernel")
        return whole(self, mode, bucket)

    def run(executable: Any, rows: Rows) -> tuple[float, Outputs]:
        return probe.SLOW_S + 1, executable(*rows)

    monkeypatch.setattr(NoopProgram, "compile", compile)
    monkeypatch.setattr(probe, "_run", run)
    said = probed(tmp_path, Mode.GRAPH, Mode.XLA)
    one, four, fast, slow = (line["program"] for line in said if "program" in line)
    assert one["refusal"]["message"] == four["refusal"]["message"] == "ValueError: no such kernel"
    assert fast["run_ms"] == 6_000
    assert slow["skipped"] == "a smaller batch took 6 s"
    assert slow["refusal"] is None


def test_a_program_that_gives_nan_where_eager_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = NoopProgram.compile

    def compile(self: NoopProgram, mode: Mode, bucket: Any) -> Compilation:
        compilation = whole(self, mode, bucket)
        if mode is Mode.EAGER:
            return compilation
        return Compilation(lambda images: (compilation.executable(images)[0] * np.float32("nan"),), 0.0, 0.0)

    monkeypatch.setattr(NoopProgram, "compile", compile)
    said = probed(tmp_path, Mode.EAGER, Mode.XLA)
    eager, *others = (line["program"] for line in said if "program" in line)
    assert eager["refusal"] is None
    assert {other["refusal"]["message"] for other in others} == {"gives NaN or infinity where eager does not"}


@pytest.mark.parametrize("level", [0, 127, 255])
def test_a_program_is_refused_for_its_rows_as_at_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: int
) -> None:
    whole = NoopProgram.compile

    def compile(self: NoopProgram, mode: Mode, bucket: Any) -> Compilation:
        compilation = whole(self, mode, bucket)

        def run(images: Images) -> Outputs:
            return tuple(output[(images != level).any(axis=(1, 2, 3))] for output in compilation.executable(images))

        return Compilation(run, 0.0, 0.0)

    monkeypatch.setattr(NoopProgram, "compile", compile)
    said = probed(tmp_path, Mode.GRAPH)
    one, four = (line["program"] for line in said if "program" in line)
    loaded = model()
    for program, bucket in zip((one, four), loaded.buckets, strict=True):
        with pytest.raises(ModelFailed) as raised:
            warm_up(
                program=loaded.program,
                modes=[Mode.GRAPH],
                buckets=[bucket],
                timer=Mock(),
                ledger=Ledger("m", "1"),
                stop=threading.Event(),
                verifier=verification.verifier(loaded, has_tf32=False, warn=Mock()),
            )
        assert program["refusal"]["message"] == str(raised.value)
        assert f"expected {bucket.batch} row" in program["refusal"]["message"]
