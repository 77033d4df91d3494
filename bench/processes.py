"""The processes that are measured: started, waited for, and always stopped."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

OWN = "server"
"""Role of the process that was started: it serves alone, or supervises."""
ENGINE = "engine"
ENGINE_LOOP = "engine's loop"
TITLE = "xlaserve "
"""Beginning of the titles of processes with a role."""
START_TIMEOUT_S = 900
POLL_S = 0.05


@dataclass(frozen=True)
class Server:
    """A gRPC server under measurement."""

    address: str
    process: psutil.Process
    http: str = ""
    """HOST:PORT of its REST API, where it has one."""

    def cpu_s(self) -> float:
        """Returns the processor seconds it has used."""
        return sum(processor_s(self.process.pid).values())

    def cpu_s_by_role(self) -> dict[str, float]:
        """Returns the processor seconds that each of its processes has used, and the engine's event loop alone."""
        found = processor_s(self.process.pid)
        for child in self.process.children():
            if " ".join(child.cmdline()).strip() == f"{TITLE}{ENGINE}":
                (loop,) = (thread for thread in child.threads() if thread.id == child.pid)
                found[ENGINE_LOOP] = float(loop.user_time + loop.system_time)
        return found

    def resident_bytes(self) -> int:
        """Returns its resident size."""
        return sum(int(process.memory_info().rss) for process in (self.process, *self.process.children()))


def processor_s(pid: int) -> dict[str, float]:
    """Returns the processor seconds that each process of the server `pid` has used, by its role.

    "server" has those of `pid` itself, and of a child without a role.
    """
    server = psutil.Process(pid)
    found = {OWN: _used_s(server)}
    for child in server.children():
        title = " ".join(child.cmdline()).strip()
        role = title.removeprefix(TITLE) if title.startswith(TITLE) else OWN
        found[role] = found.get(role, 0.0) + _used_s(child)
    return found


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def application(name: str, **more: object) -> dict[str, object]:
    """Returns the settings of an application of Keras, served as `model`."""
    return {"name": "model", "source": f"keras.applications:{name}", "weights": "random", **more}


@contextmanager
def xlaserve(
    config: Mapping[str, object], poll_s: float = POLL_S, module: str = "xlaserve", stderr: IO[bytes] | None = None
) -> Iterator[Server]:
    """Runs `xlaserve serve` with `config`, ready; looks every `poll_s` whether it is. `module` runs it."""
    with tempfile.TemporaryDirectory() as folder:
        file, ready = Path(folder, "config.json"), Path(folder, "ready.json")
        file.write_text(
            json.dumps(
                {
                    "log_level": "warning",
                    "access_log": "off",
                    **config,
                    "grpc_port": 0,
                    "http_port": 0,
                    "metrics_port": 0,
                }
            )
        )
        command = (sys.executable, "-m", module, "serve", "--config", str(file), "--ready-file", str(ready))
        with _started(command, ready, poll_s, stderr=stderr) as server:
            yield server


def bare(flavour: str) -> AbstractContextManager[Server]:
    """Runs the bare servicer in one of its flavours: `uvloop`, `asyncio` or `threads`."""
    return _servicer("bench.bare", flavour)


def null() -> AbstractContextManager[Server]:
    """Runs the load tester's null target, which does not even parse."""
    return _servicer("xlaserve_loadtest.targets.null_server")


@contextmanager
def _servicer(*words: str) -> Iterator[Server]:
    # Other servers run gRPC as it is by default. Importing xlaserve has set the variable, here and for what is started.
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        with _started((sys.executable, "-m", *words, str(ready)), ready, environment=environment) as server:
            yield server


@contextmanager
def _started(
    command: Sequence[str],
    ready: Path,
    poll_s: float = POLL_S,
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
) -> Iterator[Server]:
    process = subprocess.Popen(command, env=environment, stderr=stderr)
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)}: not ready, exit status {process.returncode}")
            time.sleep(poll_s)
        addresses = json.loads(ready.read_text())
        yield Server(addresses["grpc"], psutil.Process(process.pid), addresses.get("http", ""))
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def asked(run: Callable[..., None], *arguments: object) -> Iterator[Callable[..., Any]]:
    """Calls `run` with `arguments` and a pipe in a process of its own; gives what sends it a message and returns the
    answer. It has answered None, and so has begun, when this returns.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # else its end would not be noticed

    def ask(message: object = None) -> Any:
        ours.send(message)
        return ours.recv()

    try:
        ask()
        yield ask
    finally:
        process.terminate()
        process.join()


class Worker(NamedTuple):
    """A process that runs compiled functions itself, warm."""

    about: Any
    """What it says of itself, such as its number of lanes."""
    run: Callable[..., Any]


@contextmanager
def worker(module: str, config: Mapping[str, object]) -> Iterator[Worker]:
    """Calls a module's `begin(config)` in a process of its own: it returns what `Worker` holds."""
    with asked(_work, module, config) as ask:
        yield Worker(ask(), lambda *arguments: ask(arguments))


def _work(module: str, config: Mapping[str, object], pipe: Connection) -> None:
    about, run = importlib.import_module(module).begin(config)
    while True:
        arguments = pipe.recv()
        pipe.send(about if arguments is None else run(*arguments))
