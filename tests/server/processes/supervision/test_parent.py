"""When the parent kills a server that was told to end, and when one that stands still."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from xlaserve.processes.supervision import pulse
from xlaserve.processes.supervision.parent import (
    AT_ONCE_S,
    KILL_LOOKS,
    SILENCED,
    SILENT_LOOKS,
    Limit,
    Silence,
    is_stopped,
)
from xlaserve.processes.supervision.pulse import Pulse

DELAY_S, DRAIN_S = 5.0, 30.0
PATIENCE_S = 20


@pytest.mark.parametrize(
    ("delay_s", "at_s", "ends_at_s"),
    [
        (DELAY_S, [], math.inf),
        (DELAY_S, [1.0], 1 + DELAY_S + DRAIN_S),
        (DELAY_S, [1.0, 1.1], 1 + DELAY_S + DRAIN_S),
        (DELAY_S, [1.0, 3.0], 3 + DRAIN_S),
        (DELAY_S, [1.0, 3.0, 4.0], 4 + AT_ONCE_S),
        (DELAY_S, [1.0, 9.0], 9 + AT_ONCE_S),
        (0.0, [1.0, 2.0], 2 + AT_ONCE_S),
        (0.0, [1.0, 2.0, 3.0, 4.0], 2 + AT_ONCE_S),
    ],
    ids=["none", "first", "same", "ends the delay", "during the drain", "after the delay", "without a delay", "again"],
)
def test_signals_end_the_server_after_delay_and_drain_or_sooner(
    delay_s: float, at_s: Sequence[float], ends_at_s: float
) -> None:
    limit = Limit(delay_s, DRAIN_S)
    for now_s in at_s:
        limit.on_signal(now_s)
    assert limit.ends_at_s == ends_at_s


@pytest.fixture
def file() -> Iterator[int]:
    file = pulse.create()
    yield file
    os.close(file)


def test_silence_ends_the_server_and_kills_it_where_that_does_not_suffice(file: int) -> None:
    silence = Silence(file)
    Pulse(file).beat()
    numbers = [silence.look() for _ in range(3 * SILENT_LOOKS)]
    assert {look: number for look, number in enumerate(numbers) if number} == {
        SILENT_LOOKS: SILENCED,
        SILENT_LOOKS + KILL_LOOKS: signal.SIGKILL,
    }
    assert silence.has_ended_it


@pytest.mark.parametrize("name", ["sleep", "odd) T (sleep"])
def test_a_process_is_stopped_from_a_signal_until_it_goes_on(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / name, "60"]) as process:
        try:
            for number, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
                process.send_signal(number)
                until = time.monotonic() + PATIENCE_S
                while is_stopped(str(process.pid)) is not stopped and time.monotonic() < until:
                    time.sleep(0.01)
                assert is_stopped(str(process.pid)) is stopped
        finally:
            process.kill()
    assert not is_stopped(str(process.pid))


def test_a_server_that_beats_again_or_has_never_beaten_is_not_silent(file: int) -> None:
    silence, beating = Silence(file), Pulse(file)
    assert not any(silence.look() for _ in range(2 * SILENT_LOOKS))
    for _ in range(3):
        beating.beat()
        assert not any(silence.look() for _ in range(SILENT_LOOKS))
    assert not silence.has_ended_it
