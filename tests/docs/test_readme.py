"""README's commands, run as they are typed, one after the other as a reader does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FOLDERS = ("deploy", "scripts")
"""What the commands name files of."""
PORTS = (8001, 8002)
PORT_TAKEN = "another program listens on a port where README's commands serve"
START_TIMEOUT_S = 60
COMMAND_TIMEOUT_S = 90
ACTIVATE = Path(sys.prefix, "bin", "activate")
ACTIVATION = "source .venv/bin/activate"


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

    def type(self, language: str, block: str) -> None:
        """Runs a block; fails where a command of it does."""
        shell = [sys.executable, "-c"] if language == "python" else ["bash", "-e", "-c"]
        output = self._folder / "output"
        is_server = "xlaserve serve" in block
        environment = self._environments[is_server]
        if is_server:
            self.press_ctrl_c()
        if ACTIVATION in block:  # holds for the blocks that follow in that terminal
            environment["PATH"] = f"{self._folder / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"
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

    def press_ctrl_c(self) -> None:
        """Ends the server that runs, if any, as its user does."""
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self._server.pid, signal.SIGINT)
        assert self._server.wait(COMMAND_TIMEOUT_S) == 0
        self._server = None

    def leave(self) -> None:
        """Leaves no server behind."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _wait_until_ready(self, server: subprocess.Popen[bytes], output: Path) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._ready_file.exists():
            if server.poll() is not None and "expected a free port" in output.read_text():
                pytest.skip(PORT_TAKEN)
            assert server.poll() is None, f"the server ended with {server.returncode}\n{output.read_text()}"
            assert time.monotonic() < give_up_at, f"the server was not ready\n{output.read_text()}"
            time.sleep(0.05)
        assert json.loads(self._ready_file.read_text())["grpc"].endswith(f":{PORTS[0]}")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.leave()


def _is_of_make(block: str) -> bool:
    return all(line.startswith("make ") for line in block.splitlines())


def test_it_fits_on_a_few_screens() -> None:
    assert README.count("\n") <= 120


def test_all_blocks_are_run_here_or_by_the_checks_before_a_change_lands() -> None:
    ci = {line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()}
    typed = {line.partition("#")[0].strip() for language, block in BLOCKS for line in block.splitlines()}
    of_make = {line for line in typed if line.startswith("make ")}

    assert {language for language, _ in BLOCKS} <= {"sh", "python"}
    assert "make demo" in of_make
    assert of_make <= ci


@pytest.mark.timeout(240)
@pytest.mark.skipif(not ACTIVATE.exists(), reason="needs the virtual environment that make setup makes")
def test_each_command_works_as_it_is_typed(reader: Reader) -> None:
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(PORT_TAKEN)
    blocks = [(language, block) for language, block in BLOCKS if not _is_of_make(block)]
    assert len(blocks) >= 6
    for language, block in blocks:
        reader.type(language, block)
    reader.press_ctrl_c()


def test_links_lead_to_files() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README)]

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
