"""Which of a server's processes is the server that it starts."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from xlaserve.commands.upgrade import CannotUpgrade, _expect_no_upgrade, _successor
from xlaserve.processes.supervision import linux
from xlaserve.processes.supervision.interpreters import PROCESS
from xlaserve.processes.upgrades import UPGRADING


def process(pid: int, *command: str) -> Any:
    return SimpleNamespace(pid=pid, cmdline=lambda: [*command])


def test_a_replaced_front_is_not_taken_for_the_starting_server() -> None:
    successor = process(15, "/venv/bin/python", "/venv/bin/xlaserve", "serve")
    others = [
        process(11, "xlaserve front 1", ""),
        process(12, *PROCESS, "1", "7", ""),
        process(13, "xlaserve spare", ""),
        process(14, "xlaserve front 2", ""),
    ]
    looks = iter([others, [*others, successor]])
    server = SimpleNamespace(pid=os.getpid(), is_running=lambda: True, children=lambda: next(looks))
    assert _successor(cast(psutil.Process, server), {11}) is successor


def test_an_upgrade_that_ends_without_another_server_is_not_waited_for() -> None:
    upgrading = linux.named(UPGRADING)
    upgrading.__enter__()
    looks = 0

    def children() -> list[Any]:
        nonlocal looks
        looks += 1
        if looks == 2:
            upgrading.__exit__(None, None, None)
        return []

    server = SimpleNamespace(pid=os.getpid(), is_running=lambda: True, children=children)
    with pytest.raises(CannotUpgrade, match="has not started"):
        _successor(cast(psutil.Process, server), set())
    assert looks == 3


def test_a_second_upgrade_is_told_of_the_first() -> None:
    successor = process(15, "/venv/bin/python", "/venv/bin/xlaserve", "serve")
    successor.create_time = lambda: 1_700_000_000.0
    children = [process(11, "xlaserve front 1", ""), successor]
    server = cast(psutil.Process, SimpleNamespace(pid=os.getpid(), children=lambda: children))
    with pytest.raises(CannotUpgrade, match=re.escape("since 2023-11-14 22:13:20+00:00, to process 15")):
        _expect_no_upgrade(server)
    children.remove(successor)
    _expect_no_upgrade(server)
    with linux.named(UPGRADING), pytest.raises(CannotUpgrade, match="is under way"):
        _expect_no_upgrade(server)
