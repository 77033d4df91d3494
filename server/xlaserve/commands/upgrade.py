"""`xlaserve upgrade`: has another server, as it is installed and configured by now, take a server's place."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from xlaserve.commands.command import FAILED, Command, Invocation
from xlaserve.errors import XlaserveError
from xlaserve.processes.handover import CHANGES_S
from xlaserve.processes.upgrades import LEAVING, UPGRADING

POLL_S: Final = 0.1
BEGIN_S: Final = CHANGES_S + 10.0
"""How long a server may take to start another one: it waits for changes of models that have begun."""
FRONT: Final = "xlaserve front "
OWN: Final = re.compile(r"xlaserve |.* xlaserve\.processes\.(supervision\.)?child ")
"""How the titles of a server's own processes begin, once they have names and before, of any version."""


class CannotUpgrade(XlaserveError):
    """No server's place is taken."""


def run(invocation: Invocation) -> int:
    """Returns once the other server serves, or is known not to."""
    pid: int = invocation.own.pid or _only_server()
    try:
        server = psutil.Process(pid)
        if not _listens_for_it(pid):
            raise CannotUpgrade(f"expected a server with fronts, which process {pid} is not: see the setting `fronts`")
        _expect_no_upgrade(server)
        before = {child.pid for child in server.children()}
        server.send_signal(signal.SIGUSR2)
        successor = _successor(server, before)
        sys.stdout.write(f"process {successor.pid} starts\n")
        sys.stdout.flush()
        while successor.is_running() and successor.status() != psutil.STATUS_ZOMBIE and not _has_left(server):
            time.sleep(POLL_S)
        if not _has_left(server):
            sys.stderr.write(f"process {successor.pid} has ended, and {pid} goes on: its log says why\n")
            return FAILED
    except psutil.Error as error:
        raise CannotUpgrade(f"process {pid}: {error}") from None
    sys.stdout.write(f"process {successor.pid} serves, and {pid} leaves\n")
    return 0


def _only_server() -> int:
    """Returns the number of the only server with fronts that this user runs. Raises CannotUpgrade."""
    found = {process.ppid() for process in _processes() if _title(process).startswith(FRONT)}
    servers = sorted(pid for pid in found if not _has_left(psutil.Process(pid)))
    if len(servers) != 1:
        numbers = ", ".join(map(str, servers)) or "none"
        raise CannotUpgrade(f"expected one server with fronts, or the number of its process, found {numbers}")
    return servers[0]


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                yield process


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def _has_left(server: psutil.Process) -> bool:
    """Whether another server has taken its place, as far as anybody can see: it says so, or has ended."""
    return _title(server) in (LEAVING, "")


def _listens_for_it(pid: int) -> bool:
    """Whether a process does anything at SIGUSR2, as proc_pid_status(5) tells; else it would end the process."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (signal.SIGUSR2 - 1) & 1)
    return False


def _expect_no_upgrade(server: psutil.Process) -> None:
    """Raises CannotUpgrade where another server is about to take its place already."""
    if successor := _other_server(server, ()):
        began = datetime.fromtimestamp(successor.create_time(), UTC).isoformat(" ", "seconds")
        to = f" since {began}, to process {successor.pid}"
    elif _is_upgrading(server):
        to = ", and waits for changes of models to be made"
    else:
        return
    raise CannotUpgrade(f"an upgrade of process {server.pid} is under way{to}: wait for its end")


def _is_upgrading(server: psutil.Process) -> bool:
    return psutil.Process(server.pid).name() == UPGRADING  # a new object: each reads the name once


def _successor(server: psutil.Process, before: Collection[int]) -> psutil.Process:
    """Returns the server that it starts. Raises CannotUpgrade where it starts none, or one that has ended at once."""
    until = time.monotonic() + BEGIN_S
    has_begun = False
    while time.monotonic() < until and server.is_running():
        had_begun, has_begun = has_begun, _is_upgrading(server)
        if successor := _other_server(server, before):
            return successor
        if had_begun and not has_begun:
            raise CannotUpgrade(f"the other server has not started, and process {server.pid} goes on: its log says why")
        time.sleep(POLL_S)
    if not server.is_running():
        raise CannotUpgrade(f"process {server.pid} has ended: its log says why")
    raise CannotUpgrade(f"process {server.pid} has begun no upgrade within {BEGIN_S:g} s: its log says why")


def _other_server(server: psutil.Process, before: Collection[int]) -> psutil.Process | None:
    """Returns its child that is a server, and none of those `before`; None where it has none."""
    for child in server.children():
        title = _title(child)  # empty where it has just ended
        if child.pid not in before and title and not OWN.match(title):
            return child
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("pid", nargs="?", type=int, help="its process; may be left out where only one server runs")


COMMAND = Command(run, add_options, ())
