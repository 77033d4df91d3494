"""A server that the load tester starts: a process that is always stopped again, and ends with a killed load tester."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import yaml

from xlaserve_loadtest.launcher import ending_with_us
from xlaserve_loadtest.targets.target import TargetError

COMMAND: Final = (sys.executable, "-m", "xlaserve", "serve")
CHECK: Final = (sys.executable, "-m", "xlaserve", "config")
DOWNLOADED: Final = ("keras.applications:", "keras_cv:", "keras_hub:")
"""Sources that have no weights until they are downloaded."""
STOP_TIMEOUT_S: Final = 35.0
"""A little more than the server's own limit for finishing accepted requests."""

_POLL_S: Final = 0.05
_TAIL_LINES: Final = 20


def served_name(model: str) -> str:
    """Returns the name under which `configuration` serves a model."""
    name = Path(model).stem if _is_path(model) else model.rpartition(":")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def configuration(models: Sequence[str], modes: Sequence[str], **more: object) -> str:
    """Returns a configuration that serves `models` in `modes`; `more` is added to each model's entry.

    A model is a source such as `keras.applications:ResNet50`, the path of a model, or the name of a built-in one.
    What is DOWNLOADED gets random weights: speed does not depend on them.
    """
    # JSON is YAML as well.
    return json.dumps({"models": [_entry(model, modes) | more for model in models]})


def with_cache(config: str, folder: Path) -> str:
    """Returns a configuration with a compile cache in `folder`, unless it has one."""
    document = json.loads(config)
    return json.dumps({**document, "compile_cache": document.get("compile_cache") or str(folder)})


def forget_costs(cache: Path) -> None:
    """Removes what servers measured of their programs from a compile cache, but not the programs.

    Batching follows these measurements. A server that took over another's would differ less than it does elsewhere.
    """
    for cost in cache.rglob("cost-*"):
        cost.unlink(missing_ok=True)


def check(models: Sequence[str], modes: Sequence[str]) -> None:
    """Raises TargetError where the server would refuse the `configuration` of `models`. Blocks."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(configuration(models, modes))
        file.flush()
        _ask(file.name, f"--model {','.join(models)}")


def narrowed(config: Path, models: Sequence[str], modes: Sequence[str]) -> str:
    """Returns a configuration file as text, reduced to `models` (names) and `modes`.

    The server reads the file and prints it with paths resolved. Blocks. Raises TargetError where the server refuses it,
    or where it has no such model.
    """
    document = yaml.safe_load(_ask(str(config), f"--config {config}", "--show"))
    versions: dict[str, list[dict[str, Any]]] = {}
    for entry in document["models"]:
        versions.setdefault(entry["name"], []).append(entry)
    if unknown := [model for model in models if model not in versions]:
        raise TargetError(f"--config {config}: expected its models ({', '.join(versions)}), got {', '.join(unknown)}")
    chosen = [_default_version(versions[model]) for model in models]
    for entry in chosen:
        entry |= {"version_labels": {}, "routing": {}, "shadow": None}  # which name other versions and modes
        entry["modes"] = list(modes)
        if entry["default_mode"] not in modes:
            entry["default_mode"] = None
    return json.dumps({**document, "models": chosen})


def _default_version(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns that of a model's versions which answers requests that name none."""
    stable = [entry["version_labels"]["stable"] for entry in entries if "stable" in entry["version_labels"]]
    number = stable[0] if stable else max((entry["version"] for entry in entries), key=int)
    return next(entry for entry in entries if entry["version"] == number)


def _ask(config: str, option: str, *flags: str) -> str:
    """Returns what `xlaserve config` says of a file; TargetError, which names `option`, where the server refuses it."""
    said = subprocess.run([*CHECK, *flags, "--config", config], capture_output=True, text=True, check=False)
    if said.returncode:
        raise TargetError(f"{option}: {said.stderr.strip().removeprefix('xlaserve: ')}")
    return said.stdout


def _entry(model: str, modes: Sequence[str]) -> dict[str, object]:
    source = str(Path(model).absolute()) if _is_path(model) else model if ":" in model else f"builtin:{model}"
    entry: dict[str, object] = {"name": served_name(model), "source": source, "modes": list(modes)}
    if source.startswith(DOWNLOADED):
        entry["weights"] = "random"
    return entry


def _is_path(model: str) -> bool:
    if ":" in model:  # the server takes it for a source's name, which may hold a slash
        return model.startswith(("/", "./", "../"))
    return "/" in model or "." in model  # no built-in model has either in its name


class EmbeddedServer:
    """An xlaserve process on free ports: `async with` starts it, waits until it is ready, and stops it.

    `config` is a configuration file, or its text. While the server starts, `on_output` is called with its latest log
    line. Entering raises TargetError with its final stderr lines when it ends or isn't ready in `start_timeout_s`.
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
        self.http_address: str | None = None
        """HOST:PORT of its metrics."""
        self.rest_address: str | None = None
        """HOST:PORT of its REST API."""
        self.ready_s = 0.0
        """Seconds from its start until it was ready."""
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
        ports = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
        command = (*self._command, "--config", str(config), *ports, "--ready-file", str(ready))
        began_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *ending_with_us(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for the load tester, which stops the server in its own time.
                start_new_session=True,
            )
        try:
            addresses = await self._wait_until_ready(ready)
        except BaseException:
            await self._stop()
            raise
        self.ready_s = time.monotonic() - began_s
        self.address, self.http_address = str(addresses["grpc"]), addresses.get("metrics")
        self.rest_address = addresses.get("http")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def exit_report(self) -> str | None:
        """Returns how the server ended, with its final stderr lines; None while it runs."""
        status = self._process.returncode
        if status is None:
            return None
        how = f"exited with status {status}" if status >= 0 else f"was ended by signal {-status}"
        return f"the server {how}\n{self._log_tail()}".rstrip()

    async def _wait_until_ready(self, ready: Path) -> dict[str, str]:
        give_up_at = time.monotonic() + self._start_timeout_s
        while time.monotonic() < give_up_at:
            if (end := self.exit_report()) is not None:
                raise TargetError(end)
            if (addresses := _addresses(ready)) is not None:
                return addresses
            self._on_output(self._log_tail(lines=1))
            await asyncio.sleep(_POLL_S)
        raise TargetError(f"the server was not ready after {self._start_timeout_s:g} s\n{self._log_tail()}".rstrip())

    async def _stop(self) -> None:
        try:
            if self._process.returncode is None:
                self._process.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._folder.cleanup()

    def _log_tail(self, lines: int = _TAIL_LINES) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _addresses(ready: Path) -> dict[str, str] | None:
    try:
        reported: dict[str, str] = json.loads(ready.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None  # Not written yet, or half written.
    return reported
