from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from xlaserve.errors import ConfigError
from xlaserve_fleet import settings
from xlaserve_fleet.settings import FleetSettings, flags

NOOP = {"models": [{"name": "noop", "source": "builtin:noop"}]}


def written(folder: Path, values: object, name: str = "fleet.yaml") -> Path:
    file = folder / name
    file.write_text(yaml.safe_dump(values))
    return file


def fleet(**values: object) -> FleetSettings:
    return FleetSettings.model_validate({"server": NOOP, **values})


def test_paths_are_taken_from_the_folder_of_the_file_that_they_stand_in(tmp_path: Path) -> None:
    (tmp_path / "servers").mkdir()
    server = {**NOOP, "access": "access.yaml"}
    inline = settings.load(written(tmp_path, {"server": server}))
    assert inline.server_settings().access == tmp_path / "access.yaml"
    written(tmp_path / "servers", server, "server.yaml")
    apart = settings.load(written(tmp_path, {"server": "servers/server.yaml"}))
    assert apart.server_settings().access == tmp_path / "servers" / "access.yaml"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "server: expected a value, got none"),
        ({"server": NOOP, "cores": 0}, "cores: expected at least 1, got 0"),
        ({"server": NOOP, "gpu": 1}, "gpu: no such field"),
        ({"server": NOOP, "min_servers": 4, "max_servers": 2}, "max_servers: expected at least min_servers, 4, got 2"),
        ({"server": NOOP, "name": "a b"}, "name: "),
        ({"server": {**NOOP, "grpc_prot": 1}}, "server: configuration: grpc_prot: no such field"),
        ({"server": "nowhere.yaml"}, "nowhere.yaml: can't be read"),
        (
            {"server": {**NOOP, "host": "127.0.0.1"}},
            "server: host: expected an address that other machines reach, or none for that of the node, got 127.0.0.1",
        ),
        (
            {"server": {**NOOP, "host": "localhost"}, "ray": "10.0.0.1:6379"},
            "or none for that of the node, got localhost",
        ),
        (["server"], "expected a mapping of fields, got a list"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field_and_what_was_expected(
    tmp_path: Path, values: object, says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        settings.load(written(tmp_path, values))
    assert says in str(error.value)


def test_servers_that_only_this_machine_reaches_are_for_a_local_fleet(tmp_path: Path) -> None:
    server = {**NOOP, "host": "127.0.0.1"}
    assert settings.load(written(tmp_path, {"server": server, "ray": "local"})).server_settings().is_loopback


def test_the_environment_of_who_starts_a_fleet_is_not_that_of_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLASERVE_LANES", "7")
    assert fleet().server_settings().lanes is None


def test_without_a_most_the_number_of_servers_is_fixed() -> None:
    assert fleet(min_servers=3).most_servers == 3
    assert fleet(min_servers=3, max_servers=5).most_servers == 5


def test_only_what_servers_are_started_with_changes_the_revision() -> None:
    one = fleet()
    for same in ({"max_servers": 9}, {"target_wait_s": 1}, {"update": "stop_first"}, {"scale_down_after_s": 1}):
        assert fleet(**same).revision == one.revision
    others = [fleet(cores=2), fleet(gpus=1), fleet(server={**NOOP, "lanes": 2})]
    assert len({one.revision, *(other.revision for other in others)}) == 4


def test_a_server_uses_the_cores_that_it_was_given() -> None:
    many = flags(fleet(cores=4), "10.0.0.3")
    assert (many["lanes"], many["threads_per_lane"], many["decode_threads"]) == (4, 1, 4)
    quick = flags(fleet(cores=4, server={**NOOP, "performance_hint": "latency"}), "10.0.0.3")
    assert (quick["lanes"], quick["threads_per_lane"]) == (1, 4)
    own = flags(fleet(cores=4, server={**NOOP, "lanes": 2, "decode_threads": 1}), "10.0.0.3")
    assert (own["lanes"], own["threads_per_lane"]) == (2, 2)
    assert "decode_threads" not in own


def test_a_server_uses_all_the_gpus_that_it_was_given_and_no_others() -> None:
    assert flags(fleet(gpus=2), "10.0.0.3")["device"] == "gpu:all"
    assert "lanes" not in flags(fleet(gpus=2), "10.0.0.3")
    assert flags(fleet(), "10.0.0.3")["device"] == "cpu"
    assert "device" not in flags(fleet(gpus=1, server={**NOOP, "device": "gpu:0"}), "10.0.0.3")


def test_a_server_listens_on_its_node_on_free_ports_unless_its_host_is_set() -> None:
    found = flags(fleet(), "10.0.0.3")
    assert (found["host"], found["grpc_port"], found["http_port"], found["metrics_port"]) == ("10.0.0.3", 0, 0, 0)
    assert "host" not in flags(fleet(server={**NOOP, "host": "127.0.0.1"}), "10.0.0.3")


def test_a_server_serves_on_for_a_moment_after_it_was_asked_to_stop() -> None:
    assert flags(fleet(), "h")["shutdown_delay_s"] == settings.SHUTDOWN_DELAY_S
    assert "shutdown_delay_s" not in flags(fleet(server={**NOOP, "shutdown_delay_s": 0}), "h")


def test_a_server_of_several_processes_has_time_to_recover_by_itself() -> None:
    assert fleet().recover_s == 0
    assert fleet(server={**NOOP, "fronts": 2}).recover_s == settings.RECOVER_S
    assert fleet(gpus=1).recover_s == settings.RECOVER_S  # it has as many fronts as its GPU needs
    assert fleet(gpus=1, server={**NOOP, "fronts": 0}).recover_s == 0
