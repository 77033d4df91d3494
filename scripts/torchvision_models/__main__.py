"""Tries models of torchvision one by one, and writes docs/torchvision.md.

Needs xlaserve[cpu,torch] and torchvision. Models that are in the file of records already are not tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from scripts.torchvision_models import page, record
from scripts.torchvision_models.record import COMPARED, FACTS, SIDE, SIDES, Tried

from xlaserve.programs.tf.device import cores, cpu_name

STEP_S: Final = 120.0
"""The longest that exporting, and that importing, compiling and comparing a model may take."""


def attempt(name: str, step_s: float) -> Tried:
    """Exports a model, imports it and compares."""
    side = SIDES.get(name, SIDE)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    with TemporaryDirectory(prefix="torchvision-") as temporary:
        folder = Path(temporary)
        failed = _run("export", [name, str(side), str(folder)], step_s)
        failed = failed or _run("compare", [str(folder)], step_s)
        facts: dict[str, Any] = {}
        for file in (folder / FACTS, folder / COMPARED):
            found = json.loads(file.read_text()) if file.exists() else {}
            facts = facts | found | {"versions": facts.get("versions", {}) | found.get("versions", {})}
    return Tried(name=name, side=side, at=at, machine=f"{cpu_name()}, {cores()} cores", failed=failed, **facts)


def _run(step: str, arguments: list[str], step_s: float) -> str:
    """Runs a step; returns why it failed, or nothing."""
    command = [sys.executable, "-m", f"scripts.torchvision_models.{step}", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            _, said = started.communicate(timeout=step_s)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with the program that it runs itself
            return f"{step}: not done in {step_s:g} s"
    if not started.returncode:
        return ""
    *_, last = said.splitlines() or [f"ended with {started.returncode}"]
    return f"{step}: {last}"


def main() -> None:
    """Tries the models, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.torchvision_models", description=__doc__)
    parser.add_argument("records", type=Path, help="a file for the results, a line of JSON for each model")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="models to try; none only writes the page")
    parser.add_argument("--step", type=float, default=STEP_S, help="most seconds for a step of a model (%(default)s)")
    arguments = parser.parse_args()
    known = record.read(arguments.records)
    for name in record.names() if arguments.only is None else arguments.only:
        if name not in known or arguments.only:
            tried = attempt(name, arguments.step)
            record.add(arguments.records, tried)
            print(name, tried.failed or tried.differences, flush=True)
    page.write(record.read(arguments.records))


if __name__ == "__main__":
    main()
