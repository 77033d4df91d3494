"""Follows a fleet's name service, and writes what others read: a file of addresses, HAProxy's configuration."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from xlaserve.errors import ConfigError
from xlaserve_fleet.addresses import READY
from xlaserve_fleet.name_service import PATH

log = logging.getLogger(__name__)

WAIT_S: Final = 20.0
ANSWER_S: Final = 10.0
"""How much longer than that an answer may take."""
RETRY_S: Final = 1.0
COMMAND_TIMEOUT_S: Final = 60.0

ID: Final = re.compile(r"[A-Za-z0-9._-]+")
"""Ray Serve's ids are small letters and digits."""
ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
"""HOST:PORT or [IPV6]:PORT."""

Server = dict[str, str]


def lists(address: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[list[Server]]:
    """Yields the ready servers for ever, whenever the name service was asked: every WAIT_S, or sooner after a change.

    While it gives no answer that is a list of servers, they stay as they are. As a fleet has one server at least, a
    list without a ready one is no answer either.
    """
    after: int | None = None
    servers: list[Server] = []
    fault = ""
    while True:
        query = "" if after is None else f"?after={after}&wait_s={WAIT_S:g}"
        try:
            servers, after = _read(_ask(f"http://{address}{PATH}{query}"))
            fault = ""
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            if str(error) != fault:
                log.warning("%s: no list of servers from the name service; they stay as they are: %s", address, error)
            fault = str(error)
            sleep(RETRY_S)
        if servers:
            yield servers


def write(file: Path, text: str) -> None:
    """Writes a file that is never seen half written. Raises ConfigError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{file}: expected a file that can be written: {error.strerror}") from None


def addresses(servers: Sequence[Server]) -> str:
    """Returns a line for each server, with its gRPC address."""
    return "".join(f"{one['address']}\n" for one in servers)


def reload(command: str) -> bool:
    """Runs a command, and returns whether it worked; what goes wrong with it is logged."""
    try:
        done = subprocess.run(
            shlex.split(command),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.error("%s: %s", command, error)
        return False
    if done.returncode:
        log.error("%s: exited with %d: %s", command, done.returncode, done.stderr.strip())
    return done.returncode == 0


def _ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=WAIT_S + ANSWER_S) as answer:
        return json.load(answer)


def _read(found: Any) -> tuple[list[Server], int]:
    """Returns the ready servers and the generation of an answer, which may be anybody's. Raises ValueError.

    What is returned is safe to be written to files in which spaces and newlines mean something.
    """
    try:
        generation, ready = found["generation"], [one for one in found["servers"] if one["state"] == READY]
        servers = [{key: one[key] for key in ("id", "address", "http")} for one in ready]
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a generation, and servers with state, id, address and http: {error!r}") from None
    if not isinstance(generation, int):
        raise ValueError(f"expected a whole number as the generation, got {generation!r}")
    for one in servers:
        for key, value in one.items():
            if not isinstance(value, str) or not (ID if key == "id" else ADDRESS).fullmatch(value):
                expected = "letters, digits and ._-" if key == "id" else "HOST:PORT"
                raise ValueError(f"expected {expected} as {key}, got {value!r}")
    if not servers:
        raise ValueError("no server is ready")
    return servers, generation
