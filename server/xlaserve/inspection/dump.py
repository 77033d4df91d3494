"""XLA's dumps of the programs that it compiles: HLO before and after optimisation, and the buffer assignment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Final

from xlaserve.programs.tf import flags

BEFORE: Final = ".before_optimizations.txt"
AFTER: Final = "_after_optimizations.txt"


@dataclass(frozen=True)
class Programs:
    """The dumped texts of one program."""

    hlo: str
    """HLO before optimisation, as TensorFlow gave it to XLA."""
    optimized_hlo: str
    """HLO after optimisation, as XLA runs it."""
    buffer_assignment: str


@contextmanager
def dumped() -> Iterator[Path]:
    """Makes XLA dump every program that it compiles into a temporary folder, which is yielded and removed at the end.

    Must begin before TensorFlow is imported, in a process of its own: XLA reads its flags once.
    """
    with tempfile.TemporaryDirectory(prefix="xlaserve-explain-", ignore_cleanup_errors=True) as folder:
        flags.add(flags.XLA, f"--xla_dump_to={folder} --xla_dump_hlo_as_text")
        yield Path(folder)


def compiled(dump: Path) -> set[Path]:
    """Returns the dump before optimisation of each program that was compiled so far; programs that failed are left
    out."""
    return {before for before in dump.glob(f"*{BEFORE}") if _finished(before).exists()}


def read(before: Path) -> Programs:
    """Reads the dumps of a program that `compiled` returned. Raises OSError where XLA did not finish it."""
    finished = _finished(before)
    assignment = finished.with_name(f"{finished.name.removesuffix('.txt')}-buffer-assignment.txt")
    return Programs(before.read_text(), finished.read_text(), assignment.read_text())


def _finished(before: Path) -> Path:
    """Returns the path of the dump after optimisation."""
    stem = before.name.removesuffix(BEFORE)
    return next(before.parent.glob(f"{escape(stem)}.*{AFTER}"), before.with_name(f"{stem}{AFTER}"))
