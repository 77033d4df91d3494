"""Output of the commands: the progress of a warm-up, the ledger, tables and JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from typing import Self, TextIO, TypeGuard

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from xlaserve.config import Settings
from xlaserve.engine.warmup.ledger import Entry

log = logging.getLogger(__name__)


class WarmUpProgress:
    """Shows the warm-up of all models: a bar on a terminal; log lines elsewhere, and for models that are loaded
    later."""

    def __init__(self, settings: Settings) -> None:
        self._total = sum(model.most_programs for model in settings.models)
        self._done = 0
        self._has_ended = False
        self._bar: Progress | None = None
        self._log: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        """Log handlers and the streams that they wrote to before there was a bar."""
        console = Console(stderr=True)
        if console.is_terminal and settings.log_format == "human":
            columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("warming up", total=self._total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()  # redirects sys.stderr, so that lines written there appear above the bar
            self._log = [(one, one.stream) for one in logging.getLogger().handlers if _writes_stream(one)]
            for handler, _ in self._log:
                handler.setStream(sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Removes the bar; some models may have failed."""
        self._has_ended = True
        if self._bar:
            for handler, stream in self._log:
                handler.setStream(stream)
            self._log = []
            self._bar.stop()

    def record(self, entry: Entry) -> None:
        """Shows a program that was compiled. May be called on any thread."""
        self._done += 1
        if self._bar and not self._has_ended:
            self._bar.update(self._task, advance=1, description=f"{entry.model} {entry.mode} {entry.bucket}")
            return
        log.info(
            "model %s: %s %s %s in %.2f s, runs in %.2f ms%s%s",
            entry.model,
            entry.mode,
            entry.bucket,
            "loaded" if entry.from_cache else "compiled",
            entry.trace_s + entry.compile_s,
            entry.cost.alone_s * 1000,
            " (background)" if entry.in_background else "",
            "" if self._has_ended else f" ({self._done} of {self._total})",
        )


def _writes_stream(handler: logging.Handler) -> TypeGuard[logging.StreamHandler[TextIO]]:
    return isinstance(handler, logging.StreamHandler)


def stdout(width: int, *, markup: bool = True) -> Console:
    """Returns a console that prints on stdout, `width` columns wide where stdout is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=markup)


def print_json(value: object) -> None:
    """Prints JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_ledger(entries: Iterable[Entry], as_json: bool) -> None:
    """Prints the ledger on stdout, as a table or as JSON."""
    if as_json:
        print_json([ledger_json(entry) for entry in entries])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    table.add_column("mode")
    for title in ("bucket", "trace s", "compile s", "run ms", "all lanes ms", "images/s", "ready at"):
        table.add_column(title, justify="right")
    table.add_column("how")
    for entry in entries:
        table.add_row(
            entry.model,
            entry.mode,
            str(entry.bucket),
            f"{entry.trace_s:.2f}",
            f"{entry.compile_s:.2f}",
            f"{entry.cost.alone_s * 1000:.2f}",
            f"{entry.cost.loaded_s * 1000:.2f}",
            f"{entry.bucket.batch / entry.cost.alone_s:.0f}",
            f"{entry.at.astimezone():%m-%d %H:%M:%S}",
            ", ".join(["from cache"] * entry.from_cache + ["in background"] * entry.in_background),
        )
    stdout(120).print(table)


def ledger_json(entry: Entry) -> dict[str, object]:
    """Returns an entry as JSON's types; units stand in the names."""
    return {
        "model": entry.model,
        "version": entry.version,
        "mode": str(entry.mode),
        "bucket": list(entry.bucket),
        "trace_s": entry.trace_s,
        "compile_s": entry.compile_s,
        "run_s": entry.cost.alone_s,
        "run_loaded_s": entry.cost.loaded_s,
        "from_cache": entry.from_cache,
        "in_background": entry.in_background,
        "at": entry.at.isoformat(timespec="milliseconds"),
    }
