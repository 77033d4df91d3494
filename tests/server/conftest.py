from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping

import pytest

from xlaserve import cli
from xlaserve.telemetry import logs

CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Runs `xlaserve` in this process: for commands that end before they import TensorFlow or serve."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    def run(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        words = [*map(str, arguments)]
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("XLASERVE_")]:
                patch.delenv(name)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            patch.setattr(os, "_exit", leave)
            patch.setattr(logs, "configure", lambda *settings: None)
            patch.setattr(logs, "quiet_tensorflow", lambda: None)
            with pytest.raises(SystemExit) as ended:
                cli.main(words)
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(words, ended.value.code, *capsys.readouterr())

    return run
