"""Profiles of a running server: bounded, one at a time, in one folder."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from xlaserve.errors import InvalidArgument, ProfilerBusy, UnsupportedFeature

MAX_S: Final = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recording:
    """A profile that was recorded."""

    name: str
    """Name of its folder, within the profiler's."""
    size_bytes: int


class Profiler:
    """Records into new folders of `folder`; None where there is no TensorFlow to be profiled."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._is_recording = False

    async def record(self, seconds: float) -> Recording:
        """Records for `seconds`; less where the caller is cancelled.

        Raises InvalidArgument, ProfilerBusy, UnsupportedFeature, and OSError where the folder can't be written.
        """
        if not 0 < seconds <= MAX_S:
            raise InvalidArgument("seconds", f"more than 0 and at most {MAX_S:g}", seconds)
        if self._folder is None:
            raise UnsupportedFeature("the server was started without any TensorFlow model: there is nothing to profile")
        if self._is_recording:
            raise ProfilerBusy("a profile is already being recorded; try again later")
        self._is_recording = True
        try:
            folder = self._folder / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
            await _record(folder, seconds)
        finally:
            self._is_recording = False
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        log.info("profile of %g s recorded: %s", seconds, folder)
        return Recording(folder.name, size_bytes)


async def _record(folder: Path, seconds: float) -> None:
    from xlaserve.programs.tf import trace  # noqa: PLC0415 - imports TensorFlow

    # Checked here: TensorFlow only reports a folder that it can't write once the recording is lost.
    await asyncio.to_thread(folder.mkdir, parents=True)
    has_started = threading.Event()

    def start() -> None:
        trace.start(folder)
        has_started.set()

    try:
        await _to_its_end(start)
        await asyncio.sleep(seconds)
    finally:
        if has_started.is_set():
            await _to_its_end(trace.stop)


async def _to_its_end(work: Callable[[], None]) -> None:
    """Runs `work` on a thread. If the caller is cancelled meanwhile, that takes effect once the work is done."""
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not doing.done():
        try:
            await asyncio.shield(doing)
        except asyncio.CancelledError as error:
            cancelled = error
    doing.result()
    if cancelled is not None:
        raise cancelled
