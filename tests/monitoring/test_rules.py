"""Prometheus's rules, as its own tool runs them over made-up series."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.monitoring.__main__ import DEPLOY, stale
from scripts.monitoring.questions import QUESTIONS
from scripts.monitoring.rules import ALERTS, RUNBOOKS

ROOT = DEPLOY.parent
PROMTOOL = shutil.which("promtool")
SERVER = {"job": "xlaserve", "instance": "a:8002"}
MODEL = {**SERVER, "model": "m", "version": "1"}
DAY_S = 24 * 3600

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool; make test installs it")


def series(metric: str, values: str, labels: Mapping[str, str] = MODEL, **more: str) -> dict[str, str]:
    """Returns a series with a value for each minute, in promtool's notation."""
    shown = ",".join(f'{label}="{value}"' for label, value in {**labels, **more}.items())
    return {"series": f"{metric}{{{shown}}}", "values": values}


def requests(minutes: int, *, ok: int = 0, failed: int = 0, limited: int = 0, model: str = "m") -> list[dict[str, str]]:
    """Returns the series of so many requests in each minute, and as many wrong ones as there are `ok`."""
    by_status = {"OK": ok, "INVALID_ARGUMENT": ok, "INTERNAL": failed, "RESOURCE_EXHAUSTED": limited}
    found = [
        series("xlaserve_requests_total", f"0+{count}x{minutes}", status=status, model=model)
        for status, count in by_status.items()
        if count
    ]
    if limited:
        found.append(series("xlaserve_refusal_seconds_count", f"0+{limited}x{minutes}", reason="limit", model=model))
    return found


def answered(minutes: int, in_time: int) -> list[dict[str, str]]:
    """Returns the series of 100 answers in each minute, of which so many came in time."""
    return [
        series("xlaserve_request_seconds_count", f"0+100x{minutes}", status="OK"),
        series("xlaserve_request_seconds_bucket", f"0+{in_time}x{minutes}", status="OK", le="0.25"),
    ]


def batches(images: int, padded: int, busy_s: int) -> list[dict[str, str]]:
    """Returns the series of so many rows and seconds in each minute, on two lanes."""
    return [
        series("xlaserve_batch_size_sum", f"0+{images}x70"),
        series("xlaserve_padded_rows_total", f"0+{padded}x70"),
        series("xlaserve_lane_busy_seconds_total", f"0+{busy_s}x70", SERVER),
        series("xlaserve_lanes", "2x70", SERVER),
    ]


def queue(images: int, size_bytes: int) -> list[dict[str, str]]:
    """Returns the series of a queue of at most 100 images and 1,000 bytes."""
    held = {"images": images, "images_limit": 100, "bytes": size_bytes, "bytes_limit": 1000}
    return [series(f"xlaserve_in_flight_{what}", f"{value}x20") for what, value in held.items()]


def starts(of: str = "xlaserve_build_info", roles: Sequence[Mapping[str, str]] = ({},)) -> list[dict[str, str]]:
    """Returns the series of processes that start every ten minutes, four times."""
    return [
        *(series("process_start_time_seconds", "1x9 2x9 3x9 4x9", {**SERVER, **role}) for role in roles),
        series(of, "1x40", SERVER),
    ]


def compilations(serving: str, expected: str) -> list[dict[str, str]]:
    by_phase = {"serving": serving, "expected": expected}
    return [
        series("xlaserve_xla_compilations_total", values, SERVER, phase=phase) for phase, values in by_phase.items()
    ]


def state(name: str) -> list[dict[str, str]]:
    return [series("xlaserve_model_state", f"{name == one:d}x5", state=one) for one in ("failed", "ready")]


def certificate(days: float) -> list[dict[str, str]]:
    return [series("xlaserve_certificate_expiry_timestamp_seconds", f"{days * DAY_S:g}x5", SERVER)]


@dataclass
class Case:
    """Series, and what is fired of them after so many minutes: labels and the summary, or None."""

    alert: str
    series: list[dict[str, str]]
    minutes: int
    fires: tuple[Mapping[str, str], str] | None = None


JOB = {"job": "xlaserve"}
QUEUE = {**SERVER, "model": "m"}
ERROR_FAST, ERROR_SLOW = "XlaserveErrorBudgetBurnsFast", "XlaserveErrorBudgetBurnsSlow"
LATENCY_FAST, LATENCY_SLOW = "XlaserveLatencyBudgetBurnsFast", "XlaserveLatencyBudgetBurnsSlow"
FULL = 'The queue of model "m" in a:8002 is 90% full.'
BURST = [*requests(70, ok=50), series("xlaserve_requests_total", "0x50 0+9x10 90x10", status="INTERNAL")]
CASES = [
    Case("XlaserveServerDown", [series("up", "1x3 0x10", SERVER)], 10, (SERVER, "a:8002 does not answer Prometheus.")),
    Case("XlaserveServerDown", [series("up", "0x3 1x10", SERVER)], 10),
    Case("XlaserveServerDown", [series("up", "0x20", {"job": "loadtest"})], 10),
    Case("XlaserveNotReady", [series("xlaserve_ready", "0x20", SERVER)], 16, (SERVER, "a:8002 has not become ready.")),
    Case("XlaserveNotReady", [series("xlaserve_ready", "0x10 1x10", SERVER)], 16),
    Case(
        ERROR_FAST, requests(70, ok=49, failed=2), 70, (JOB, "2% of the requests fail by the server's fault; 0.1% may.")
    ),
    Case(ERROR_FAST, requests(70, ok=99, failed=2), 70),
    Case(ERROR_FAST, requests(70, ok=49, limited=2), 70),
    Case(ERROR_FAST, BURST, 70),
    Case(
        ERROR_SLOW,
        requests(70, ok=99, failed=2),
        70,
        (JOB, "1% of the requests fail by the server's fault; 0.1% may."),
    ),
    Case(ERROR_SLOW, requests(70, ok=249, failed=2), 70),
    Case(LATENCY_FAST, answered(70, 80), 70, (JOB, "20% of the requests take longer than 0.25 s; 1% may.")),
    Case(LATENCY_FAST, answered(70, 90), 70),
    Case(LATENCY_SLOW, answered(70, 90), 70, (JOB, "10% of the requests take longer than 0.25 s; 1% may.")),
    Case(LATENCY_SLOW, answered(70, 95), 70),
    Case(
        "XlaserveModelErrors",
        [*requests(40, ok=45, failed=10), *requests(40, ok=9999, model="other")],
        40,
        ({**JOB, "model": "m"}, '10% of the requests of model "m" fail by the server\'s fault.'),
    ),
    Case("XlaserveModelErrors", [*requests(40, ok=49, failed=2), *requests(40, failed=10, model="")], 40),
    Case("XlaserveModelFailed", state("failed"), 3, (MODEL, 'Version 1 of model "m" can\'t be served by a:8002.')),
    Case("XlaserveModelFailed", state("ready"), 3),
    Case(
        "XlaserveCompilesWhileServing",
        compilations("0x5 1x10", "9x20"),
        10,
        (SERVER, "XLA compiled while a:8002 served: requests waited for it."),
    ),
    Case("XlaserveCompilesWhileServing", compilations("0x20", "0x5 9x10"), 10),
    Case("XlaserveQueueNearLimit", queue(90, 100), 10, (QUEUE, FULL)),
    Case("XlaserveQueueNearLimit", queue(10, 900), 10, (QUEUE, FULL)),
    Case("XlaserveQueueNearLimit", queue(70, 700), 10),
    Case(
        "XlaservePaddingWaste",
        batches(images=100, padded=300, busy_s=108),
        70,
        (SERVER, "a:8002 is busy, and only 25% of the rows that run are images."),
    ),
    Case("XlaservePaddingWaste", batches(images=300, padded=100, busy_s=108), 70),
    Case("XlaservePaddingWaste", batches(images=100, padded=300, busy_s=12), 70),
    Case("XlaserveRestarts", starts(), 35, (SERVER, "a:8002 was started 3 times again within an hour.")),
    Case("XlaserveRestarts", starts(), 25),
    Case("XlaserveRestarts", starts(of="another_build_info"), 35),
    Case(
        "XlaserveRestarts",
        starts(roles=[{"role": "supervisor"}]),
        35,
        (SERVER, "a:8002 was started 3 times again within an hour."),
    ),
    # Another engine takes the place of one that serves whenever models are replaced.
    Case("XlaserveRestarts", starts(roles=[{"role": role} for role in ("engine", "engine 2", "front 1")]), 35),
    Case(
        "XlaserveProcessRestarts",
        [series("xlaserve_process_restarts_total", "0x29 4x31", {**SERVER, "role": "front 2"})],
        60,
        ({**SERVER, "role": "front 2"}, 'The process "front 2" of a:8002 ended 4 times in an hour.'),
    ),
    Case(
        "XlaserveProcessRestarts",
        [
            series("xlaserve_process_restarts_total", "0x29 2x31", {**SERVER, "role": role})
            for role in ("front 1", "engine")
        ],
        60,
    ),
    Case(
        "XlaserveCertificateEndsSoon", certificate(10), 0, (SERVER, "The certificate of a:8002 ends in 10d 0h 0m 0s.")
    ),
    Case("XlaserveCertificateEndsSoon", certificate(20), 0),
    Case("XlaserveCertificateEnds", certificate(1), 0, (SERVER, "The certificate of a:8002 ends in 1d 0h 0m 0s.")),
    Case("XlaserveCertificateEnds", certificate(10), 0),
]


def promtool_test(case: Case) -> dict[str, Any]:
    alert = next(alert for alert in ALERTS if alert.name == case.alert)
    fired = []
    if case.fires:
        labels, summary = case.fires
        annotations = {"summary": summary, "runbook": f"{RUNBOOKS}#{alert.name.lower()}"}
        fired = [{"exp_labels": {**labels, "severity": alert.severity}, "exp_annotations": annotations}]
    return {
        "interval": "1m",
        "input_series": case.series,
        "alert_rule_test": [{"alertname": case.alert, "eval_time": f"{case.minutes}m", "exp_alerts": fired}],
    }


def complaints(cases: list[Case], folder: Path) -> str:
    """Runs promtool and returns what it has against `cases`."""
    rules = [str(path) for path in sorted((DEPLOY / "prometheus").glob("*.rules.yaml"))]
    file = folder / "test.yaml"
    tests = {"rule_files": rules, "evaluation_interval": "1m", "tests": [*map(promtool_test, cases)]}
    file.write_text(yaml.dump(tests, Dumper=_WithoutAliases))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    assert complaints(CASES, tmp_path) == ""


@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_each_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    assert {case.fires is not None for case in CASES if case.alert == alert} == {True, False}


@needs_promtool
def test_an_alert_that_does_not_fire_is_noticed(tmp_path: Path) -> None:
    quiet = Case("XlaserveServerDown", [series("up", "1x20", SERVER)], 10, (SERVER, "a:8002 does not answer."))
    assert "alertname: XlaserveServerDown" in complaints([quiet], tmp_path)


@needs_promtool
def test_prometheus_takes_the_configuration_with_its_rules() -> None:
    command = [str(PROMTOOL), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 rule files found" in done.stdout


def test_each_runbook_is_a_section_that_says_where_to_look() -> None:
    text = (ROOT / RUNBOOKS).read_text()
    for alert in ALERTS:
        section = text.partition(f"\n### {alert.name}\n")[2].partition("\n#")[0]
        assert len(section.split()) > 20, alert.name
        assert "Look" in section, alert.name


def test_generated_files_are_fresh_and_stale_ones_are_noticed(tmp_path: Path) -> None:
    assert stale() == []
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    changed = tmp_path / "deploy" / "prometheus" / "alerts.rules.yaml"
    changed.write_text(changed.read_text().replace("14.4", "14.5"))
    assert stale(tmp_path / "deploy") == ["prometheus/alerts.rules.yaml"]


def test_queries_ask_for_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    kinds = dict(re.findall(r"^\| `(\w+)` \| .* \| (\w+) \|", page, re.M))
    of_histograms = [name for name, kind in kinds.items() if kind == "histogram"]
    known = {*kinds, *(f"{name}{suffix}" for name in of_histograms for suffix in ("_bucket", "_sum", "_count"))}
    for question in QUESTIONS.values():
        asked = re.findall(r"\b(?:xlaserve|loadtest|process)_\w+", re.sub(r"\(job, instance\)", "", question.promql()))
        assert asked, question.name
        assert set(asked) <= known, question.name
