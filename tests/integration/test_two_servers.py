"""`loadtest --arm ours=... --arm theirs=...` from one command to a verdict, on two servers of this package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.conftest import NOOP, StartServer

from xlaserve_loadtest import cli
from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.record.run_file import read_run

OURS, THEIRS = ({**NOOP, "max_queue_delay_ms": delay_ms} for delay_ms in (20, 60))
"""Each waits for more images than one slot sends, for so long that a busy machine does not matter."""


def compare(tmp_path: Path, *arms: str) -> tuple[int, Summary]:
    record = tmp_path / "two.run.jsonl.gz"
    load = ("--concurrency", "1", "--duration", "4", "--warmup", "0.2", "--full-duration", "--workers", "1")
    options = ("--model", "noop", *load, "--details", "--record", str(record))
    status = cli.main([*options, *(word for arm in arms for word in ("--arm", arm))])
    return status, summarize(read_run(record))


@pytest.mark.slow
def test_two_servers_are_compared_by_one_command(
    tmp_path: Path, start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = start_server({"models": [OURS]}), start_server({"models": [THEIRS]})
    status, summary = compare(tmp_path, f"ours={ours.grpc}", f"theirs={theirs.grpc}")
    out = " ".join(capsys.readouterr().out.split())
    assert status == 0
    assert not summary.failures
    found = {(one.arm, one.baseline): one for one in summary.comparisons}
    assert set(found) == {("theirs", "ours"), ("ours (again)", "ours")}
    compared, control = found["theirs", "ours"], found["ours (again)", "ours"]
    assert compared.pairs >= 4
    assert compared.ratio is not None
    assert compared.ratio.value < 0.6, "60 ms against 20"
    # Chance alone makes one control in twenty fail, and a busy machine more; or it starves the generator.
    is_unsure = control.has_failed or compared.reason.startswith("generator-limited")
    assert compared.verdict == ("inconclusive" if is_unsure else "slower"), compared.reason
    assert {server.pid for server in summary.servers} == {ours.serving.pid, theirs.serving.pid}
    assert all(equality.is_equal for equality in summary.equalities)
    # The control is sent to the server of its baseline, so the verdict claims no more than these processes.
    assert {point.arm: point.requests > 0 for point in summary.points} == dict.fromkeys(
        ("ours", "ours (again)", "theirs"), True
    )
    assert ("theirs is slower than ours at 1 at a time" in out) != is_unsure
    assert "in the same processes" in out
    assert "which an A/A control in the process of its baseline can't show" in out
