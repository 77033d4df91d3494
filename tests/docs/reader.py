"""A reader who types the commands of a page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.docs.blocks import LINE_NOT_TYPED, ROOT

FOLDERS = ("deploy", "scripts")
"""What the commands name files of."""
PORTS = (8000, 8001, 8002)
PORT_TAKEN = "another program listens on a port where the page's commands serve"
START_TIMEOUT_S = 60
COMMAND_TIMEOUT_S = 90
ACTIVATION = "source .venv/bin/activate"
FILE = re.compile(r"# (\S+\.yaml)\n")


class Reader:
    """Types blocks into shells, in a folder of its own; a block that serves runs until the next such one."""

    def __init__(self, folder: Path) -> None:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(sys.prefix)
        self._folder = folder
        self._ready_file = folder / "ready.json"
        self._server: subprocess.Popen[bytes] | None = None
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("XLASERVE_")}
        # What is activated in the server's terminal is not in the other.
        self._environments = {
            is_server: {**inherited, "XLASERVE_READY_FILE": str(self._ready_file)} for is_server in (True, False)
        }

    def activate(self) -> None:
        """Activates the virtual environment in both terminals, as who reads further pages has done."""
        for environment in self._environments.values():
            self._activate(environment)

    def _activate(self, environment: dict[str, str]) -> None:
        environment["PATH"] = f"{self._folder / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"

    def follow(self, language: str, block: str) -> None:
        """Runs a block of commands, or saves a file that is shown under its name; fails where a command does."""
        if language in ("sh", "python"):
            self._type([sys.executable, "-c"] if language == "python" else ["bash", "-e", "-c"], block)
        elif named := FILE.match(block):
            (self._folder / named[1]).write_text(block)

    def press_ctrl_c(self) -> None:
        """Ends the server that runs, if any, as its user does."""
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self._server.pid, signal.SIGINT)
        assert self._server.wait(COMMAND_TIMEOUT_S) == 0
        give_up_at = time.monotonic() + COMMAND_TIMEOUT_S
        while self._ready_file.exists():  # another one may have taken its place
            assert time.monotonic() < give_up_at, "a server did not end"
            time.sleep(0.05)
        self._server = None

    def leave(self) -> None:
        """Leaves no server behind."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _type(self, shell: list[str], block: str) -> None:
        block = LINE_NOT_TYPED.sub("", block)
        output = self._folder / "output"
        is_server = "xlaserve serve" in block
        environment = self._environments[is_server]
        if is_server:
            self.press_ctrl_c()
        if ACTIVATION in block:  # holds for the blocks that follow in that terminal
            self._activate(environment)
        with output.open("wb") as out:
            process = subprocess.Popen(
                [*shell, block],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            if is_server:
                self._server = process
                self._wait_until_ready(process, output)
            else:
                assert process.wait(COMMAND_TIMEOUT_S) == 0, f"{block}\n{output.read_text()}"
        finally:
            if not is_server:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _wait_until_ready(self, server: subprocess.Popen[bytes], output: Path) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._ready_file.exists():
            if server.poll() is not None and "expected a free port" in output.read_text():
                pytest.skip(PORT_TAKEN)
            assert server.poll() is None, f"the server ended with {server.returncode}\n{output.read_text()}"
            assert time.monotonic() < give_up_at, f"the server was not ready\n{output.read_text()}"
            time.sleep(0.05)
        assert json.loads(self._ready_file.read_text())["grpc"].endswith(f":{PORTS[1]}")
