"""Servers that are not ours, over real sockets: their inputs, their outputs, TLS and headers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.loadtest.conftest import StartPuppet

from xlaserve_loadtest import cli
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.targets.channel import Transport
from xlaserve_loadtest.targets.open_inference import describe
from xlaserve_loadtest.targets.target import TargetError

QUICK = ("--model", "anything", "--concurrency", "2", "--duration", "0.4", "--warmup", "0.05", "--workers", "1")


def load(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    record = tmp_path / "one.run.jsonl.gz"
    status = cli.main([*QUICK, "--record", str(record), *arguments])
    lines = [json.loads(line) for line in gzip.decompress(record.read_bytes()).splitlines()] if record.exists() else []
    kinds = {line["kind"]: line for line in lines}
    return status, kinds


def test_a_model_is_sent_what_its_metadata_declare(
    tmp_path: Path, start_foreign: StartPuppet, capsys: pytest.CaptureFixture[str]
) -> None:
    status, kinds = load(tmp_path, "--target", start_foreign(), "--images-per-request", "3")
    assert status == 0, capsys.readouterr().err
    assert "failure" not in kinds
    assert kinds["block"]["generator"]["own_ms"] > 0
    (arm,) = kinds["header"]["arms"]
    assert (arm["name"], arm["mode"]) == ("anything", "")
    assert kinds["server"]["name"] == "foreign 2"


def test_named_inputs_come_from_files(tmp_path: Path, start_foreign: StartPuppet) -> None:
    (tmp_path / "hints").mkdir()
    (tmp_path / "hints" / "one").write_text("a cat")
    target = start_foreign()
    status, kinds = load(tmp_path, "--target", target, "--input", f"hint={tmp_path / 'hints'}", "--input", "ids=zeros")
    assert status == 0
    assert "failure" not in kinds
    assert kinds["header"]["configuration"]["inputs"] == [["hint", str(tmp_path / "hints")], ["ids", "zeros"]]


def test_a_server_is_reached_over_tls_with_a_token_that_is_not_recorded(
    tmp_path: Path, start_foreign: StartPuppet, certificates: dict[str, str]
) -> None:
    server = ("--tls", certificates["server-key"], certificates["server-cert"], "--trust", certificates["ca"])
    target = start_foreign(*server, "--token", "Bearer secret")
    client = ("--tls-ca", certificates["ca"], "--tls-cert", certificates["client-cert"], "--tls-key")
    named = ("--tls-server-name", "served.test", "--compression", "gzip")
    header = ("--header", "Authorization=Bearer secret")
    status, kinds = load(tmp_path, "--target", target, *client, certificates["client-key"], *named, *header)
    assert status == 0
    assert "failure" not in kinds
    transport = {"tls": True, "headers": ["authorization"], "compression": "gzip", "connections": 1}
    assert kinds["header"]["configuration"]["transport"] == transport
    texts = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert not any(b"secret" in (gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text) for text in texts)


async def test_a_wrong_token_and_a_server_that_is_not_trusted_are_said(
    start_foreign: StartPuppet, certificates: dict[str, str]
) -> None:
    plain = start_foreign("--token", "right")
    with pytest.raises(TargetError, match="UNAUTHENTICATED: expected a token"):
        await describe(plain, "m", Transport(headers=(("authorization", "wrong"),)))
    secure = start_foreign("--tls", certificates["server-key"], certificates["server-cert"])
    with pytest.raises(TargetError, match="UNAVAILABLE"):
        await describe(secure, "m", Transport(is_secure=True, server_name="served.test"))


def test_a_mix_sends_each_model_its_share_and_reports_each(
    tmp_path: Path, start_foreign: StartPuppet, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "one.run.jsonl.gz"
    arguments = ("--target", start_foreign(), "--mix", "one:0.75,two:0.25", "--images-per-request", "1:0.5,3:0.5")
    assert cli.main([*QUICK[2:], "--details", "--record", str(record), *arguments]) == 0
    assert "By model" in capsys.readouterr().out
    run = read_run(record)
    (arm,) = run.header.arms
    assert (arm.name, arm.model, arm.models) == ("mix", "one:0.75,two:0.25", ("one", "two"))
    assert not run.failures
    assert 0.15 < float((run.requests["model"] == 1).mean()) < 0.35
    summary = summarize(run)
    assert [model for model, _ in summary.by_model] == ["one", "two"]
    assert sum(point.requests for _, point in summary.by_model) == summary.points[0].requests


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--input", "ids"), "expected NAME=noise"),
        (("--mix", "a,a"), "expected models such as"),
        (("--mix", "a"), "--mix: expected several models"),
        (("--mix", "a,b", "--model", "c"), "--mix stands in place of --model"),
        (("--header", "no value"), "expected NAME=VALUE"),
        (("--header", "key-bin=1"), "expected NAME=VALUE"),
        (("--header", "key=a\nb"), "expected NAME=VALUE"),
        (("--tls-ca", "/nowhere"), "--tls-ca: expected a file that exists, got '/nowhere'"),
        (("--target", "h:1", "--tls-ca", __file__), "--tls-ca: expected certificates in PEM, got /"),
        (
            ("--target", "h:1", "--tls-cert", __file__, "--tls-key", __file__),
            "--tls-cert, --tls-key: expected a certificate and",
        ),
        (("--target", "h"), "got 'h'"),
        (("--target", "h:65536"), "got 'h:65536'"),
        (("--arm", "a=h:0"), "expected HOST:PORT, http://"),
        (("--arm", "a"), "expected NAME=ADDRESS"),
        (("--target", "ftp://h:1"), "got 'ftp://h:1'"),
        (("--target", "http://h/v2"), "got 'http://h/v2'"),
        (("--target", "h:1,http://h:1"), "expected addresses of one protocol or one fleet, and an arm for each"),
        (
            ("--target", "fleet://h:1,fleet://h:2"),
            "expected addresses of one protocol or one fleet, and an arm for each",
        ),
        (("--target", "http://h:1", "--tls"), "http:// is in the clear; expected https://"),
        (("--warmup", "-1"), "expected a number of 0 or more seconds, got '-1'"),
        (("--duration", "5m"), "expected a number of seconds over 0, got '5m'"),
        (("--modle", "digits"), "unrecognized arguments: --modle, did you mean --mode or --model?"),
        (("--out", __file__), ", which is a file"),
        (("--seed", "1.5"), "expected a whole number of 0 or more, got '1.5'"),
        (("--seed", "9" * 23), f"expected a whole number of 0 or more and below 2^63, got '{'9' * 23}'"),
        (("--target", "h:1", "--tls-cert", __file__), "--tls-cert and --tls-key go together"),
        (("--tls",), "is for --target"),
        (("--input", "ids=noise"), "is for --target"),
        (("--target", "h:1", "--input", "ids=noise", "--size", "8x8"), "exclude --images, --size"),
    ],
)
def test_a_wrong_option_is_explained(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*arguments])
    assert reason in capsys.readouterr().err
