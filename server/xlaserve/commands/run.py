"""`xlaserve run`: answers images with a model, from a server that ends with the command."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from xlaserve import config
from xlaserve.commands.command import EXECUTION, FAILED, Command, Invocation
from xlaserve.config import Settings, check_files
from xlaserve.config.files import resolved
from xlaserve.errors import ConfigError
from xlaserve.processes.supervision import linux
from xlaserve_client import cli_answers, cli_images
from xlaserve_client.errors import ClientError
from xlaserve_client.sync import VisionClient

OWN_SETTINGS: Final[Mapping[str, object]] = {
    **{"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "metrics_port": None, "fronts": 0},
    **{"access": None, "tls_certificate": None, "tls_key": None, "tls_client_ca": None, "log_level": "warning"},
}
"""Settings of a server that only this command asks."""
DEADLINE_S: Final = 600.0
"""Seconds for an image, on a machine that may do other work."""
_LOOK_S: Final = 0.02
_END_S: Final = 30.0


def run(invocation: Invocation) -> int:
    """Prints the answers; fails where the model can't be loaded or an image can't be answered."""
    own = invocation.own
    check_files(invocation.settings)
    for image in own.images:
        if not cli_images.is_there(image):
            raise ConfigError(f"IMAGE: expected a file, a folder or - for stdin, got {image}, which does not exist")
    with _ending_at_signals():
        return _run(invocation)


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """Ends the server and removes its folder where a signal ends this command. SIGHUP may be ignored, as by nohup."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(invocation: Invocation) -> int:
    own = invocation.own
    with TemporaryDirectory(prefix="xlaserve-run-") as folder:
        ready_file = Path(folder, "ready.json")
        settings = invocation.settings.model_copy(update={**OWN_SETTINGS, "ready_file": ready_file})
        server = _start(settings, Path(folder, "config.yaml"))
        try:
            if (addresses := _await_ready(server, ready_file)) is None:
                return FAILED  # it has said why
            own.model = settings.models[0].name
            with VisionClient(addresses["grpc"], deadline_s=DEADLINE_S) as client:
                return cli_images.run_model(client, own)
        except (ClientError, OSError, ValueError) as error:
            cli_answers.complain(own, error)
            return FAILED
        finally:
            server.terminate()
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _start(settings: Settings, file: Path) -> subprocess.Popen[bytes]:
    """Starts a server of these settings, whose messages appear among those of this command.

    It ends with this process, however that ends.
    """
    values = resolved(settings.model_dump(mode="json"), [Settings], Path.cwd())
    file.write_text(json.dumps(values), encoding="utf-8")  # which is YAML
    command = [sys.executable, "-m", "xlaserve", "serve", "--config", str(file)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(config.ENV_PREFIX)}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environ,
        preexec_fn=partial(linux.end_with, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - no other thread runs yet
    )


def _await_ready(server: subprocess.Popen[bytes], ready_file: Path) -> dict[str, Any] | None:
    """Returns the addresses of the server once it is ready; None where it ends before that."""
    while not ready_file.exists():
        if server.poll() is not None:
            return None
        time.sleep(_LOOK_S)
    addresses: dict[str, Any] = json.loads(ready_file.read_text(encoding="utf-8"))
    return addresses


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.set_defaults(program=parser.prog)
    cli_images.add_images(parser)
    cli_images.add_run_options(parser)
    parser.add_argument("--mode", help="one of the model's modes; its default without it")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMAND = Command(run, add_options, (*EXECUTION, "compile_cache", "max_image_bytes", "max_image_pixels"), sources="1")
