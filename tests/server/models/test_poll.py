from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from xlaserve.config import ModelSettings
from xlaserve.config.versions import expanded
from xlaserve.errors import ConfigError
from xlaserve.models.poll import Poll


class Folder:
    """A folder of versions of the model `a`; `look` goes through with one look of a poll at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.add(1)
        self.applied: list[list[str]] = []
        self.error: ConfigError | None = None
        self._turn, self._slept = asyncio.Semaphore(0), asyncio.Semaphore(0)
        poll = Poll(self._read, self._apply, 5.0, self._sleep)
        self.following = asyncio.create_task(poll.follow(self._read()))

    def add(self, version: int, text: str = "graph") -> None:
        folder = self.path / str(version)
        folder.mkdir(exist_ok=True)
        (folder / "saved_model.pb").write_text(text)

    async def look(self) -> list[str]:
        """Returns the versions of what the look had applied; nothing where it had none."""
        before = len(self.applied)
        await self._slept.acquire()
        self._turn.release()
        await self._slept.acquire()
        self._slept.release()
        return [version for versions in self.applied[before:] for version in versions]

    def _read(self) -> tuple[ModelSettings, ...]:
        if self.error:
            raise self.error
        return expanded([ModelSettings(name="a", source=str(self.path), versions="latest 2")])

    async def _apply(self, names: Collection[str]) -> None:
        assert [*names] == ["a"]
        self.applied.append([model.version for model in self._read()])

    async def _sleep(self, seconds: float) -> None:
        assert seconds == 5.0
        self._slept.release()
        await self._turn.acquire()


@pytest_asyncio.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.following.cancel()
    await asyncio.wait([folder.following])


async def test_a_new_folder_is_a_new_version_once_its_files_rest(folder: Folder) -> None:
    assert await folder.look() == []
    folder.add(2)
    assert await folder.look() == []
    folder.add(2, "graph and weights")
    assert await folder.look() == [], "it is still being written"
    assert await folder.look() == ["1", "2"]
    assert await folder.look() == []
    folder.add(3)
    assert [await folder.look(), await folder.look()] == [[], ["2", "3"]], "the latest two"


async def test_files_that_changed_are_looked_at_again(folder: Folder) -> None:
    """A model that failed with the old files is loaded with the new ones."""
    assert await folder.look() == []
    folder.add(1, "the whole graph")
    assert [await folder.look(), await folder.look(), await folder.look()] == [[], ["1"], []]


async def test_a_configuration_that_is_not_valid_changes_nothing(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.add(2)
    await folder.look()
    folder.error = ConfigError("not YAML")
    assert await folder.look() == []
    assert "not YAML" in caplog.text
    folder.error = None
    assert await folder.look() == ["1", "2"]


async def test_a_folder_that_goes_while_it_is_looked_at_ends_no_look_for_ever(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await folder.look() == []
    folder.add(2)
    scan = os.scandir

    def scan_with_gaps(path: Any) -> Any:
        if Path(path) == folder.path / "1":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_with_gaps)
    async with asyncio.timeout(10):
        assert [await folder.look(), await folder.look()] == [[], []]
        monkeypatch.undo()
        assert [await folder.look(), await folder.look()] == [[], ["1", "2"]]
