from __future__ import annotations

import json
import re
from functools import partial

import pytest

from xlaserve_loadtest import cli, session
from xlaserve_loadtest.embedded import EmbeddedServer

QUICK = ("--duration", "0.4", "--warmup", "0.05", "--concurrency", "4", "--deadline", "0.5")


@pytest.fixture
def embedded_puppet(monkeypatch, puppet_command):
    """Makes the embedded server a puppet with these flags."""

    def use(*flags):
        server = partial(EmbeddedServer, command=puppet_command(*flags))
        monkeypatch.setattr(session, "EmbeddedServer", server)

    return use


@pytest.fixture
def loadtest(tmp_path, capfd):
    """Runs the command; returns exit status, stdout, stderr and the JSON report where there is one."""

    def run(*arguments):
        path = tmp_path / "report.json"
        status = cli.main([*QUICK, "--json", str(path), *arguments])
        printed = capfd.readouterr()
        return status, printed.out, printed.err, json.loads(path.read_text()) if path.exists() else None

    return run


def figures(table: str, mode: str) -> list[str]:
    (row,) = re.findall(rf"^ *{mode} +(.*)$", table, re.MULTILINE)
    return row.split()


def test_modes_are_measured_and_held_against_graph(loadtest, embedded_puppet):
    embedded_puppet()
    status, out, err, report = loadtest("--mode", "xla,graph", "--images-per-request", "2", "--seed", "3")
    assert status == 0
    assert "starting a server for digits" in err
    assert len(figures(out, "xla")) == len(figures(out, "graph")) == 9
    assert figures(out, "graph")[-1] == "1.00"
    assert "indicative: no confidence interval yet" in out
    assert report["schema"] == "xlaserve.loadtest/1"
    assert (report["complete"], report["interrupted"], report["baseline"]) == (True, False, "graph")
    assert report["configuration"]["seed"] == 3
    assert report["environment"]["cores"] >= 1
    xla, graph = report["modes"]
    assert (xla["mode"], graph["mode"]) == ("xla", "graph")
    assert xla["images"] == 2 * xla["requests"] > 0
    assert xla["images_per_s_ratio"] == pytest.approx(xla["images_per_s"] / graph["images_per_s"])
    assert xla["stages_ms"]["execute_ms"] == pytest.approx(2)
    assert xla["mean_ms"] > 2
    assert report["server"]["ended"] is None


def test_a_running_server_is_measured(loadtest, start_puppet):
    status, out, err, report = loadtest("--mode", "xla", "--payload", "png", "--target", start_puppet())
    assert status == 0
    assert "starting" not in err
    assert len(figures(out, "xla")) == 8
    assert report["baseline"] is None
    assert report["server"]["embedded"] is False


def test_a_percentile_of_too_few_answers_is_not_printed(loadtest, embedded_puppet):
    embedded_puppet("--delay-s", "0.06")
    status, out, _, report = loadtest("--mode", "xla")
    assert status == 0
    assert figures(out, "xla")[-2:] == ["-", "0"]
    assert "too few answers to tell" in out
    assert report["modes"][0]["percentiles_ms"]["p99"] is None


def test_a_mode_that_the_server_lacks_is_reported_and_the_others_are_measured(loadtest, embedded_puppet):
    embedded_puppet()
    status, out, _, report = loadtest("--mode", "eager,xla")
    assert status == 1
    assert "eager: stopped answering; 0 of 2 blocks were measured" in out
    assert "INVALID_ARGUMENT" in out
    assert "mode: expected xla or graph, got eager" in out
    eager, xla = report["modes"]
    assert eager["images_per_s"] is None
    assert xla["images_per_s"] > 0
    assert report["complete"] is False


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--fail-after", "20"], "INTERNAL"),
        (["--hang-after", "20"], "DEADLINE_EXCEEDED"),
        (["--wrong-shape"], "INVALID_REPLY"),
    ],
)
def test_a_target_that_goes_wrong_is_counted_and_reported(loadtest, embedded_puppet, flags, status):
    embedded_puppet(*flags)
    code, out, _, report = loadtest("--mode", "xla")
    assert code == 1
    assert re.search(rf"xla: \d+ x {status}", out)
    (xla,) = report["modes"]
    assert {**xla["errors"], **xla["warmup_errors"]}.keys() == {status}


def test_a_server_that_dies_is_reported_with_its_last_words(loadtest, embedded_puppet):
    embedded_puppet("--die-after", "20")
    code, out, _, report = loadtest("--mode", "xla")
    assert code == 1
    assert "the server exited with status 9\npuppet: starting" in out
    assert "UNAVAILABLE" in out
    assert report["server"]["ended"].startswith("the server exited")


def test_ctrl_c_prints_the_report_so_far(loadtest, embedded_puppet):
    embedded_puppet("--interrupt-after", "500")
    code, out, _, report = loadtest("--mode", "xla", "--duration", "60")
    assert code == 130
    assert "interrupted: this is what was measured until then" in out
    assert float(figures(out, "xla")[0].replace(",", "")) > 0
    assert report["interrupted"] is True


def test_a_server_that_does_not_start_is_quoted(loadtest, embedded_puppet):
    embedded_puppet("--fail-at-start")
    code, out, err, report = loadtest("--mode", "xla")
    assert code == 1
    assert out == ""
    assert "loadtest: the server exited with status 1\nno model could be loaded" in err
    assert report is None


def test_an_unreachable_target_and_an_unknown_model_are_said_in_one_line(loadtest, start_puppet):
    code, _, err, _ = loadtest("--target", "127.0.0.1:1")
    assert code == 1
    assert err.startswith("loadtest: 127.0.0.1:1: UNAVAILABLE")
    code, _, err, _ = loadtest("--target", start_puppet(), "--model", "nonsense")
    assert code == 1
    assert err.endswith("NOT_FOUND: no model nonsense\n")


def test_a_model_of_several_sizes_needs_one_named(loadtest, start_puppet):
    target = start_puppet("--any-size")
    code, _, err, _ = loadtest("--target", target)
    assert code == 1
    assert "choose one with --size" in err
    assert loadtest("--target", target, "--mode", "xla", "--size", "16x24")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "xla,,graph"],
        ["--mode", "xla,xla"],
        ["--duration", "0"],
        ["--duration", "nan"],
        ["--concurrency", "0"],
        ["--size", "8"],
        ["--payload", "gif"],
        ["--target", "x:1", "--config", "y"],
        ["--json", "/no/such/folder/x.json"],
    ],
)
def test_a_wrong_command_line_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
