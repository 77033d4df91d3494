"""Which of a server's processes is the server that it starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import psutil

from xlaserve.commands.upgrade import _successor
from xlaserve.processes.interpreter import PROCESS


def process(pid: int, *command: str) -> Any:
    return SimpleNamespace(pid=pid, cmdline=lambda: [*command])


def test_a_front_that_is_replaced_meanwhile_is_not_taken_for_the_server_that_starts() -> None:
    successor = process(15, "/venv/bin/python", "/venv/bin/xlaserve", "serve")
    others = [
        process(11, "xlaserve front 1", ""),
        process(12, *PROCESS, "1", "7", ""),
        process(13, "xlaserve spare", ""),
        process(14, "xlaserve front 2", ""),
    ]
    looks = iter([others, [*others, successor]])
    server = SimpleNamespace(is_running=lambda: True, children=lambda: next(looks))
    assert _successor(cast(psutil.Process, server), {11}) is successor
