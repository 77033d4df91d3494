"""What the commands show: the progress of a warm-up, and the ledger."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from xlaserve.config import Settings
from xlaserve.engine.ledger import Entry

log = logging.getLogger(__name__)


@contextmanager
def warm_up_progress(settings: Settings) -> Iterator[Callable[[Entry], None]]:
    """Shows the warm-up of all models: a bar on a terminal, log lines elsewhere."""
    total = sum(len(model.modes) * len(model.buckets) for model in settings.models)
    console = Console(stderr=True)
    if not console.is_terminal or settings.log_format == "json":
        done = 0

        def log_entry(entry: Entry) -> None:
            nonlocal done
            done += 1
            log.info(
                "model %s: %s %s compiled in %.2f s, runs in %.2f ms (%d of %d)",
                *(entry.model, entry.mode, entry.bucket, entry.trace_s + entry.compile_s),
                *(entry.cost.alone_s * 1000, done, total),
            )

        yield log_entry
        return
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=total)

        def advance(entry: Entry) -> None:
            progress.update(task, advance=1, description=f"{entry.model} {entry.mode} {entry.bucket}")
            if progress.finished:
                progress.stop()

        yield advance


def ledger_table(entries: Iterable[Entry]) -> Table:
    """Returns the ledger as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    table.add_column("mode")
    for title in ("bucket", "trace s", "compile s", "run ms", "all lanes ms", "images/s"):
        table.add_column(title, justify="right")
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
        )
    return table


def print_ledger(entries: Iterable[Entry], as_json: bool) -> None:
    """Prints the ledger on stdout."""
    if as_json:
        json.dump([ledger_json(entry) for entry in entries], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(ledger_table(entries))


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
        "at": entry.at.isoformat(timespec="milliseconds"),
    }
