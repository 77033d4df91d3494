"""A server of the load tester's own: a process that is always stopped again."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from xlaserve_loadtest.target import TargetError

COMMAND: Final = (sys.executable, "-m", "xlaserve", "serve")
STOP_TIMEOUT_S: Final = 35.0
"""A little more than the server grants itself to finish what it accepted."""

_POLL_S: Final = 0.05
_TAIL_LINES: Final = 20


def configuration(model: str, modes: Sequence[str]) -> tuple[str, str]:
    """Returns a configuration that serves `model` in `modes`, and the name that the model has in it.

    `model` is a source such as `keras.applications:ResNet50`, the path of a model, or the name of a built-in one.
    Keras's applications get random weights: speed does not depend on them, and nothing is downloaded.
    """
    is_path = "/" in model or model.endswith(".keras")
    name = Path(model).stem if is_path else model.rpartition(":")[2]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    source = str(Path(model).absolute()) if is_path else model if ":" in model else f"builtin:{model}"
    entry: dict[str, object] = {"name": name, "source": source, "modes": list(modes)}
    if source.startswith("keras.applications:"):
        entry["weights"] = "random"
    # JSON is YAML as well.
    return json.dumps({"models": [entry]}), name


class EmbeddedServer:
    """An xlaserve process on free ports: `async with` starts it, waits until it is ready, and stops it.

    `config` is a configuration file, or its text. `on_output` gets the last line that the server logged, while it
    starts. Entering raises TargetError with the server's last words when it ends or isn't ready in `start_timeout_s`.
    """

    def __init__(
        self,
        config: Path | str,
        *,
        start_timeout_s: float,
        on_output: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.address = ""
        """HOST:PORT of its gRPC service."""
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._on_output = on_output
        self._command = command

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="loadtest-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        config = self._config
        if isinstance(config, str):
            (folder / "config.yaml").write_text(config)
            config = folder / "config.yaml"
        ready = folder / "ready.json"
        ports = ("--grpc-port", "0", "--http-port", "0")
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*self._command, "--config", str(config), *ports, "--ready-file", str(ready)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for the load tester, which stops the server in its own time.
                start_new_session=True,
            )
        try:
            self.address = await self._wait_until_ready(ready)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def obituary(self) -> str | None:
        """Returns how the server ended and its last words, or None while it lives."""
        status = self._process.returncode
        if status is None:
            return None
        how = f"exited with status {status}" if status >= 0 else f"was ended by signal {-status}"
        return f"the server {how}\n{self._last_words()}".rstrip()

    async def _wait_until_ready(self, ready: Path) -> str:
        give_up_at = time.monotonic() + self._start_timeout_s
        while time.monotonic() < give_up_at:
            if (end := self.obituary()) is not None:
                raise TargetError(end)
            if (address := _address(ready)) is not None:
                return address
            self._on_output(self._last_words(lines=1))
            await asyncio.sleep(_POLL_S)
        raise TargetError(f"the server was not ready after {self._start_timeout_s:g} s\n{self._last_words()}".rstrip())

    async def _stop(self) -> None:
        try:
            if self._process.returncode is None:
                self._process.terminate()
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._folder.cleanup()

    def _last_words(self, lines: int = _TAIL_LINES) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _address(ready: Path) -> str | None:
    try:
        return str(json.loads(ready.read_text())["grpc"])
    except (FileNotFoundError, json.JSONDecodeError):
        return None  # Not written yet, or half written.
