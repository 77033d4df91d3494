"""Reports that are written of a run, and lines that several tests of reports write into one."""

from __future__ import annotations

from pathlib import Path

from tests.loadtest.run_files import RunFile

from xlaserve_loadtest.record.lines import Equality
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.run.equality_run import not_compared

DIFFERENT = Equality("xla", "graph", 64, 1.0, 1.0, 0.5, 1e-4, 1e-3, is_equal=False, differing=16)
INCOMPARABLE = not_compared("xla", "graph", "m answers y FP32 [n,8] against y FP32 [n,4]")


def published(file: RunFile, tmp_path: Path, format: str, *conditions: str) -> str:
    out = tmp_path / "out"
    words = [word for condition in conditions for word in ("--fail-if", condition)]
    report.main([str(file.write()), *words, f"--{format}", str(out)])
    return out.read_text()
