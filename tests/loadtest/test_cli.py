from __future__ import annotations

import json
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from tests.loadtest.conftest import PuppetCommand, StartPuppet
from tests.required import required

from xlaserve_loadtest import cli
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.lines import End, Run
from xlaserve_loadtest.record.requests import Rows, Status
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.run import crew
from xlaserve_loadtest.run.session import Session
from xlaserve_loadtest.targets.embedded import EmbeddedServer

UsePuppet = Callable[..., None]
Loadtest = Callable[..., "Ran"]

ALONE = ("--equality-images", "0")
"""No request is sent alone first, for the answers under load to be compared with."""
QUICK = ("--duration", "0.4", "--warmup", "0.05", "--deadline", "0.5")


@pytest.fixture
def embedded_puppet(monkeypatch: pytest.MonkeyPatch, puppet_command: PuppetCommand) -> UsePuppet:
    """Makes the embedded servers puppets with these flags."""

    def use(*flags: str) -> None:
        server = partial(EmbeddedServer, command=puppet_command(*flags))
        monkeypatch.setattr(cli, "Session", partial(Session, make_server=server))

    return use


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "SILENCE_S", 0.5)


class Ran:
    def __init__(self, status: int, out: str, err: str, record: Run | None) -> None:
        self.status, self.out, self.err, self.record = status, out, err, record

    @property
    def run(self) -> Run:
        return required(self.record)

    @property
    def end(self) -> End:
        return required(self.run.end)

    def of(self, arm: str) -> Rows:
        """The arm's measured requests."""
        blocks = [block.index for block in self.run.blocks if block.arm == arm]
        rows = self.run.requests
        found: Rows = rows[np.isin(rows["block"], blocks) & rows["measured"]]
        return found


@pytest.fixture
def loadtest(given_ceiling: None, whole_loadtest: Loadtest) -> Loadtest:
    """As `whole_loadtest`, but for what the generator can send, which is not measured."""
    return whole_loadtest


@pytest.fixture
def whole_loadtest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Loadtest:
    """Runs the command; returns exit status, stdout, stderr and the run where there is one."""

    def run(*arguments: str, quick: Sequence[str] = QUICK) -> Ran:
        folder = tmp_path / "results"
        before = set(folder.glob("*.run.jsonl.gz"))
        out = () if "--record" in arguments else ("--out", str(folder))
        status = cli.main([*quick, "--details", *out, *arguments])
        made = set(folder.glob("*.run.jsonl.gz")) - before
        return Ran(status, *capfd.readouterr(), read_run(made.pop()) if made else None)

    return run


def test_arms_are_measured_in_mirrored_rounds_beside_a_control(
    loadtest: Loadtest, embedded_puppet: UsePuppet, tmp_path: Path
) -> None:
    embedded_puppet()
    report = tmp_path / "report.json"
    ran = loadtest(
        *("--mode", "xla,graph", "--images-per-request", "2", "--seed", "3", "--json", str(report)),
        *("--processes", "1"),
    )
    assert ran.status == 0
    header = ran.run.header
    assert [(arm.name, arm.is_control_of) for arm in header.arms] == [
        ("xla", None),
        ("graph", None),
        ("graph (again)", "graph"),
    ]
    assert (header.baseline, header.seed, header.configuration["mix"]) == ("graph", 3, "2")
    arms = [block.arm for block in ran.run.blocks]
    assert len(arms) == 24
    assert all(arms[start : start + 6] == arms[start : start + 6][::-1] for start in range(0, 24, 6))
    assert {block.round for block in ran.run.blocks} == {0, 1, 2, 3}
    assert {server.arms for server in ran.run.servers} == {("xla",), ("graph",), ("graph (again)",)}
    assert all(block.server_use.cpu_s is not None and block.generator.busy is not None for block in ran.run.blocks)
    (equality,) = ran.run.equalities
    assert (equality.arm, equality.is_equal, equality.images) == ("xla", True, 32)
    assert ran.end.complete
    assert ran.end.interrupted is False
    assert json.loads(report.read_text())["schema"]
    assert ran.run.path.with_name(ran.run.path.name.replace(".run.jsonl.gz", ".html")).exists()
    assert str(ran.run.path) in ran.out


@pytest.mark.slow
def test_every_arm_has_several_processes_of_its_own_and_its_control_too(
    loadtest: Loadtest, embedded_puppet: UsePuppet
) -> None:
    embedded_puppet()
    ran = loadtest("--mode", "xla,graph", "--processes", "4", "--concurrency", "2,4")
    assert ran.status == 0
    servers = {server.id: server for server in ran.run.servers}
    assert len({server.pid for server in servers.values()}) == len(servers) == 12
    orders = [tuple(servers[first + place].arms[0] for place in range(3)) for first in range(0, 12, 3)]
    assert all(set(order) == {"xla", "graph", "graph (again)"} for order in orders)
    assert len(set(orders)) > 1
    # All servers of a generation are measured in turns, under every load, before the next generation starts.
    used = [required(block.server) // 3 for block in ran.run.blocks]
    assert used == sorted(used)
    assert all(block.arm in servers[required(block.server)].arms for block in ran.run.blocks)
    for generation in range(4):
        own = [block for block in ran.run.blocks if required(block.server) // 3 == generation]
        assert [block.load.concurrency for block in own] == [2] * 6 + [4] * 6
        assert len({block.server for block in own}) == 3
    assert len({block.round for block in ran.run.blocks}) == 8
    comparisons = summarize(ran.run).comparisons
    assert {(one.unit, one.pairs) for one in comparisons} == {("server processes", 4)}
    assert "each arm has 4 server processes, one after the other" in ran.err
    assert "of which starting servers" in ran.err


@pytest.mark.slow
def test_later_processes_load_compiled_programs_and_time_them_themselves(
    loadtest: Loadtest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLASERVE_COMPILE_CACHE")  # of other tests
    config = tmp_path / "config.yaml"
    config.write_text("models: [{name: digits, source: 'builtin:digits', buckets: [1, 16]}]")
    ran = loadtest("--config", str(config), "--mode", "xla,graph", "--no-control", "--processes", "2")
    assert ran.status == 0
    first, second = [one for one in ran.run.servers if one.arms == ("xla",)]
    assert not any(program.from_cache for program in first.ledger)
    assert all(program.from_cache for program in second.ledger)
    assert [program.run_s for program in first.ledger] != [program.run_s for program in second.ledger]
    (price,) = [price for price in summarize(ran.run).prices if price.arm == "xla"]
    assert price.compile_s == pytest.approx(sum(program.compile_s for program in first.ledger))


def test_one_server_process_runs_all_arms_where_that_is_asked_for(
    loadtest: Loadtest, embedded_puppet: UsePuppet
) -> None:
    embedded_puppet()
    ran = loadtest("--mode", "xla,graph", "--share-process")
    assert ran.status == 0
    assert [server.arms for server in ran.run.servers] == [("xla", "graph", "graph (again)")]
    assert {one.unit for one in summarize(ran.run).comparisons} == {"blocks"}
    assert "hold within those processes" in " ".join(ran.out.split())


def test_a_server_that_does_not_restart_ends_the_run_and_keeps_its_results(
    loadtest: Loadtest, embedded_puppet: UsePuppet, tmp_path: Path
) -> None:
    embedded_puppet("--fail-after-starts", "2", str(tmp_path / "starts"))
    ran = loadtest("--mode", "xla,graph", "--no-control", "--processes", "4")
    assert ran.status == 1
    assert "the server exited with status 1" in ran.end.reason
    assert {block.server for block in ran.run.blocks} == {0, 1}


@pytest.mark.parametrize(
    ("delay_s", "duration", "tolerance"),
    [(0.05, "1", 0.15), pytest.param(0.15, "3", 0.05, marks=pytest.mark.slow)],
)
def test_running_servers_are_compared_as_arms(
    whole_loadtest: Loadtest, start_puppet: StartPuppet, delay_s: float, duration: str, tolerance: float
) -> None:
    ours, theirs = start_puppet("--delay-s", str(delay_s)), start_puppet("--delay-s", str(2 * delay_s))
    ran = whole_loadtest(
        *("--arm", f"ours={ours}", "--arm", f"theirs={theirs},mode=xla", "--baseline", "theirs"),
        *("--duration", duration, "--warmup", "0.2", "--concurrency", "4", "--deadline", "5"),
        *("--equality-images", "4"),
    )
    assert ran.status == 0
    assert [(arm.name, arm.mode, arm.target, arm.is_control_of) for arm in ran.run.header.arms] == [
        ("ours", "", ours, None),
        ("theirs", "xla", theirs, None),
        ("theirs (again)", "xla", theirs, "theirs"),
    ]
    assert [(server.address, server.arms) for server in sorted(ran.run.servers, key=lambda one: one.arms)] == [
        (ours, ("ours",)),
        (theirs, ("theirs", "theirs (again)")),
    ]
    # Whether or not a control runs on it, no server gets more than another.
    (of_ours, of_theirs) = Counter(block.server for block in ran.run.blocks).values()
    assert of_ours == of_theirs
    found = {one.arm: one for one in summarize(ran.run).comparisons}
    assert (found["ours"].baseline, found["ours"].unit) == ("theirs", "blocks")
    assert (found["ours"].holds, found["ours"].pairs) == ("of these two processes", of_ours)
    # A machine that takes the processor away from the generator leaves no verdict.
    assert found["ours"].verdict == "faster" or found["ours"].reason.startswith("generator-limited"), found["ours"]
    # What the clients and the network add is the same for both: it draws the ratio to 1, by more on a busy machine.
    assert required(found["ours"].ratio).value == pytest.approx(2, rel=tolerance)
    (equality,) = ran.run.equalities
    assert (equality.arm, equality.baseline, equality.is_equal) == ("ours", "theirs", True)


def test_a_foreign_server_is_sent_no_mode_and_checked_by_its_own_metadata(
    loadtest: Loadtest, start_puppet: StartPuppet, start_foreign: StartPuppet
) -> None:
    ours, theirs = start_puppet(), start_foreign()
    ran = loadtest("--arm", f"ours={ours},mode=xla", "--arm", f"theirs={theirs},model=bert")
    # The foreign server refuses every parameter.
    assert not ran.run.failures
    assert ran.run.header.baseline == "ours"
    assert len(ran.of("ours")) > 0
    assert len(ran.of("theirs")) > 0
    ran = loadtest("--arm", f"theirs={theirs},mode=xla")
    assert ran.status == 1
    assert "names no modes of digits: leave out the mode xla" in ran.err


def test_a_running_server_is_measured_under_several_loads(whole_loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    ran = whole_loadtest(*("--mode", "xla", "--payload", "encoded", "--concurrency", "1,4", "--target", start_puppet()))
    assert ran.status == 0
    assert "starting" not in ran.err
    assert [(block.load.type, block.load.concurrency) for block in ran.run.blocks] == [("closed", 1), ("closed", 4)]
    (server,) = ran.run.servers
    assert server.ready_s is None
    assert server.pid is not None


def test_a_slow_server_among_several_is_named(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    fast, slow = start_puppet("--delay-s", "0.01"), start_puppet("--delay-s", "0.1")
    ran = loadtest("--mode", "xla", "--rate", "100", "--target", f"{fast},{slow}", "--duration", "2", "--full-duration")
    assert ran.status == 0
    assert set(ran.run.requests["target"].tolist()) == {0, 1}
    summary = summarize(ran.run)
    assert [name for name, _ in summary.by_target] == [fast, slow]
    (warning,) = [text for text in summary.warnings if text.startswith("A target does not do as the others")]
    assert f"{slow}: its p50 is" in warning
    assert "By target" in ran.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--in-process", "--generator", "a:7070"), "--in-process sends nothing"),
        (("--target", "null", "--generator", "a:7070"), "--target null is on this machine"),
        (("--target", "h:1", "--generator", "a:7070", "--generator", "a:7070"), "each is named once"),
        (("--target", "h:1", "--generator", "a"), "expected a port such as 9100"),
        (("--target", "h:1", "--generator-key", "key"), "--generator-key is for --generator"),
        (("--target", "h:1", "--generator", "a:7070"), "expected the key that coordinator and generators share"),
        (("--target", ",".join(f"h:{port}" for port in range(1, 258))), "expected up to 256 addresses"),
    ],
)
def test_generators_that_can_not_be_used_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("LOADTEST_GENERATOR_KEY", raising=False)
    with pytest.raises(SystemExit):
        cli.main(list(options))
    assert message in capsys.readouterr().err


def test_an_open_loop_is_the_same_for_every_arm_of_a_round(
    loadtest: Loadtest, start_puppet: StartPuppet, tmp_path: Path
) -> None:
    saved = tmp_path / "arrivals.txt"
    target = start_puppet()
    ran = loadtest(
        *("--mode", "xla,graph", "--rate", "100", "--target", target, "--no-control", "--save-arrivals", str(saved)),
        *("--duration", "1.6"),
    )
    assert ran.status == 0
    due: dict[int | None, list[np.ndarray[Any, Any]]] = {}
    for block in ran.run.blocks:
        rows = ran.run.requests[ran.run.requests["block"] == block.index]
        offsets = np.sort(rows["scheduled_ns"][rows["measured"]]) - required(block.window_ns)[0]
        due.setdefault(block.round, []).append(offsets)
    for schedules in due.values():
        assert all(np.array_equal(schedules[0], other) for other in schedules)
    replayed = loadtest("--mode", "xla", "--replay", str(saved), "--target", target, "--warmup", "0.1")
    assert replayed.status == 0
    assert len(replayed.of("xla")) == len(saved.read_text().splitlines())
    assert replayed.run.blocks[0].load.arrivals == "replay"


def test_load_is_shared_by_worker_processes(whole_loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    ran = whole_loadtest("--mode", "xla", "--rate", "200", "--workers", "2", "--target", start_puppet())
    assert ran.status == 0
    (block,) = ran.run.blocks
    assert block.generator.workers == 2
    assert required(block.generator.own_ms) > 0
    assert "the load generator can send " in ran.err
    assert len(ran.of("xla")) == pytest.approx(80, abs=40)


def test_latencies_that_a_puppet_injects_come_out_within_one_percent(
    loadtest: Loadtest, start_puppet: StartPuppet, tmp_path: Path
) -> None:
    # Seven in ten take 1 s, a quarter 2 s, the rest 3 s.
    log = tmp_path / "log"
    target = start_puppet("--delays-s", "1", "2", "3", "--answer-log", str(log))
    ran = loadtest(*("--mode", "xla", "--rate", "80", "--target", target, "--duration", "4", "--deadline", "9"), *ALONE)
    assert ran.status == 0
    rows = np.sort(ran.run.requests, order="start_ns")
    answers = np.loadtxt(log, dtype=np.int64)
    # Metadata and the comparison of outputs are no part of the load, and come first.
    received_ns, answered_ns = answers[np.argsort(answers[:, 0])][-rows.size :].T
    measured = rows["measured"]
    latencies_s = (rows["end_ns"] - rows["scheduled_ns"])[measured] / 1e9
    # On a loaded machine both sides are late. How late requests leave and the puppet answers is part of their latency;
    # how long answers wait in the generator is what it says itself.
    assert (received_ns >= rows["scheduled_ns"]).all()
    served_s = (answered_ns - rows["scheduled_ns"])[measured] / 1e9
    wait_s = max(required(block.generator.wait_ms) for block in ran.run.blocks) / 1e3
    assert np.median(rows["start_ns"] - rows["scheduled_ns"]) / 1e9 < 0.01 + wait_s
    for rank, injected_s in ((50, 1.0), (90, 2.0), (99, 3.0)):
        latency_s, expected_s = np.percentile(latencies_s, rank), np.percentile(served_s, rank)
        assert latency_s >= injected_s
        assert latency_s == pytest.approx(expected_s, abs=0.01 * injected_s + wait_s)


def test_a_stall_of_half_an_open_loop_shows_in_the_p90(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    # The puppet stops itself, so that the stall begins inside the window: 20 of 300 requests are warm-up.
    target = start_puppet("--stop-after", "95", "--stop-s", "1.5")
    ran = loadtest(
        *("--mode", "xla", "--rate", "100", "--arrivals", "constant", "--duration", "3", "--warmup", "0.2"),
        *("--deadline", "5", "--target", target),
    )
    assert ran.status == 0
    rows = ran.of("xla")
    latencies_s = (rows["end_ns"] - rows["scheduled_ns"]) / 1e9
    assert np.quantile(latencies_s, 0.9) == pytest.approx(0.8 * 1.5, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "failure"),
    [
        (["--fail-after", "40"], ("INTERNAL", "INTERNAL: broken on purpose")),
        (["--hang-after", "40"], ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")),
        (["--wrong-shape"], ("INVALID_REPLY", "invalid answer: expected outputs")),
        (["--wrong-numbers"], ("INVALID_REPLY", "invalid answer: expected finite numbers in output scores, got nan")),
    ],
)
@pytest.mark.parametrize("load", [("--concurrency", "4"), ("--rate", "100")])
@pytest.mark.usefixtures("short_silence")
def test_a_target_that_goes_wrong_is_counted_and_reported(
    loadtest: Loadtest,
    embedded_puppet: UsePuppet,
    flags: list[str],
    failure: tuple[str, str],
    load: tuple[str, str],
) -> None:
    embedded_puppet(*flags)
    status, shown = failure
    ran = loadtest("--mode", "xla", *load)
    failed = [one for one in ran.run.failures if one.status == status]
    assert failed[0].count == (ran.run.requests["status"] == Status[status]).sum() > 0
    assert shown in " ".join(ran.out.split())
    # 1 where all that failed was due before the window.
    assert ran.status in (1, 3)
    if status == "INVALID_REPLY":
        assert ran.status == 3
        assert ran.end.complete is False


def test_an_open_loop_reports_its_goodput(loadtest: Loadtest, embedded_puppet: UsePuppet) -> None:
    embedded_puppet("--delay-s", "0.2")
    options = ("--mode", "xla", "--rate", "50", "--slo", "p99<100ms", "--fail-if", "goodput<1%")
    ran = loadtest(*options, *ALONE, "--distinct", quick=("--duration", "0.5", "--warmup", "0.1"))
    assert ran.status == 3
    assert not ran.run.failures
    assert "0.0% within 100 ms" in " ".join(ran.out.split())
    assert "goodput<1%: xla, 50/s poisson: 0.00%" in ran.err


def test_a_server_that_dies_is_reported_with_its_last_words(loadtest: Loadtest, embedded_puppet: UsePuppet) -> None:
    embedded_puppet("--die-after", "60")
    ran = loadtest("--mode", "xla")
    assert ran.status == 3
    assert ran.end.reason == "the server exited with status 9\npuppet: starting"
    assert {failure.status for failure in ran.run.failures} == {"UNAVAILABLE"}


def test_a_mode_that_the_server_lacks_is_refused_before_anything_is_sent(
    loadtest: Loadtest, start_puppet: StartPuppet, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    target = start_puppet("--log", str(log))
    refusal = f"{target} does not offer the mode openvino of digits: it has xla, graph"
    for words in (("--mode", "openvino,xla", "--target", target), ("--arm", f"a={target},mode=openvino")):
        ran = loadtest(*words, "--no-control")
        assert (ran.status, ran.end.reason) == (1, refusal)
        assert ran.err.endswith(f"loadtest: {refusal}\n")
    assert not log.exists()


def test_ctrl_c_prints_the_report_so_far(loadtest: Loadtest, embedded_puppet: UsePuppet) -> None:
    embedded_puppet("--interrupt-after", "500")
    ran = loadtest("--mode", "xla", "--duration", "60")
    assert ran.status == 130
    assert "nterrupted" in ran.out
    assert len(ran.of("xla")) > 0
    assert ran.end.interrupted


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_other_signals_print_the_report_so_far_too(loadtest: Loadtest, embedded_puppet: UsePuppet, number: str) -> None:
    embedded_puppet("--interrupt-after", "500", "--interrupt-with", number)
    ran = loadtest("--mode", "xla", "--duration", "60")
    assert ran.status == 130
    assert len(ran.of("xla")) > 0
    assert ran.end.interrupted


def test_a_run_under_nohup_outlives_its_terminal(loadtest: Loadtest, embedded_puppet: UsePuppet) -> None:
    embedded_puppet("--interrupt-after", "50", "--interrupt-with", "SIGHUP")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ran = loadtest("--mode", "xla", "--duration", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ran.status == 0
    assert not ran.end.interrupted


@pytest.mark.parametrize("payload", ["encoded", "pixels"])
def test_images_of_a_folder_are_sent(loadtest: Loadtest, tmp_path: Path, payload: str) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for level, name in ((10, "a.png"), (200, "b.jpg"), (90, "c.webp")):
        Image.fromarray(np.full((40, 30, 3), level, np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    flags = ("--mode", "xla", "--model", "builtin:noop", "--images", str(folder), "--concurrency", "2")
    ran = loadtest(*flags, *(("--payload", "pixels") if payload == "pixels" else ()))
    assert ran.status == 0, ran.out + ran.err
    assert len(ran.of("xla")) > 0
    (block,) = ran.run.blocks
    assert required(required(block.counters).images) > 0
    decoded_s = ran.run.requests["decode_s"][ran.run.requests["measured"]]
    assert (np.nanmax(decoded_s) > 0) == (payload == "encoded")


def test_ctrl_c_while_a_server_starts_ends_it(loadtest: Loadtest, embedded_puppet: UsePuppet) -> None:
    embedded_puppet("--interrupt-at-start", "--never-ready")
    ran = loadtest("--mode", "xla")
    assert ran.status == 130
    assert ran.out == ""
    assert ran.end.interrupted


def test_a_server_of_our_own_tells_its_buckets_its_padding_and_its_ledger(loadtest: Loadtest) -> None:
    ran = loadtest("--mode", "xla", "--model", "builtin:noop", "--concurrency", "2", "--images-per-request", "3")
    assert ran.status == 0
    (server,), (block,) = ran.run.servers, ran.run.blocks
    assert [entry.bucket[0] for entry in server.ledger] == [1, 2, 4, 8, 16]
    assert server.models["noop"]["source"] == "builtin:noop"
    assert required(server.ready_s) > 0
    counters = required(block.counters)
    assert (counters.compilations, counters.serving_compilations) == (0, 0)
    assert required(counters.images) >= block.generator.sends * 3
    assert sum(counters.batches_by_bucket.values()) > 0
    assert {"execute_s", "queue_s"} <= {name for name in required(ran.run.requests.dtype.names) if name.endswith("_s")}


def test_without_a_server_the_compiled_functions_are_called_in_a_worker(loadtest: Loadtest) -> None:
    ran = loadtest(
        "--in-process", "--mode", "xla,graph", "--model", "builtin:noop", "--images-per-request", "3", quick=QUICK[:4]
    )
    assert ran.status == 0
    assert {arm.target for arm in ran.run.header.arms} == {"in-process"}
    assert len({server.pid for server in ran.run.servers}) == 3
    assert all(server.ledger for server in ran.run.servers)
    assert len(ran.of("xla")) > 0
    assert ran.run.equalities[0].is_equal


@pytest.mark.parametrize(
    ("flag", "counted", "words"),
    [
        (
            "--compile-after",
            (2, 0),
            "the server compiled beside traffic while it was measured: xla, 16 at a time (2).",
        ),
        ("--recompile-after", (0, 3), "Programs that XLA compiled while requests waited: xla, 16 at a time (3)."),
    ],
)
def test_compilations_that_requests_waited_for_are_told_from_others(
    loadtest: Loadtest, embedded_puppet: UsePuppet, flag: str, counted: tuple[int, int], words: str
) -> None:
    embedded_puppet(flag, "20")
    ran = loadtest("--mode", "xla", *ALONE)
    (block,) = ran.run.blocks
    counters = required(block.counters)
    assert (counters.compilations, counters.serving_compilations) == counted
    (event,) = ran.run.events
    assert (event.what, "while requests waited" in event.text) == ("compile", counted[1] > 0)
    (warning,) = [text for text in summarize(ran.run).warnings if "compiled" in text]
    assert warning.endswith(words)


def test_a_server_that_does_not_start_is_quoted(loadtest: Loadtest, embedded_puppet: UsePuppet) -> None:
    embedded_puppet("--fail-at-start")
    ran = loadtest("--mode", "xla")
    assert ran.status == 1
    assert ran.out == ""
    assert "loadtest: the server exited with status 1\nno model could be loaded" in ran.err
    assert "the server exited" in ran.end.reason


def test_a_run_ends_early_where_a_condition_is_met_and_says_so(
    loadtest: Loadtest, start_puppet: StartPuppet, tmp_path: Path
) -> None:
    target, junit = start_puppet("--fail-after", "200"), tmp_path / "junit.xml"
    ran = loadtest(
        *("--mode", "xla", "--target", target, "--duration", "60", "--full-duration"),
        *("--abort-if", "errors>2", "--abort-if", "dropped>0", "--junit", str(junit)),
    )
    assert ran.status == 3
    assert (ran.end.interrupted, ran.end.complete) == (False, False)
    assert ran.end.reason.startswith("--abort-if errors>2: xla, 16 at a time: ")
    assert ran.err.endswith(ran.end.reason + "\n")
    assert "Not everything that was planned was measured: --abort-if errors>2" in " ".join(ran.out.split())
    (block,) = ran.run.blocks
    assert block.arm == "xla"
    cases = ElementTree.parse(junit).iter("testcase")
    assert {case.attrib["name"]: case[0].tag for case in cases} == {
        "errors>2": "failure",
        "dropped>0": "system-out",
        "errors>0": "failure",
        "differing>0": "system-out",
        "complete run": "error",
    }


@pytest.mark.usefixtures("short_silence")
def test_a_closed_loop_of_failures_meets_its_condition_in_every_report(
    loadtest: Loadtest, start_puppet: StartPuppet, tmp_path: Path
) -> None:
    target, junit = start_puppet("--fail-after", "0"), tmp_path / "junit.xml"
    ran = loadtest("--mode", "xla", "--target", target, "--fail-if", "errors>0", "--junit", str(junit))
    assert ran.status == 3
    assert ran.end.reason == "every request failed in the last block of xla (INTERNAL)"
    assert f"Nothing was measured: {ran.end.reason}." in " ".join(ran.out.split())
    assert [case[0].tag for case in ElementTree.parse(junit).iter("testcase")] == ["failure", "system-out", "error"]
    assert report.main([str(ran.run.path), "--fail-if", "errors>0"]) == 3
    assert report.main([str(ran.run.path), "--fail-if", "p99<1"]) == 3


def test_an_arm_whose_first_requests_fail_keeps_its_blocks(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    arms = {"a": start_puppet("--fail-first", "8"), "b": start_puppet()}
    ran = loadtest(
        *("--concurrency", "4", *ALONE),
        *(f"--arm={name}={target},mode=xla" for name, target in arms.items()),
    )
    assert (ran.status, ran.end.complete) == (0, True)
    blocks = Counter(block.arm for block in ran.run.blocks if block.window_ns)
    assert 2 * blocks["a"] == blocks["b"] > 8, "the control runs on the server of a"


def test_a_page_that_can_not_be_written_is_not_named_as_if_it_were(
    loadtest: Loadtest, start_puppet: StartPuppet
) -> None:
    ran = loadtest("--mode", "xla", "--target", start_puppet(), "--html", "/dev/full")
    assert ran.status == 1
    assert "No space left on device: '/dev/full'" in ran.err
    assert "page:" not in ran.out
    assert "run: " in ran.out


def test_a_run_in_which_no_condition_is_met_goes_on_to_its_end(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    target = start_puppet()
    ran = loadtest("--mode", "xla", "--target", target, "--abort-if", "p99>5s", "--live-port", port)
    assert (ran.status, ran.end.complete) == (0, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = loadtest("--mode", "xla", "--target", target, "--live-port", str(taken.getsockname()[1]))
        assert (ran.status, ran.out) == (1, "")
        assert "ddress already in use" in ran.err


def test_an_unreachable_target_and_an_unknown_model_are_said_in_one_line(
    loadtest: Loadtest, start_puppet: StartPuppet
) -> None:
    ran = loadtest("--target", "127.0.0.1:1")
    assert ran.status == 1
    assert ran.err.startswith("loadtest: 127.0.0.1:1: UNAVAILABLE")
    ran = loadtest("--target", start_puppet(), "--model", "nonsense")
    assert ran.status == 1
    assert ran.err.endswith("NOT_FOUND: no model nonsense\n")


def test_no_result_of_an_earlier_run_survives_one_that_comes_to_nothing(loadtest: Loadtest, tmp_path: Path) -> None:
    results = {name: tmp_path / name for name in ("junit", "json", "csv", "markdown", "record")}
    for path in (*results.values(), tmp_path / "record.html"):
        path.write_text("of an earlier run")
    words = [word for name, path in results.items() for word in (f"--{name}", str(path))]
    ran = loadtest("--target", "127.0.0.1:1", *words)
    assert ran.status == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["junit"]
    (case,) = ElementTree.parse(results["junit"]).iter("testcase")
    assert (case.attrib["name"], case[0].tag) == ("complete run", "error")
    assert "127.0.0.1:1: UNAVAILABLE" in case[0].attrib["message"]


def test_errors_are_allowed_by_a_condition_on_them_and_not_by_one_on_speed(
    loadtest: Loadtest, start_puppet: StartPuppet
) -> None:
    target = start_puppet("--fail-every", "3")
    options = ("--target", target, "--mode", "xla", *ALONE, "--concurrency", "4")
    failing = loadtest(*options, "--fail-if", "verdict=slower")
    assert failing.status == 3
    assert "loadtest: default --fail-if errors>0: xla, 4 at a time: " in failing.err
    assert loadtest(*options, "--fail-if", "errors>60%").status == 0


@pytest.mark.parametrize("options", [(), ("--rate", "200"), ("--images-per-request", "2:0.5,3:0.5")])
def test_answers_that_are_wrong_only_beside_others_are_found(
    loadtest: Loadtest, start_puppet: StartPuppet, options: tuple[str, ...]
) -> None:
    target = start_puppet("--differ-at-once", "2", "--delay-s", "0.02")
    ran = loadtest("--mode", "xla", "--target", target, "--workers", "2", *options)
    assert ran.status == 3
    (block,) = ran.run.blocks
    wrong = (ran.run.requests["status"] == Status.DIFFERING_REPLY).sum()
    assert block.generator.compared >= block.generator.differing == wrong > 0
    text = " ".join(ran.out.split())
    assert "differing answer: expected the outputs that the same request got alone" in text
    assert f"({block.generator.differing:,} of {block.generator.compared:,} compared (" in text
    assert "default --fail-if differing>0: xla, " in ran.err
    assert "default --fail-if errors>0" not in ran.err


def test_answers_that_differ_are_judged_by_their_share_of_those_compared(
    loadtest: Loadtest, start_puppet: StartPuppet
) -> None:
    target = start_puppet("--differ-at-once", "2", "--delay-s", "0.02")
    ran = loadtest("--mode", "xla", "--target", target, "--fail-if", "differing>100%", "--fail-if", "errors>0")
    assert ran.status == 0, ran.err
    (point,) = summarize(ran.run).points
    assert point.differing_measured > 0
    assert point.errors == {}


def test_an_arm_that_never_answers_the_same_fails_unless_that_is_allowed(
    loadtest: Loadtest, start_puppet: StartPuppet
) -> None:
    options = ("--mode", "xla", "--target", start_puppet("--random-numbers"))
    ran = loadtest(*options)
    assert ran.status == 3
    (equality,) = ran.run.equalities
    assert (equality.arm, equality.baseline, equality.is_equal) == ("xla", "xla", False)
    assert ran.run.blocks[0].generator.compared == 0
    assert "default --fail-if differing>0: xla against itself: " in ran.err
    assert loadtest(*options, "--fail-if", "xla:differing>100%").status == 0


def test_arms_that_can_not_be_compared_fail_unless_that_is_allowed(
    loadtest: Loadtest, start_puppet: StartPuppet, start_foreign: StartPuppet
) -> None:
    options = ("--arm", f"ours={start_puppet()}", "--arm", f"theirs={start_foreign()}")
    for condition in ((), ("--fail-if", "theirs:differing>0"), ("--fail-if", "differing>10%")):
        ran = loadtest(*options, *condition)
        assert ran.status == 3
        # Each arm's answers under load are compared with its own all the same.
        assert any(block.generator.compared for block in ran.run.blocks)
        (equality,) = ran.run.equalities
        assert (equality.arm, equality.baseline, equality.is_equal, equality.images) == ("theirs", "ours", False, 0)
        assert equality.incomparable.startswith("digits takes ids INT64 [n,16], photo FP32 [n,3,8,8], ")
        assert "The outputs of theirs and ours can't be compared: digits takes ids INT64" in " ".join(ran.out.split())
    for allowed in (("--fail-if", "differing>100%"), ALONE):
        assert loadtest(*options, *allowed).status == 0


def test_right_answers_under_load_are_compared_and_no_error(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    ran = loadtest("--mode", "xla", "--target", start_puppet("--differ-at-once", "2"), "--concurrency", "1")
    assert ran.status == 0
    (block,) = ran.run.blocks
    assert block.generator.compared > block.generator.differing == 0
    ran = loadtest("--mode", "xla", "--target", start_puppet(), *ALONE)
    assert (ran.status, ran.run.blocks[0].generator.compared) == (0, 0)
    assert "were not compared with what the same request got alone" in " ".join(ran.out.split())


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "PERMISSION_DENIED", "UNIMPLEMENTED"])
def test_a_request_that_is_refused_for_good_is_tried_once(
    loadtest: Loadtest, start_puppet: StartPuppet, tmp_path: Path, status: str
) -> None:
    log = tmp_path / "log"
    ran = loadtest("--mode", "xla", "--target", start_puppet("--refuse", status, "--log", str(log)))
    assert (ran.status, len(log.read_text().splitlines())) == (1, 1)
    assert ran.end.reason == f"xla refused a trial request: {status}: on purpose"


@pytest.mark.parametrize("how", [(), ("--in-process",)])
def test_a_model_that_there_is_none_of_is_refused_before_a_server_starts(
    loadtest: Loadtest, how: tuple[str, ...]
) -> None:
    ran = loadtest("--model", "nosuch,digits", *how, quick=QUICK[:4])
    assert (ran.status, ran.out, ran.record) == (1, "", None)
    assert ran.err.startswith("loadtest: --model nosuch,digits: configuration: model nosuch: source: expected one of ")
    assert ran.err.endswith(", got builtin:nosuch\n")


@pytest.mark.parametrize(("modes", "measured"), [("xla,graph", "xla, graph"), ("xla", "xla")])
def test_a_baseline_that_is_not_measured_is_refused(
    loadtest: Loadtest, start_puppet: StartPuppet, modes: str, measured: str
) -> None:
    ran = loadtest("--target", start_puppet("--models", json.dumps({"digits": modes})), "--baseline", "eager")
    assert (ran.status, ran.record) == (1, None)
    assert ran.err == f"loadtest: --baseline: expected one of several arms that are measured ({measured}), got eager\n"


def test_all_modes_of_a_target_are_those_that_it_offers(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    ran = loadtest("--mode", "all", "--target", start_puppet(), "--no-control")
    assert ran.status == 0
    assert [arm.mode for arm in ran.run.header.arms] == ["xla", "graph"]


def test_a_model_of_several_sizes_needs_one_named(loadtest: Loadtest, start_puppet: StartPuppet) -> None:
    target = start_puppet("--any-size")
    ran = loadtest("--target", target)
    assert ran.status == 1
    assert "choose one with --size" in ran.err
    assert loadtest("--target", target, "--mode", "xla", "--size", "16x24,8x8").status == 0


def test_the_null_target_is_the_generators_own_ceiling(loadtest: Loadtest) -> None:
    ran = loadtest("--target", "null", "--size", "8x8")
    assert ran.status == 0
    assert [arm.name for arm in ran.run.header.arms] == ["null"]
    assert len(ran.of("null")) > 20


@pytest.mark.parametrize(
    ("scenario", "images", "load", "concurrency"),
    [("single-stream", "1", "closed", 1), ("multi-stream", "8", "closed", 1), ("offline", "8", "offline", 16)],
)
def test_scenarios_have_their_rules(
    loadtest: Loadtest,
    start_puppet: StartPuppet,
    *,
    scenario: str,
    images: str,
    load: str,
    concurrency: int,
) -> None:
    ran = loadtest("--mode", "xla", "--scenario", scenario, "--target", start_puppet())
    assert ran.status == 0
    (block,) = ran.run.blocks
    assert ran.run.header.scenario == scenario
    assert (block.load.type, block.load.concurrency, block.load.images_per_request) == (load, concurrency, images)
    assert "not an MLPerf result" in ran.out
    assert "measuring xla: about 1 s; getting ready took" in ran.err, "a scenario does not end before its time"


@pytest.mark.slow
def test_the_highest_rate_is_searched_and_every_tried_rate_is_kept(
    loadtest: Loadtest, start_puppet: StartPuppet
) -> None:
    # Broken for good after a while, so that the search has an end that does not depend on this machine's speed.
    target = start_puppet("--fail-after", "1500")
    ran = loadtest("--mode", "xla", "--scenario", "server", "--slo-ms", "100", "--target", target)
    roles = [block.role for block in ran.run.blocks]
    assert roles[0] == "curve"
    assert "searching the highest rate of xla with p99<100ms" in ran.err
    assert "it takes about" in ran.err
    assert {"search"} <= set(roles[1:]) <= {"search", "confirm"}
    assert ran.run.header.configuration["slo"] == "p99<100ms"
    assert ran.run.header.configuration["find_max"] is True


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{version('xlaserve')}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "xla,,graph"],
        ["--mode", "xla,xla"],
        ["--mode", "xla,grph"],
        ["--mode", "xla,all"],
        ["--in-process", "--mode", "jit"],
        ["--mode", "xla,graph", "--baseline", "grph"],
        ["--duration", "0"],
        ["--duration", "nan"],
        ["--concurrency", "0"],
        ["--rate", "0"],
        ["--rate", "5..0"],
        ["--rate", "5", "--concurrency", "5"],
        ["--scenario", "server"],
        ["--scenario", "offline", "--images-per-request", "2"],
        ["--find-max"],
        ["--scenario", "server", "--slo-ms", "5", "--arrivals", "constant"],
        ["--concurrency", "4", "--arrivals", "poisson"],
        ["--concurrency", "4", "--sample-seed", "1"],
        ["--find-max", "--slo", "p99<5ms", "--slo-ms", "5"],
        ["--find-max", "--slo", "p99<5ms", "--abort-if", "errors>0"],
        ["--abort-if", "verdict=slower"],
        ["--live-port", "0"],
        ["--live-port", "host"],
        ["--slo", "p99<5ms"],
        ["--slo", "p99<5ms", "--concurrency", "4"],
        ["--rate", "5", "--slo", "p99>5ms"],
        ["--size", "8"],
        ["--payload", "gif"],
        ["--images-per-request", "1:x"],
        ["--images", "/no/such/folder"],
        ["--replay", "/no/such/file"],
        ["--target", "x:1", "--config", "y"],
        ["--target", "x:1", "--in-process"],
        ["--target", "null,x:1"],
        ["--arm", "ours"],
        ["--arm", "ours=host"],
        ["--arm", "ours=h:1,size=8"],
        ["--arm", "a=h:1", "--arm", "a=h:2"],
        ["--arm", "a=h:1", "--target", "h:2"],
        ["--arm", "a=h:1", "--mode", "xla"],
        ["--arm", "a=h:1", "--baseline", "b"],
        ["--arm", "a=h:1", "--model", "one,other"],
        ["--arm", "a=h:1", "--share-process"],
        ["--arm", "a=h:1", "--target-http", "h:2"],
        ["--processes", "0"],
        ["--json", "/no/such/folder/x.json"],
        ["--workers", "0"],
        ["--workers", "257"],
        ["--nonsense"],
        ["report", "--nonsense", "x"],
        ["compare", "a"],
        ["sweep", "--batch", "none"],
    ],
)
def test_a_wrong_command_line_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    command = " ".join(["loadtest", *(word for word in arguments[:1] if not word.startswith("-"))])
    assert line.startswith(f"{command}: error: ")
    assert line.endswith(f"; see {command} --help")
