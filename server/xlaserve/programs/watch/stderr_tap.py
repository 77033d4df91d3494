"""Reads XLA's events of compilation from the process's stderr, and lets everything else through."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self, TextIO

from xlaserve.programs.watch.xla_log import VMODULE

FILES: Final = (
    "device_compiler.h",
    "device_executable_persistor.h",
    "xla_compiler.cc",
    "const_analysis.cc",
    "dump_graph.cc",
    "text_format.cc",
    "cpu_aot_loader.cc",
)
"""Source files whose lines are not passed on: those that VMODULE makes verbose, the one that complains that it has
nowhere to write the graphs of xla_compiler, and those that log as errors, whenever an executable is read from the
compile cache, that it is no text and that the processor lacks "features", preferences of the code generator."""
LAST_LINES_S: Final = 2.0
"""Longest time that the filter may take at the end to pass on the last lines."""
_STDERR: Final = 2
_OUT_OF_THE_WAY: Final = 10

log = logging.getLogger(__name__)


class StderrTap:
    """Passes the lines that this process's libraries write to stderr through a filter, a process of its own.

    Active while it is entered, which must be before TensorFlow is imported. Python's own sys.stderr and log lines are
    written straight to the original stderr: they are neither delayed nor lost, even if the filter dies. XLA logs the
    values of constants, which its events need, only where it has a folder of executables (`xla_executable_cache`).
    """

    def __init__(self) -> None:
        self._environment = {name: os.environ.get(name) for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE")}
        self._is_closing = False
        self._python_stderr: TextIO | None = None

    def __enter__(self) -> Self:
        if "tensorflow" in sys.modules:
            log.warning("TensorFlow was imported already: what XLA compiles is not seen")
        silenced = self._environment["TF_CPP_MIN_LOG_LEVEL"] or "0"
        theirs = self._environment["TF_CPP_VMODULE"]
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # at any other, there are no lines of VMODULE
        os.environ["TF_CPP_VMODULE"] = f"{theirs},{VMODULE}" if theirs else VMODULE
        self._stderr = _duplicate_stderr()
        lines, lines_in = os.pipe()
        self._events, events_in = os.pipe()
        # Isolated and without site-packages: it starts in some ten milliseconds.
        program = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stderr_filter.py")))
        severity = silenced if silenced.isdecimal() else "0"
        self._filter = subprocess.Popen(
            [*program, severity, *FILES], stdin=lines, stdout=events_in, stderr=self._stderr, start_new_session=True
        )
        for end in (lines, events_in):
            os.close(end)
        if sys.stderr is not None:
            sys.stderr.flush()
            self._python_stderr = sys.stderr
            _write_python_to(os.fdopen(os.dup(self._stderr), "w", buffering=1, errors="backslashreplace"))
        os.dup2(lines_in, _STDERR)
        os.close(lines_in)
        return self

    def restore_environment(self) -> None:
        """Restores the environment for processes that are started later; TensorFlow has read its variables."""
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def listen(self, hear: Callable[[str], object]) -> None:
        """Calls `hear` with each line of XLA's events, on a thread of its own."""
        threading.Thread(target=self._listen, args=(hear,), name="xla-events", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        """Puts stderr back where it was, once everything has come out."""
        self._is_closing = True
        self.restore_environment()
        os.dup2(self._stderr, _STDERR)  # closes the way into the filter, which then ends
        if self._python_stderr is not None:
            _write_python_to(self._python_stderr)
        try:
            self._filter.wait(LAST_LINES_S)
        except subprocess.TimeoutExpired:  # a process that was started meanwhile still holds stderr
            log.debug("the filter of stderr goes on for another process")
        os.close(self._stderr)

    def _listen(self, hear: Callable[[str], object]) -> None:
        with os.fdopen(self._events, errors="replace") as events:
            for line in events:
                try:
                    hear(line.rstrip("\n"))
                except Exception:  # if this stopped reading, the filter would wait for ever, and with it every library
                    log.exception("an event of XLA could not be understood: %s", line)
        if not self._is_closing:
            os.dup2(self._stderr, _STDERR)
            log.error("the filter of stderr has ended: recompilations by XLA are not seen any more")


def _duplicate_stderr() -> int:
    """Returns a descriptor of its own for stderr, or for nothing at all where stderr is closed."""
    try:
        return fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        duplicate = fcntl.fcntl(nowhere, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
        if nowhere != _STDERR:
            os.close(nowhere)
        return duplicate


def _write_python_to(stream: TextIO) -> None:
    before = sys.stderr
    sys.stderr = stream
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(stream)
