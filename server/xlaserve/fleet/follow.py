"""Follows a fleet's name service, and writes what others read: a file of addresses, HAProxy's configuration."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from xlaserve.errors import ConfigError
from xlaserve.fleet.addresses import READY
from xlaserve.fleet.name_service import PATH

log = logging.getLogger(__name__)

WAIT_S: Final = 20.0
ANSWER_S: Final = 10.0
"""How much longer than that an answer may take."""
RETRY_S: Final = 1.0
COMMAND_TIMEOUT_S: Final = 60.0

Server = dict[str, str]


def lists(address: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[list[Server]]:
    """Yields the ready servers whenever they have changed, for ever. While the name service is away they have not."""
    after: int | None = None
    before: list[Server] | None = None
    is_away = False
    while True:
        query = "" if after is None else f"?after={after}&wait_s={WAIT_S:g}"
        try:
            found = _ask(f"http://{address}{PATH}{query}")
            after = int(found["generation"])
            servers = [one for one in found["servers"] if one["state"] == READY]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            if not is_away:
                log.warning("%s: the name service does not answer; the servers stay as they are: %s", address, error)
            is_away = True
            sleep(RETRY_S)
            continue
        is_away = False
        if servers != before:
            before = servers
            yield servers


def write(file: Path, text: str) -> None:
    """Writes a file that is never seen half written. Raises ConfigError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{file}: expected a file that can be written: {error.strerror}") from None


def addresses(servers: Sequence[Server]) -> str:
    """Returns a line for each server, with its gRPC address."""
    return "".join(f"{one['address']}\n" for one in servers)


def reload(command: str) -> None:
    """Runs a command; what goes wrong with it is logged."""
    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("%s: %s", command, error)
        return
    if done.returncode:
        log.error("%s: exited with %d: %s", command, done.returncode, done.stderr.strip())


def _ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=WAIT_S + ANSWER_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
