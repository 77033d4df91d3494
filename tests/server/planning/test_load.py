from __future__ import annotations

from pathlib import Path

import pytest

from xlaserve.errors import ConfigError
from xlaserve.planning.load import poisson, read_trace


def test_random_times_have_the_rate_and_never_go_back() -> None:
    load = poisson(200, 100, 3, seed=0)
    assert load.rate == pytest.approx(200, rel=0.03)
    assert (load.at_s[1:] >= load.at_s[:-1]).all()
    assert set(load.images.tolist()) == {3}


def test_a_trace_has_seconds_or_objects_and_may_have_more(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('\ufeff# a comment\n0.5\n\n{"at_s": 0.25, "images": 4, "model": "digits", "file": "a.png"}\n')
    load = read_trace(trace)
    assert load.at_s.tolist() == [0.25, 0.5]
    assert load.images.tolist() == [4, 1]


@pytest.mark.parametrize(
    "line", ["soon", "-1", "NaN", '{"images": 2}', '{"at_s": 1, "images": -2}', '{"at_s": null}', "[]"]
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"0.5\n{line}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: expected seconds, or a JSON object"):
        read_trace(trace)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="expected requests, got none"):
        read_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="expected a text file"):
        read_trace(tmp_path / "missing")
