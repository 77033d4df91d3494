"""Checks models one after the other, each in a process of its own that may crash, leak or never end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import IO, Any, Final, NamedTuple

from xlaserve.config import Mode, ModelSettings, Settings
from xlaserve.inspection.check.record import Assignment, Checked

PROBE: Final = (sys.executable, "-m", "xlaserve.inspection.check.probe")


class Candidate(NamedTuple):
    """A model to check."""

    name: str
    """The model as the command named it: a configured name, or a source."""
    settings: ModelSettings


def check(
    candidate: Candidate,
    *,
    server: Settings,
    modes: Sequence[Mode],
    batches: Sequence[int],
    lowerings: bool,
    timeout_s: float,
    on_step: Callable[[str], object] = lambda step: None,
    command: Sequence[str] = PROBE,
) -> Checked:
    """Checks one model and returns the record; blocks for at most `timeout_s`.

    `on_step` is called with the name of each step before it begins. `command` starts the process that reads the
    assignment.
    """
    assignment = Assignment(
        settings=server.model_copy(update={"models": (candidate.settings.alone,)}),
        modes=tuple(modes),
        lowerings=lowerings,
    )
    found: dict[str, Any] = {"programs": []}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as stderr, _started(command, stderr) as process:
        timer = threading.Timer(timeout_s, _kill, (process,))
        timer.start()
        try:
            _send(process, assignment)
            for step in _read(process, found):
                on_step(step)
            status = process.wait()
        finally:
            timer.cancel()
        seconds = time.perf_counter() - began
        trying = found.pop("trying", None)
        if not found.pop("is_done", False):  # a library may end the process with status 0
            at = f", at {trying}" if trying else ", before the first program"
            is_late = status == -signal.SIGKILL and seconds >= timeout_s
            reason = f"not done in {timeout_s:g} s" if is_late else _death(status, stderr)
            found["failure"] = f"{reason}{at}"
    return Checked.model_validate(
        {
            "name": candidate.name,
            "source": candidate.settings.source,
            "modes": tuple(modes),
            "batches": tuple(batches),
            "lowerings": lowerings,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": seconds,
            **found,
        }
    )


def _send(process: subprocess.Popen[bytes], assignment: Assignment) -> None:
    assert process.stdin
    try:
        process.stdin.write(assignment.model_dump_json().encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:  # it died at once, and its status tells why
        with suppress(BrokenPipeError):  # discards the unsent bytes now, or a later close would try to send them
            process.stdin.close()


def _read(process: subprocess.Popen[bytes], found: dict[str, Any]) -> Iterator[str]:
    """Adds the findings that the process writes to `found`, and yields the name of each step before it begins."""
    assert process.stdout
    for line in process.stdout:
        try:
            finding = json.loads(line)
        except ValueError:  # it was killed in the middle of a line
            return
        if program := finding.pop("program", None):
            found["programs"].append(program)
        found |= finding
        if step := finding.get("trying"):
            yield step


def _death(status: int, stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"its process died: {how}{f': {lines[-1][:200]}' if lines else ''}"


@contextmanager
def _started(command: Sequence[str], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with (
        # Its temporary files are removed, however it ends.
        tempfile.TemporaryDirectory(prefix="xlaserve-check-", ignore_cleanup_errors=True) as folder,
        # A process group of its own: Ctrl-C does not reach it but ends it from here, and a kill reaches all its
        # children.
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
