"""Counts the compilations that XLA reports, and tells expected ones from those that a request waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from xlaserve.programs.watch.xla_log import Reader, XlaCompilation

SLACK_S: Final = 0.05
"""Two clocks are compared, and a compilation is timed inside of what it was made for."""
REMEMBERED: Final = 100
KNOWN: Final = XlaCompilation(
    "xlaserve_known", ("f32[3]",), "f32[3]", constants=(), from_cache=False, seconds=0.0, at_s=0.0, thread=0
)
"""The compilation that the watch has to see to be trusted: TensorFlow's name of the function contains this one."""
PATIENCE_S: Final = 5.0
"""Longest time until the line of a compilation arrives: it comes through another process."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class CompileWatch:
    """Counts what XLA compiled: `on_compiled` is called with each, and whether it was expected.

    A program from XLA's cache was not compiled, and counts only where a request waited for it all the same.

    A compilation is expected while an `expecting` is open: a model is loaded, warmed, or given another bucket.
    A thread that runs batches may never compile, not even then; `is_serving` knows them by their number.
    """

    on_compiled: Callable[[XlaCompilation, bool], None]
    is_serving: Callable[[int], bool]
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._reader = Reader()
        self._lock = threading.Lock()
        self._open: list[float] = []
        self._past: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self.unexpected: deque[XlaCompilation] = deque(maxlen=REMEMBERED)
        """The latest unexpected compilations."""
        self.is_blind: bool | None = None
        """Whether XLA compiles unseen; None where that was not checked."""
        self._known = threading.Event()

    def check(self, compile_known: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        """Finds out whether the watch `is_blind`: `compile_known` has XLA compile KNOWN. Blocks.

        TensorFlow's log is no interface: another version may write it otherwise, and silence would look like success.
        """
        with self.expecting():
            try:
                compile_known()
                self.is_blind = not self._known.wait(patience_s)
            except Exception:  # a model that can't be compiled reports that itself
                log.debug("the known function could not be compiled", exc_info=True)
                self.is_blind = True
        if self.is_blind:
            log.warning(
                "XLA's events are not understood: what it compiles while serving goes unseen, and"
                " xlaserve_xla_compilations_total stays at 0"
            )

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Compilations that begin meanwhile are expected. On any thread, several at a time."""
        began = self.clock()
        with self._lock:
            self._open.append(began)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(began)
                # Lines arrive later than the compilations that they report.
                self._past.append((began, self.clock()))

    def read(self, line: str) -> None:
        """Takes a line of XLA's events."""
        compilation = self._reader.read(line)
        if compilation is None:
            return
        if _is_known(compilation):
            self._known.set()
            return
        is_expected = self._is_expected(compilation)
        if is_expected and compilation.from_cache:
            return
        if not is_expected:
            self.unexpected.append(compilation)
            log.error(
                "XLA %s while serving, for %.0f ms: %s",
                "loaded from its cache" if compilation.from_cache else "compiled",
                compilation.seconds * 1000,
                compilation,
                extra={
                    "function": compilation.function,
                    "arguments": compilation.arguments,
                    "result": compilation.result,
                    "constants": compilation.constants,
                    "compile_s": compilation.seconds,
                },
            )
        self.on_compiled(compilation, is_expected)

    def _is_expected(self, compilation: XlaCompilation) -> bool:
        if self.is_serving(compilation.thread):
            return False
        began_s = compilation.at_s - compilation.seconds
        with self._lock:
            return any(opened - SLACK_S <= began_s for opened in self._open) or any(
                opened - SLACK_S <= began_s <= closed + SLACK_S for opened, closed in self._past
            )


def _is_known(compilation: XlaCompilation) -> bool:
    described = (compilation.arguments, compilation.result, compilation.constants)
    return KNOWN.function in compilation.function and described == (KNOWN.arguments, KNOWN.result, KNOWN.constants)
