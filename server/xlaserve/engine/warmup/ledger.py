"""The ledger: every program that was compiled, its compile time and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Compilation, Warmed
from xlaserve.engine.warmup.verify import Verified


@dataclass(frozen=True, slots=True)
class Entry:
    """One program of one model."""

    model: str
    version: str
    mode: Mode
    bucket: Bucket
    trace_s: float
    """Seconds in Python, from the model to a graph."""
    compile_s: float
    """Seconds of the first run, less the time of a later run."""
    cost: Cost
    at: datetime
    """When it was ready, UTC."""
    from_cache: bool = False
    """Whether it came from the compile cache instead of being traced and compiled."""
    in_background: bool = False
    """Whether it was compiled beside the traffic, and not at warm-up."""
    verified: Verified | None = None
    """The findings about it; None where it was not verified."""


class Ledger:
    """Entries of one model in the order of compilation. `record` may be called from any thread."""

    def __init__(self, model: str, version: str, on_record: Callable[[Entry], None] = lambda entry: None) -> None:
        self.model = model
        self._version = version
        self._entries: list[Entry] = []
        self._on_record = on_record

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def show(self, entries: Iterable[Entry]) -> None:
        """Replaces all entries by these, which another process recorded."""
        self._entries = [*entries]

    def record(
        self,
        mode: Mode,
        bucket: Bucket,
        made: Compilation,
        cost: Cost,
        verified: Verified | None = None,
        *,
        in_background: bool = False,
    ) -> Warmed:
        """Adds a program that is ready now, and calls `on_record` on the caller's thread."""
        entry = Entry(
            self.model,
            self._version,
            mode,
            bucket,
            trace_s=made.trace_s,
            compile_s=made.compile_s,
            cost=cost,
            at=datetime.now(UTC),
            from_cache=made.from_cache,
            in_background=in_background,
            verified=verified,
        )
        self._entries.append(entry)
        self._on_record(entry)
        fastest_s = math.inf if verified is None or made.cost is None else verified.fastest_s
        return Warmed(made.executable, cost, fastest_s, made.keep_cost)

    def correct(self, mode: Mode, bucket: Bucket, cost: Cost) -> None:
        """Replaces the cost of a program."""
        for index, entry in enumerate(self._entries):
            if (entry.mode, entry.bucket) == (mode, bucket):
                self._entries[index] = replace(entry, cost=cost)
