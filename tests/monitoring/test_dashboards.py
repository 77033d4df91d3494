"""Every query of every dashboard, asked of a Prometheus that watches a server under load."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from scripts.monitoring import grafana
from scripts.monitoring.dashboards import BOARDS
from scripts.monitoring.live import FRONTS, NAMESPACE, ONE, SEVERAL, TRACE_ID, Prometheus, live
from tests.deploy.manifests import KUBERNETES, ROOT, read

PATIENCE_S = 40
RATE_INTERVAL = "10s"
NAMES = [board.name for board in BOARDS]
NOTHING_TO_SHOW = {(ONE, "Processes that ended, in an hour")}
"""Panels of a server whose queries have no answer there: one process replaces no other."""

has_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus; make test installs it")


def needs_prometheus(test: Any) -> Any:
    """Marks a test of a real Prometheus that scrapes real servers."""
    return pytest.mark.slow(has_prometheus(test))


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    with live(has_fake_gpu=True) as prometheus:
        yield prometheus


def has_data(prometheus: Prometheus, query: grafana.Query, text: str) -> bool:
    """Whether there is a number in the answer."""
    if query.is_instant:
        values = [series["value"] for series in prometheus.now(text)]
    else:
        now = time.time()
        values = [value for series in prometheus.range(text, now - 10, now, 1) for value in series["values"]]
    return any(math.isfinite(float(value)) for _, value in values)


@needs_prometheus
@pytest.mark.parametrize("server", [ONE, SEVERAL])
@pytest.mark.parametrize("name", NAMES)
def test_every_query_of_every_panel_has_an_answer(name: str, server: str, prometheus: Prometheus) -> None:
    dashboard = grafana.load(name)
    values = grafana.chosen(dashboard, prometheus, instance=server)
    queries = [query for query in grafana.queries(dashboard) if (server, query.panel) not in NOTHING_TO_SHOW]
    left = {(query.panel, query.legend): query for query in queries}
    assert len(left) > 10
    give_up_at = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < give_up_at:
        for key, query in list(left.items()):
            if has_data(prometheus, query, query.filled(values, RATE_INTERVAL)):
                del left[key]
        time.sleep(0.2)
    assert list(left) == []


@needs_prometheus
def test_a_servers_processes_are_told_apart(prometheus: Prometheus) -> None:
    """One line for each, and what the front that was killed had used is not taken off."""
    processes = ["engine", *(f"front {number}" for number in range(1, FRONTS + 1)), "supervisor"]
    dashboard = grafana.load("server")
    for server, roles in ((ONE, [""]), (SEVERAL, processes)):
        values = grafana.chosen(dashboard, prometheus, instance=server)
        for query in grafana.queries(dashboard):
            if query.panel in ("Cores", "Memory"):
                found = prometheus.now(query.filled(values, RATE_INTERVAL))
                assert sorted(series["metric"].get("role", "") for series in found) == roles
                assert all(float(series["value"][1]) >= 0 for series in found)
    (restarts,) = (query for query in grafana.queries(dashboard) if "ended" in query.panel)
    text = restarts.filled(grafana.chosen(dashboard, prometheus, instance=SEVERAL), RATE_INTERVAL)
    ended = {series["metric"]["role"]: float(series["value"][1]) for series in prometheus.now(text)}
    assert ended.pop("front 1") > 0
    assert {*ended.values()} == {0.0}


@needs_prometheus
def test_kedas_queries_have_an_answer_as_they_are_written(prometheus: Prometheus) -> None:
    (scaled,) = read(KUBERNETES / "overlays" / "keda" / "autoscaler.yaml")
    triggers = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert len(triggers) == 2
    for trigger in triggers:
        (series,) = prometheus.now(trigger["query"])  # KEDA takes no more than one
        assert series["metric"] == {}
        assert math.isfinite(float(series["value"][1]))
    assert float(series["value"][1]) > 0  # the share of lanes that are busy, which they are


@needs_prometheus
def test_the_rules_for_prometheus_adapter_find_a_number_for_each_pod(prometheus: Prometheus) -> None:
    (rules,) = (
        yaml.safe_load(block.removeprefix("yaml"))["rules"]
        for block in (ROOT / "docs" / "deploy.md").read_text().split("```")
        if block.startswith("yaml\nrules:")
    )
    asked = {}
    for rule in rules:
        found = prometheus.get("series", **{"match[]": rule["seriesQuery"]})
        (series,) = {one["__name__"] for one in found}
        assert {resource["resource"] for resource in rule["resources"]["overrides"].values()} == {"namespace", "pod"}
        assert {*rule["resources"]["overrides"]} <= {label for one in found for label in one}
        query = rule["metricsQuery"]
        for template, text in {
            "<<.Series>>": series,
            "<<.LabelMatchers>>": f'namespace="{NAMESPACE}",pod=~"{ONE}|{SEVERAL}"',
            "<<.GroupBy>>": "pod",
        }.items():
            query = query.replace(template, text)
        asked[rule.get("name", {}).get("as", series)] = query
    (scaler,) = read(KUBERNETES / "overlays" / "hpa" / "autoscaler.yaml")
    assert {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} == asked.keys()
    for name, query in asked.items():
        found = prometheus.now(query)
        assert {series["metric"]["pod"] for series in found} == {ONE, SEVERAL}, name
        assert all(math.isfinite(float(series["value"][1])) for series in found), name


@needs_prometheus
def test_a_query_for_nothing_is_noticed(prometheus: Prometheus) -> None:
    for is_instant in (True, False):
        nothing = grafana.Query("panel", "sum(xlaserve_nothing)", "", is_instant)
        assert not has_data(prometheus, nothing, nothing.text)
        assert has_data(prometheus, nothing, "sum(xlaserve_ready)")
        assert not has_data(prometheus, nothing, "sum(xlaserve_ready) * NaN")


@needs_prometheus
def test_prometheus_keeps_the_traces_that_buckets_name(prometheus: Prometheus) -> None:
    now = time.time()
    found = prometheus.get("query_exemplars", query="xlaserve_request_seconds_bucket", start=now - 60, end=now)
    assert {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]} == {TRACE_ID}


@needs_prometheus
def test_no_rule_fails_and_the_objectives_are_recorded(prometheus: Prometheus) -> None:
    groups: list[dict[str, Any]] = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 20
    assert [rule["name"] for rule in rules if rule.get("lastError")] == []
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert "unknown" not in {rule["health"] for rule in rules if rule["name"].startswith("job:")}


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap_and_no_two_queries_of_one_share_a_letter(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    panels = grafana.load(name)["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters), panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
