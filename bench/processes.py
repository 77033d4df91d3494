"""The processes that are measured: started, waited for, and always stopped."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

START_TIMEOUT_S = 900
POLL_S = 0.05


@dataclass(frozen=True)
class Server:
    """A gRPC server under measurement."""

    address: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Returns the processor seconds it has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Returns its resident size."""
        return int(self.process.memory_info().rss)


def application(name: str, **more: object) -> dict[str, object]:
    """Returns the settings of an application of Keras, served as `model`."""
    return {"name": "model", "source": f"keras.applications:{name}", "weights": "random", **more}


@contextmanager
def xlaserve(config: Mapping[str, object], poll_s: float = POLL_S) -> Iterator[Server]:
    """Runs `xlaserve serve` with `config`, ready; looks every `poll_s` whether it is."""
    with tempfile.TemporaryDirectory() as folder:
        file, ready = Path(folder, "config.json"), Path(folder, "ready.json")
        file.write_text(json.dumps({**config, "grpc_port": 0, "http_port": 0, "log_level": "warning"}))
        command = (sys.executable, "-m", "xlaserve", "serve", "--config", str(file), "--ready-file", str(ready))
        with _started(command, ready, poll_s) as server:
            yield server


def bare(flavour: str) -> AbstractContextManager[Server]:
    """Runs the bare servicer in one of its flavours: `uvloop`, `asyncio` or `threads`."""
    return _servicer("bench.bare", flavour)


def null() -> AbstractContextManager[Server]:
    """Runs the load tester's null target, which does not even parse."""
    return _servicer("xlaserve_loadtest.targets.null_server")


@contextmanager
def _servicer(*words: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        with _started((sys.executable, "-m", *words, str(ready)), ready) as server:
            yield server


@contextmanager
def _started(command: Sequence[str], ready: Path, poll_s: float = POLL_S) -> Iterator[Server]:
    process = subprocess.Popen(command)
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)}: not ready, exit status {process.returncode}")
            time.sleep(poll_s)
        yield Server(json.loads(ready.read_text())["grpc"], psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def asked(run: Callable[..., None], *arguments: object) -> Iterator[Callable[[], Any]]:
    """Calls `run` with `arguments` and a pipe in a process of its own; gives what asks it and returns its answer.

    It answers each message with what it has measured since the last; it has begun by now.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
    process.start()

    def ask() -> Any:
        ours.send(None)
        return ours.recv()

    try:
        ask()
        yield ask
    finally:
        process.terminate()
        process.join()


class InProcess:
    """A process that calls the compiled functions itself, warm."""

    def __init__(self, config: Mapping[str, object], module: str = "bench.in_process") -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", module, json.dumps(config)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lanes = int(self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=60)

    def images_per_s(self, mode: str, seconds: float) -> float:
        """Runs the best bucket of `mode` on every lane for `seconds`."""
        assert self._process.stdin
        self._process.stdin.write(f"{mode} {seconds}\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args!r} ended")
        return line
