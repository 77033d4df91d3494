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


class Asked(NamedTuple):
    """A model to check."""

    name: str
    """What it was asked for by."""
    settings: ModelSettings


def check(
    asked: Asked,
    *,
    server: Settings,
    modes: Sequence[Mode],
    batches: Sequence[int],
    lowerings: bool,
    timeout_s: float,
    on_step: Callable[[str], object] = lambda step: None,
    command: Sequence[str] = PROBE,
) -> Checked:
    """Returns what the check of one model found out; blocks for at most `timeout_s`.

    `on_step` is called with what is tried next. `command` is the process that reads the assignment.
    """
    assignment = Assignment(
        settings=server.model_copy(update={"models": (asked.settings.alone,)}), modes=tuple(modes), lowerings=lowerings
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
            "name": asked.name,
            "source": asked.settings.source,
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
    except BrokenPipeError:  # it died at once, which its status shows
        with suppress(BrokenPipeError):  # what it did not read goes with it, before anybody else tries to send it
            process.stdin.close()


def _read(process: subprocess.Popen[bytes], found: dict[str, Any]) -> Iterator[str]:
    """Puts what the process writes into `found`, and yields what it tries next."""
    assert process.stdout
    for line in process.stdout:
        try:
            said = json.loads(line)
        except ValueError:  # it was killed in the middle of a line
            return
        if program := said.pop("program", None):
            found["programs"].append(program)
        found |= said
        if step := said.get("trying"):
            yield step


def _death(status: int, stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"its process died: {how}{f': {lines[-1][:200]}' if lines else ''}"


@contextmanager
def _started(command: Sequence[str], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with (
        # Its temporary files go with it, however it ends.
        tempfile.TemporaryDirectory(prefix="xlaserve-check-", ignore_cleanup_errors=True) as folder,
        # A group of its own: a Ctrl-C ends it here, in order, and a kill takes all that it has started with it.
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
