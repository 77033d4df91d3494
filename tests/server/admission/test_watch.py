"""Files that are read again when they change, on file systems whose times are coarse."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xlaserve.admission.watch import Watch
from xlaserve.config.stamp import GRANULARITY_NS, Stamp


class Seen:
    """A file, and what was read of it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.contents: list[str] = []

    def read(self) -> list[Path]:
        self.contents.append(self.file.read_text())
        return [self.file]

    def write(self, text: str) -> None:
        """Writes a text of one length in place."""
        self.file.write_text(text)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has times of files count in whole seconds."""
    of: Callable[[Path], Stamp] = Stamp.of

    def coarse(path: Path) -> Stamp:
        stamp = of(path)
        whole = {name: getattr(stamp, name) // 10**9 * 10**9 for name in ("modified_ns", "changed_ns")}
        return stamp._replace(**whole)

    monkeypatch.setattr(Stamp, "of", coarse)


@pytest.mark.usefixtures("seconds")
def test_each_of_several_changes_within_one_second_is_seen(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "access.yaml")
    seen.write("a")
    watch = Watch("access", [seen.file], seen.read)
    for text in "bcd":
        seen.write(text)
        watch.look()
        watch.look()
    assert seen.contents == ["a", "b", "c", "d"]


def test_a_file_that_has_settled_is_read_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(tmp_path / "access.yaml")
    seen.write("a")
    watch = Watch("access", [seen.file], seen.read)
    now_ns = time.time_ns() + 2 * GRANULARITY_NS
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    watch.look()
    reads = 0

    def read_bytes(path: Path) -> bytes:
        nonlocal reads
        reads += 1
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    watch.look()
    assert not reads
    assert seen.contents == ["a"]
    os.utime(seen.file)
    watch.look()
    assert seen.contents == ["a", "a"]
