from __future__ import annotations

import numpy as np
import pytest

from xlaserve_loadtest.analysis.samples import label
from xlaserve_loadtest.record.blocks import LoadLine
from xlaserve_loadtest.run.recorder import load_line
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, OpenLoop, Process, Profile, Replay


@pytest.mark.parametrize("process", ["poisson", "constant"])
def test_a_ramp_is_recorded_with_its_rates_and_its_arrivals(process: Process) -> None:
    line = load_line(OpenLoop(10.0, process, end_rate_per_s=90.0), "1")
    assert (line.rate_per_s, line.ramp_per_s, line.arrivals) == (50.0, (10.0, 90.0), process)
    assert label(line) == f"10 to 90/s {process}"


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (OpenLoop(50.0, "constant"), "50/s constant"),
        (Replay(np.array([0, 500_000_000, 2_000_000_000])), "1/s replay"),
        (Profile.parse("0..100:10,100:30"), "0 to 100 to 100/s poisson"),
        (OpenLoop(50.0, burst=8), "50/s poisson, 8 at once"),
        (ClosedLoop(4), "4 at a time"),
        (ClosedLoop(4, is_offline=True), "offline"),
    ],
)
def test_other_loads_are_no_ramps(load: Load, words: str) -> None:
    line = load_line(load, "1")
    assert line.ramp_per_s is None
    assert label(line) == words


def test_a_ramp_of_an_older_file_keeps_its_name() -> None:
    assert label(LoadLine("open", rate_per_s=50.0, arrivals="ramp")) == "50/s ramp"
