"""A server under attack: a process of its own, on loopback, that is always ended again."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import psutil

START_TIMEOUT_S: Final = 180
STOP_TIMEOUT_S: Final = 60
POLL_S: Final = 0.02
SAMPLE_S: Final = 0.05
MIB: Final = 2**20
BAD_LINE: Final = re.compile(r" (ERROR|CRITICAL) |Traceback \(most recent call last\)|^Fatal |Segmentation fault")
"""What no attack may bring into the log."""

SENTENCE: Final = "xlaserve: "
"""What a server says last that ends by itself with a reason."""
GIVING_UP: Final = " ERROR giving up: "
"""What one of several processes says then; the process that can't go on has said why."""
REASON: Final = re.compile(r" ERROR \[engine\] \w+: expected ")


class ServerError(Exception):
    """A server did not start, or did not stop."""


class Server:
    """An `xlaserve serve` process with `config`, whose log and files are in `folder`.

    With `fronts` it is several processes. `max_file_bytes` bounds each file that it writes (RLIMIT_FSIZE).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        *,
        fronts: int = 0,
        ports: tuple[int, ...] = (0, 0, 0),
        max_file_bytes: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file = folder / "config.yaml"
        self.fronts = fronts
        self.config_file.write_text(json.dumps(config))  # JSON is YAML as well
        self._log = folder / "log"
        self._ready_file = Path(config.get("ready_file", folder / "ready.json"))
        command = [sys.executable, "-m", "xlaserve", "serve", "--config", str(self.config_file)]
        for name, port in zip(("grpc", "http", "metrics"), ports, strict=True):
            command += [f"--{name}-port", str(port)]
        command += ["--ready-file", str(self._ready_file)]
        if fronts:
            command += ["--fronts", str(fronts)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("XLASERVE_")}

        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        if max_file_bytes:  # not by preexec_fn: what forks in a process that uses gRPC may abort before it runs
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        self._measured = psutil.Process(self.process.pid)
        self.peak_bytes = 0
        self.is_fit = True
        """Whether it still serves; set by the one that finds out otherwise."""
        threading.Thread(target=self._sample, daemon=True).start()

    @property
    def log(self) -> str:
        """What it said so far."""
        return self._log.read_text(errors="replace")

    def bad_lines(self, since: int = 0, but: Sequence[str] = ()) -> list[str]:
        """Returns the errors and tracebacks in the log from character `since` on, except lines with one of `but`."""
        bad = [line for line in self.log[since:].splitlines() if BAD_LINE.search(line)]
        if self.fronts and self.has_refused:
            bad = [line for line in bad if GIVING_UP not in line and not REASON.search(line)]
        return [line for line in bad if not any(text in line for text in but)]

    def wait_until_ready(self) -> Server:
        """Returns the server once it is ready. Raises ServerError."""
        self.wait_for(lambda: self.is_ready, "be ready", START_TIMEOUT_S)
        found = re.findall(r"listening: gRPC (\S+), HTTP (\S+), metrics (\S+)", self.log)
        if not found:
            raise ServerError(f"it did not say where it listens\n{self.log}")
        self.grpc, self.http, self.metrics = found[-1]  # of several processes, one after a crash of the other
        return self

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of gRPC, HTTP and the metrics."""
        return tuple(int(address.rpartition(":")[2]) for address in (self.grpc, self.http, self.metrics))

    @property
    def is_ready(self) -> bool:
        """Whether it has said so."""
        return self._ready_file.exists()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    @property
    def has_refused(self) -> bool:
        """Whether it has ended by itself and said in a sentence why."""
        lines = self.log.splitlines() or [""]
        said = lines[-1].startswith(SENTENCE) or (self.fronts > 0 and any(GIVING_UP in line for line in lines))
        return said and self.process.poll() == 1

    @property
    def processes(self) -> list[psutil.Process]:
        """Those that it consists of now."""
        return [self._measured, *self._measured.children()]

    @property
    def resident_bytes(self) -> int:
        """The resident memory of its processes now. What several share counts for each."""
        total_bytes = 0
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                total_bytes += int(process.memory_info().rss)
        return total_bytes

    @property
    def open_files(self) -> int:
        """File descriptors of its processes now."""
        return sum(int(process.num_fds()) for process in self.processes)

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Returns once `condition` holds. Raises ServerError where the server ends first, or time does."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            if not self.is_alive:
                raise ServerError(f"it exited with {self.process.returncode} and did not {what}\n{self.log[-3000:]}")
            if time.monotonic() > give_up_at:
                raise ServerError(f"it did not {what} within {timeout_s:g} s\n{self.log[-3000:]}")
            time.sleep(POLL_S)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Returns the status and the text of an HTTP path."""
        host, port = self.metrics.rsplit(":", 1)
        connection = HTTPConnection(host, int(port), timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Returns the sum over the series of a metric."""
        _, text = self.get("/metrics")
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def stop(self) -> int:
        """Ends it with SIGTERM and returns its status; kills what does not end, and raises ServerError."""
        if self.is_alive:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"it did not stop within {STOP_TIMEOUT_S} s") from None

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()

    def _sample(self) -> None:
        while self.is_alive:
            try:
                self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
            except psutil.Error:
                return
            time.sleep(SAMPLE_S)
