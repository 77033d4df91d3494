from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench import gpu, gpu_fronts

PLAN = gpu.Plan({"M": 8}, (1, 64), 32, 8, 5, 10.0)
ROW = gpu.Row(
    "M",
    "TF32",
    {"eager": {1: 10.0, 64: 20.0}, "graph": {1: 30.0, 64: 1234.5}, "xla": {1: 50.0, 64: 60.0}},
    {"graph": (200.0, 190.0, 210.0), "xla": (500.0, 450.0, 550.0)},
)


def test_a_model_has_a_line_for_each_mode_and_its_ratio_when_served() -> None:
    lines = gpu.report([ROW], PLAN, "H200, driver 580").splitlines()
    assert lines[0].startswith("H200, driver 580, ")
    assert "| model | numbers | mode | 1 | 64 |" in lines
    assert "| M | TF32 | graph | 30 | 1,234 |" in lines
    assert "| M | TF32 | 200 (190 to 210) | 500 (450 to 550) | 2.50 |" in lines


def test_only_the_part_between_the_marks_is_replaced() -> None:
    begin, end = gpu.marks(gpu.TARGET)
    once = gpu.page(f"# GPUs\n\n{begin}\n{end}\n\nMore.\n", "one\n")
    assert once == f"# GPUs\n\n{begin}\n\none\n\n{end}\n\nMore.\n"
    assert gpu.page(once, "two\n") == once.replace("one", "two")


@pytest.mark.parametrize("target", [gpu.TARGET, gpu_fronts.TARGET])
def test_the_page_has_the_marks(target: str) -> None:
    text = gpu.PAGE.read_text()
    assert [text.count(mark) for mark in gpu.marks(target)] == [1, 1]


@pytest.mark.parametrize("module", ["bench.gpu", "bench.gpu_fronts"])
def test_without_a_gpu_nothing_is_measured_and_the_page_stays_as_it_is(module: str) -> None:
    before = gpu.PAGE.read_bytes()
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "PATH": "/nonexistent"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "expected an NVIDIA GPU, found none" in done.stderr
    assert gpu.PAGE.read_bytes() == before
