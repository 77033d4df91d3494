"""deploy/compose.yaml: valid to the specification, with files that there are, and commands that run as written."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.monitoring.__main__ import DEPLOY
from scripts.monitoring.compose import FILE, SERVICES, command, here

from xlaserve import cli as server_cli
from xlaserve.config import ENV_PREFIX, Settings
from xlaserve.config.files import load as load_settings
from xlaserve_loadtest import cli as loadtest_cli
from xlaserve_loadtest.option_checks import settings_of

PATIENCE_S = 30


def test_it_is_valid_to_the_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    text = FILE.read_text()
    assert set(compose_spec.PyCompose.from_yaml(text).service_names()) == SERVICES.keys()
    with pytest.raises(ValueError, match="restrat"):
        compose_spec.PyCompose.from_yaml(text.replace("restart:", "restrat:", 1))


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_volumes_exist_and_ports_are_local(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    for source, *_ in (volume.split(":") for volume in service.get("volumes", ())):
        assert source in yaml.safe_load(FILE.read_text())["volumes"] or (DEPLOY / source).exists(), source
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    for needed, how in service.get("depends_on", {}).items():
        assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[needed], needed


def test_the_server_takes_its_command_and_the_load_test_its_own() -> None:
    options = server_cli.parser().parse_args(command("xlaserve"))
    assert {"digits", "shapes-detector"} == {model.name for model in load_settings(Path(options.config), {}, {}).models}
    variables = [name for name in SERVICES["xlaserve"]["environment"] if name.startswith(ENV_PREFIX)]
    assert {name.removeprefix(ENV_PREFIX).lower() for name in variables} <= Settings.model_fields.keys()
    found = settings_of(loadtest_cli.parser().parse_args(command("loadtest")), loadtest_cli.parser())
    assert found.targets == ("xlaserve:8001",)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that was started with the service's command; its port and its data are others."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus; make test installs it")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    words = [re.sub("(?<=tsdb.path=).*", str(tmp_path / "tsdb"), word) for word in command("prometheus")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *words, f"--web.listen-address={address}"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        yield address
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


def test_prometheus_gets_ready_as_its_health_check_asks(prometheus: str) -> None:
    path = SERVICES["prometheus"]["healthcheck"]["test"][-1].partition("9090")[2]
    give_up_at = time.monotonic() + PATIENCE_S
    status = 0
    while status != 200 and time.monotonic() < give_up_at:
        with suppress(OSError), urllib.request.urlopen(f"http://{prometheus}{path}", timeout=5) as answer:
            status = answer.status
        time.sleep(0.05)
    assert status == 200


COLLECTOR = DEPLOY / "compose" / "otel-collector.yaml"
PROVISIONING = DEPLOY / "grafana" / "provisioning"
SCHEMAS = Path(__file__).parents[1] / "deploy" / "schemas"
CHECKED = {
    COLLECTOR: "otel-collector",
    PROVISIONING / "datasources" / "prometheus.yaml": "grafana-datasources",
    PROVISIONING / "dashboards" / "xlaserve.yaml": "grafana-dashboards",
}
"""Files of programs that are not run, and the schemas that we wrote from their documentation."""


def wrong(content: Any, schema: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    found = json.loads((SCHEMAS / f"{schema}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return [error.message for error in jsonschema.Draft202012Validator(found).iter_errors(content)]


@pytest.mark.parametrize("file", CHECKED, ids=lambda file: str(file.name))
def test_files_for_the_collector_and_grafana_are_as_documented(file: Path) -> None:
    assert wrong(yaml.safe_load(file.read_text()), CHECKED[file]) == []


def test_no_file_for_grafana_goes_unchecked() -> None:
    assert {*PROVISIONING.rglob("*.y*ml")} <= CHECKED.keys()


@pytest.mark.parametrize(
    ("file", "right", "misspelt"),
    [
        (COLLECTOR, "verbosity: basic", "verbosity: brief"),
        (COLLECTOR, "protocols", "protocol"),
        (COLLECTOR, "pipelines", "pipeline"),
        (COLLECTOR, "batch: {}", "batch: {time_out: 1s}"),
        (PROVISIONING / "datasources" / "prometheus.yaml", "timeInterval: 15s", "timeInterval: 15"),
        (PROVISIONING / "datasources" / "prometheus.yaml", "isDefault", "default"),
        (PROVISIONING / "dashboards" / "xlaserve.yaml", "path:", "paths:"),
    ],
)
def test_what_is_not_as_documented_is_noticed(file: Path, right: str, misspelt: str) -> None:
    text = file.read_text()
    assert right in text
    assert wrong(yaml.safe_load(text.replace(right, misspelt)), CHECKED[file]) != []


def test_the_collectors_pipelines_are_complete_on_the_port_the_server_uses() -> None:
    config = yaml.safe_load(COLLECTOR.read_text())
    for kind in ("receivers", "processors", "exporters"):
        named = {name for pipeline in config["service"]["pipelines"].values() for name in pipeline.get(kind, ())}
        assert named == config[kind].keys()
    sends_to = SERVICES["xlaserve"]["environment"]["XLASERVE_TRACE_ENDPOINT"]
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert sends_to == f"http://otel-collector:{port}"
    assert here(command("otel-collector")[0].partition("=")[2], "otel-collector") == str(COLLECTOR)
    (other,) = re.findall(r"exporters: (\{otlp: .*\})", COLLECTOR.read_text())
    assert wrong({**config, "exporters": {**config["exporters"], **yaml.safe_load(other)}}, "otel-collector") == []


def test_prometheus_scrapes_the_services_and_grafana_reads_prometheus() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    live_port = next(word for word in SERVICES["loadtest"]["command"] if "--live-port" in word).rpartition(":")[2]
    assert targets == {"xlaserve": ["xlaserve:8002"], "loadtest": [f"loadtest:{live_port}"]}
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "xlaserve.yaml").read_text())["providers"]
    assert Path(here(provider["options"]["path"], "grafana")).resolve() == DEPLOY / "grafana" / "dashboards"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(here(home, "grafana")).exists()
