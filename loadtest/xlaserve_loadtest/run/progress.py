"""Progress of a run on stderr: a live line in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live as LiveDisplay
from rich.text import Text

from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.run.sender import Live
from xlaserve_loadtest.run.watch import Watch

_RATE_S: Final = 2.0
_KEEP: Final = 200
"""Number of looks whose latencies make the shown p99: the last fifty seconds."""
_MIN_P99: Final = 459


class Progress:
    """Use it as a context manager; `say` is for steps, `arm` and `live` for what goes on."""

    def __init__(self, console: Console | None = None, watch: Watch | None = None) -> None:
        self.watch = watch or Watch()
        """Counts what `live` is called with."""
        self._console = console or Console(stderr=True)
        self._display: LiveDisplay | None = None
        if self._console.is_terminal:
            self._display = LiveDisplay(Text("starting"), console=self._console, transient=True, refresh_per_second=4)
        self._phase = ""
        self._ends_s: float | None = None
        self._errors = 0
        self._looks: deque[tuple[float, int]] = deque()
        self._latencies_ms: deque[NDArray[np.float32]] = deque(maxlen=_KEEP)

    def __enter__(self) -> Progress:
        if self._display:
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display:
            self._display.stop()

    def say(self, text: str) -> None:
        """Shows a step that was taken."""
        self._console.print(printable(text), markup=False, highlight=False)

    def show(self, text: str) -> None:
        """Shows what is going on right now, such as a server's log line."""
        if text and self._display:
            self._display.update(Text(printable(text), no_wrap=True, overflow="ellipsis"))

    def arm(self, phase: str, left_s: float | None) -> None:
        """Shows that another phase began; `left_s` is how long the whole run still takes."""
        if not self._phase.startswith(phase.partition(":")[0]):
            self._latencies_ms.clear()
        self._phase = phase
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._looks.clear()

    def live(self, live: Live) -> None:
        """Shows answers that came in."""
        now_s = time.monotonic()
        self.watch.add(live)
        self._errors += live.errors
        self._looks.append((now_s, live.images))
        while self._looks[0][0] < now_s - _RATE_S:
            self._looks.popleft()
        self._latencies_ms.append(live.latencies_ms)
        if self._display:
            self._display.update(Text(printable(self.line()), no_wrap=True, overflow="ellipsis"))

    def line(self) -> str:
        """Returns the text of the live line."""
        parts = [self._phase, f"{self._images_per_s():,.0f} images/s", f"p99 {self._p99()}", f"{self._errors} errors"]
        if self._ends_s is not None:
            parts.append(f"{max(0.0, self._ends_s - time.monotonic()):.0f} s left")
        return "  ".join(parts)

    def _images_per_s(self) -> float:
        if len(self._looks) < 2:
            return 0.0
        # The first look includes earlier answers.
        images = sum(images for _, images in list(self._looks)[1:])
        return images / max(self._looks[-1][0] - self._looks[0][0], 1e-9)

    def _p99(self) -> str:
        seen_ms = np.concatenate(self._latencies_ms) if self._latencies_ms else np.empty(0)
        return "-" if seen_ms.size < _MIN_P99 else f"{np.quantile(seen_ms, 0.99):,.1f} ms"
