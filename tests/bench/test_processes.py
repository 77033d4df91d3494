from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest

from bench import processes


def begin(config: Mapping[str, object]) -> tuple[int, Callable[[int, int], int]]:
    return os.getpid(), lambda one, other: one // other + int(str(config["more"]))


def test_a_worker_answers_each_call_in_a_process_of_its_own() -> None:
    with processes.worker(__name__, {"more": 10}) as (pid, run):
        assert pid != os.getpid()
        assert run(6, 3) == 12
        assert run(9, 3) == 13
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_ends_is_noticed() -> None:
    with processes.worker(__name__, {"more": 0}) as (_, run), pytest.raises(EOFError):
        run(1, 0)
