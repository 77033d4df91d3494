"""How `xlaserve serve` begins."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest

from xlaserve.commands import serve
from xlaserve.commands.command import Invocation
from xlaserve.config import Settings
from xlaserve.errors import ConfigError

SIGNALS = (signal.SIGHUP, signal.SIGUSR2)


@pytest.fixture
def _handlers() -> Iterator[None]:
    changed = (*SIGNALS, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_DFL) for number in changed]
    yield
    for number, handler in zip(changed, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_no_signal_that_asks_for_a_change_ends_it_however_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(settings: Settings) -> Settings:
        raise ConfigError("before anything else")

    monkeypatch.setattr(serve, "resolve_fronts", resolved)
    settings = Settings()
    with pytest.raises(ConfigError, match="before anything else"):
        serve.run(Invocation(argparse.Namespace(), settings, lambda: settings))
    assert {*map(signal.getsignal, SIGNALS)} == {signal.SIG_IGN}


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(
    ("end", "is_announced"),
    [(None, True), (ConfigError("a port"), True), (KeyboardInterrupt(), True), (SystemExit(), False)],
)
def test_the_parent_is_told_of_every_end_but_an_exit_of_a_library(
    monkeypatch: pytest.MonkeyPatch, end: BaseException | None, is_announced: bool
) -> None:
    def run_loop(main: Coroutine[Any, Any, int]) -> int:
        main.close()
        if end is not None:
            raise end
        return 0

    beginning = Mock(has_served=False)
    monkeypatch.setattr(serve, "begin", lambda ready_file, **limits: beginning)
    monkeypatch.setattr(serve, "run_loop", run_loop)
    settings = Settings(fronts=0, exit_on_model_failure=False)
    with suppress(ConfigError, KeyboardInterrupt, SystemExit):
        serve.run(Invocation(argparse.Namespace(), settings, lambda: settings))
    assert beginning.end.called is is_announced
