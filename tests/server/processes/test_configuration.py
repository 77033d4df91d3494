"""The configuration of a server that runs, read again on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

import pytest

from xlaserve.config import ModelSettings, Settings
from xlaserve.errors import ConfigError
from xlaserve.processes.configuration import ConfigurationFollower

CATS, DOGS = ModelSettings(name="cats", source="fake"), ModelSettings(name="dogs", source="fake")
AT_START = Settings(models=(CATS,), poll_versions_s=None, log_level="info")
NOW = Settings(models=(CATS, DOGS), poll_versions_s=None, log_level="debug")


async def applied(read: Callable[[], Settings], fails: Exception | None = None) -> list[object]:
    """Returns what happens at one request, in order, until the reading has ended."""
    happened: list[object] = []
    reloaded, stopping = asyncio.Event(), asyncio.Event()

    async def reconfigure(models: Iterable[ModelSettings], only: Collection[str] | None) -> list[str]:
        happened.append(([model.name for model in models], only))
        if fails is not None:
            raise fails
        return ["dogs loaded"]

    def on_reloaded() -> None:
        happened.append("reloaded")
        reloaded.set()

    follower = ConfigurationFollower(AT_START, read, reconfigure)
    follower.request()  # before it follows: a signal may come while models are loaded
    following = asyncio.create_task(
        follower.follow(stopping, on_reload=lambda: happened.append("reload"), on_reloaded=on_reloaded)
    )
    await asyncio.wait_for(reloaded.wait(), 30)
    stopping.set()
    await asyncio.wait_for(following, 30)
    return happened


async def test_a_request_applies_the_models_that_are_configured_now(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert await applied(lambda: NOW) == ["reload", (["cats", "dogs"], None), "reloaded"]
    assert "only a restart applies it: log_level" in caplog.text
    assert "read the configuration again: dogs loaded" in caplog.text


async def test_a_configuration_that_can_t_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> Settings:
        raise ConfigError("models: expected a list, got a number")

    assert await applied(read) == ["reload", "reloaded"]
    assert "the configuration is as before: models: expected a list, got a number" in caplog.text


async def test_an_unforeseen_error_ends_neither_the_reading_nor_the_server(caplog: pytest.LogCaptureFixture) -> None:
    assert await applied(lambda: NOW, KeyError("unforeseen")) == ["reload", (["cats", "dogs"], None), "reloaded"]
    assert "the configuration could not be read again" in caplog.text


async def test_a_change_that_never_ends_does_not_hold_up_the_next_request() -> None:
    asked, stopping = asyncio.Semaphore(0), asyncio.Event()
    ended: list[object] = []

    async def reconfigure(models: Iterable[ModelSettings], only: Collection[str] | None) -> list[str]:
        asked.release()
        await asyncio.Event().wait()
        return []

    follower = ConfigurationFollower(AT_START, lambda: NOW, reconfigure)
    following = asyncio.create_task(
        follower.follow(stopping, on_reload=lambda: None, on_reloaded=lambda: ended.append("reloaded"))
    )
    for _ in range(2):
        follower.request()
        await asyncio.wait_for(asked.acquire(), 30)
    stopping.set()
    await asyncio.wait_for(following, 30)
    assert not ended
