"""`xlaserve run`: images answered without a server."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.server.conftest import CommandLine

TIMEOUT_S = 120


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    path = tmp_path / "digit.png"
    Image.new("L", (28, 28), 0).save(path)
    return path


def xlaserve_run(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xlaserve", "run", *map(str, arguments)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environ)


def test_an_image_is_answered_by_a_source(digit: Path, tmp_path: Path) -> None:
    done = xlaserve_run("builtin:digits", digit, "--buckets", "1", "--json", "--top-k", "3", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)
    assert (answer["image"], answer["model"], answer["mode"]) == (str(digit), "digits", "xla")
    categories = answer["classifications"][0]["categories"]
    assert len(categories) == 3
    assert sum(category["score"] for category in categories) <= 1.001


def test_an_image_that_can_not_be_read_is_named_and_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    done = xlaserve_run("builtin:noop", broken, cache=tmp_path)
    assert done.returncode == 1
    assert f"xlaserve run: {broken}: " in done.stderr


def test_a_folder_without_images_is_refused_in_the_name_of_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    done = xlaserve_run("builtin:noop", folder, cache=tmp_path)
    assert done.returncode == 1
    assert f"xlaserve run: {folder}: expected a folder" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_the_server_ends_with_the_command(number: signal.Signals, tmp_path: Path) -> None:
    fifo = tmp_path / "image.png"
    os.mkfifo(fifo)  # the command waits for the image, with its server ready
    command = [sys.executable, "-m", "xlaserve", "run", "builtin:noop", str(fifo)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    run = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    with fifo.open("wb"):  # returns once the command reads
        (ready_file,) = tmp_path.glob("xlaserve-run-*/ready.json")
        server = os.pidfd_open(json.loads(ready_file.read_text())["pid"])
        run.send_signal(number)
    try:
        run.wait(TIMEOUT_S)
        assert select.select([server], [], [], TIMEOUT_S)[0]
    finally:
        os.close(server)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("mine.keras", "-"), "source: expected an existing path, got mine.keras"),
        (("builtin:noop", "nothing.png"), "IMAGE: expected a file, a folder or - for stdin, got nothing.png"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_loaded(
    arguments: tuple[str, ...], says: str, command_line: CommandLine
) -> None:
    done = command_line("run", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
