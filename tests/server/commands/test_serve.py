"""How `xlaserve serve` begins."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator

import pytest

from xlaserve.app import auto_fronts
from xlaserve.commands import serve
from xlaserve.commands.command import Invocation
from xlaserve.config import Settings
from xlaserve.errors import ConfigError

SIGNALS = (signal.SIGHUP, signal.SIGUSR2)


@pytest.fixture
def _handlers() -> Iterator[None]:
    handlers = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_no_signal_that_asks_for_a_change_ends_it_however_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(settings: Settings) -> Settings:
        raise ConfigError("before anything else")

    monkeypatch.setattr(auto_fronts, "resolved", resolved)
    settings = Settings()
    with pytest.raises(ConfigError, match="before anything else"):
        serve.run(Invocation(argparse.Namespace(), settings, lambda: settings))
    assert {*map(signal.getsignal, SIGNALS)} == {signal.SIG_IGN}
