from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from xlaserve.errors import InvalidArgument, ProfilerBusy, UnsupportedFeature
from xlaserve.programs.tf import trace
from xlaserve.programs.tf.profiler import MAX_S, Profiler

FOREVER_S = 30.0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of TensorFlow's profiler; a recording is a file of 5 bytes."""
    calls: list[str] = []
    folders: list[Path] = []

    def start(folder: Path) -> None:
        folders.append(folder)
        calls.append("start")

    def stop() -> None:
        (folders[-1] / "trace").write_text("12345")
        calls.append("stop")

    monkeypatch.setattr(trace, "start", start)
    monkeypatch.setattr(trace, "stop", stop)
    return calls


async def test_a_recording_has_a_folder_of_its_own(calls: list[str], tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profiles")
    first, second = await profiler.record(0.01), await profiler.record(0.01)
    assert first.name != second.name
    assert first.size_bytes == 5
    assert {folder.name for folder in (tmp_path / "profiles").iterdir()} == {first.name, second.name}
    assert calls == ["start", "stop"] * 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_S + 1, float("nan"), float("inf")])
async def test_its_length_is_bounded(seconds: float, calls: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="seconds: expected more than 0 and at most 60"):
        await Profiler(tmp_path).record(seconds)
    assert calls == []


@pytest.mark.parametrize("after_s", [0.0, 0.2])
async def test_there_is_one_at_a_time_and_a_caller_who_goes_away_ends_it(
    after_s: float, calls: list[str], tmp_path: Path
) -> None:
    profiler = Profiler(tmp_path)
    recording = asyncio.ensure_future(profiler.record(FOREVER_S))
    await asyncio.sleep(after_s)
    with pytest.raises(ProfilerBusy):
        await profiler.record(0.01)
    recording.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recording
    assert calls.count("start") == calls.count("stop")
    await profiler.record(0.01)


async def test_without_tensorflow_there_is_nothing_to_profile() -> None:
    with pytest.raises(UnsupportedFeature, match="nothing to profile"):
        await Profiler(None).record(1.0)


async def test_a_folder_that_can_not_be_written_is_an_error_and_no_end(
    calls: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").touch()
    profiler = Profiler(tmp_path / "file")
    for _ in range(2):
        with pytest.raises(OSError, match="Not a directory"):
            await profiler.record(0.01)
    assert calls == []
