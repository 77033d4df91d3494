"""The command, as a process: it has to set XLA's flags before anything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.conftest import CommandLine

from xlaserve.inspection import hlo

TIMEOUT_S = 120


def explain(*arguments: object) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("XLASERVE_")}
    command = [sys.executable, "-m", "xlaserve", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)


def test_a_model_is_explained_and_everything_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    peak = ("--peak-gflops", 100, "--bandwidth-gbs", 10)
    done = explain("digits", "--bucket", 2, "--json", "--out", out, *peak)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["bucket"]) == ("digits", [2, 32, 32])
    assert told["machine"] == {"flops_per_s": 100e9, "bytes_per_s": 10e9}
    assert told["machine_is_measured"] is False
    assert 0 < told["bound_s"] < told["measured_s"]
    assert told["memory"]["outputs"] == 2 * 10 * 4
    traced = [row for row in told["rows"] if row["measured_s"] is not None]
    assert len(traced) > len(told["rows"]) / 2, "the trace names the instructions of the program"

    for name in ("hlo.txt", "optimized_hlo.txt"):
        assert hlo.parse((out / name).read_text()).entry.parameters[0].shape.dims == (2, 32, 32, 3)
    assert "stablehlo" in (out / "stablehlo.mlir").read_text()
    assert "digits 2x32x32" in (out / "explain.html").read_text()
    assert json.loads((out / "explain.json").read_text()) == told


def test_what_each_layer_takes_in_openvino_is_told() -> None:
    done = explain("digits", "--mode", "openvino", "--bucket", 2, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["bucket"], told["precision"]) == ("digits", [2, 32, 32], "float32")
    assert any("Convolution" in layer["operation"] for layer in told["layers"])
    assert 0 < told["layers_s"] == pytest.approx(sum(layer["seconds"] for layer in told["layers"]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("unheard",), "expected a configured model (digits) or a source such as"),
        (("builtin:noop",), "which XLA does not compile"),
    ],
)
def test_a_model_that_can_not_be_explained_is_refused_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    done = explain(*arguments)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--mode", "openvino", "--stage", "hlo"), 1, "--stage: expected --mode xla with it, got --mode openvino"),
        (("--bucket", "2x"), 2, "expected 8 or 8x224x224, got 2x"),
        (("--bucket", "0"), 2, "expected 8 or 8x224x224, got 0"),
        (("--peak-gflops", "nan"), 2, "expected a number greater than 0, got 'nan'"),
        (("--out", "/dev/null/out"), 1, "--out: expected a folder to write to, got /dev/null/out"),
    ],
)
def test_options_that_can_not_be_used_are_refused_in_a_line(
    arguments: tuple[str, ...], status: int, says: str, command_line: CommandLine
) -> None:
    done = command_line("explain", "digits", *arguments)
    assert done.returncode == status
    assert says in done.stderr.splitlines()[-1]
    assert done.stdout == ""
