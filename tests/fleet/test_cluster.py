"""What is asked of Ray, with a fake in its place; `make test-fleet` has the real one."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import xlaserve_fleet as package
from xlaserve.errors import ConfigError, XlaserveError
from xlaserve_fleet import folders
from xlaserve_fleet.addresses import DRAINING, READY, Entry
from xlaserve_fleet.settings import FleetSettings

NOOP = {"models": [{"name": "noop", "source": "builtin:noop"}]}
FLEET = FleetSettings.model_validate({"server": NOOP, "min_servers": 2})
REVISION = FLEET.revision
ADDRESS = "10.0.0.1:8100"


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    def __init__(self, text: str = "The actor died", actor_init_failed: bool = False) -> None:
        super().__init__(text)
        self.actor_init_failed = actor_init_failed


class FakeRay(ModuleType):
    """Has one actor, the name service. What is queued is raised by the next searches for it, and calls."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.servers: list[Entry] = []
        self.search_raises: list[Exception] = []
        self.call_raises: list[Exception] = []
        self.renewed: list[Entry] = []
        self.killed = 0
        self.applications: dict[str, Any] = {}
        self.version = ""
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.3")

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node", gcs_address="127.0.0.1:6379")

    def init(self, **_: object) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def get_actor(self, name: str, namespace: str) -> Any:
        return self._actor()

    def get(self, found: Any, timeout: float) -> Any:
        if timeout <= 0:
            raise RayError("timed out")
        return [one() for one in found]

    def kill(self, actor: object) -> None:
        self.killed += 1

    def _actor(self, *_: object) -> Any:
        if self.search_raises:
            raise self.search_raises.pop(0)

        async def renew(entry: Entry) -> None:
            self.renewed.append(entry)

        def address() -> str:
            if self.call_raises:
                raise self.call_raises.pop(0)
            return ADDRESS

        return SimpleNamespace(
            address=SimpleNamespace(remote=lambda: address),
            entries=SimpleNamespace(remote=lambda: lambda: self.servers),
            renew=SimpleNamespace(remote=renew),
        )


def as_serve(ray: FakeRay) -> Any:
    def deployment(*_: object, **__: object) -> Any:
        def options(version: str, _internal: bool) -> Any:
            return SimpleNamespace(bind=lambda *_: setattr(ray, "version", version))

        return SimpleNamespace(options=options)

    return SimpleNamespace(
        start=lambda **_: None,
        get_replica_context=lambda: SimpleNamespace(replica_tag="tag"),
        config=SimpleNamespace(AutoscalingConfig=lambda **_: None),
        deployment=deployment,
        RunTarget=lambda **_: None,
        run_many=lambda *_, **__: None,
        status=lambda: SimpleNamespace(applications=ray.applications),
    )


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    serve = as_serve(fake)
    exceptions: Any = ModuleType("ray.exceptions")
    exceptions.RayError, exceptions.ActorDiedError = RayError, ActorDiedError
    monkeypatch.setattr(fake, "serve", serve, raising=False)
    for name, module in (("ray", fake), ("ray.serve", serve), ("ray.exceptions", exceptions)):
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def cluster(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as it is with the fake."""
    name = "xlaserve_fleet.cluster"
    before = sys.modules.pop(name, None)
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "POLL_S", 0.001)
    yield module
    del sys.modules[name], package.cluster  # type: ignore[attr-defined]
    if before is not None:
        sys.modules[name] = package.cluster = before  # type: ignore[attr-defined]


def entry(key: str, revision: str = REVISION, state: str = READY) -> Entry:
    return Entry(key, "10.0.0.3:1", "10.0.0.3:2", state, {"revision": revision})


def application(state: str = "RUNNING", running: int = 2) -> Any:
    deployment = SimpleNamespace(replica_states={"RUNNING": running}, message="")
    return SimpleNamespace(status=SimpleNamespace(value=state), message="", deployments={"server": deployment})


@pytest.mark.parametrize("error", [ValueError("no such actor"), RayError("gone")])
async def test_the_name_service_is_searched_anew_after_a_search_that_failed(
    cluster: Any, ray: FakeRay, error: Exception
) -> None:
    names = cluster.RemoteNames(FLEET)
    ray.search_raises = [error]
    with pytest.raises(type(error)):
        await names.renew(entry("a"))
    await names.renew(entry("a"))
    assert ray.renewed == [entry("a")]


def test_a_name_service_that_is_briefly_away_is_asked_again(cluster: Any, ray: FakeRay) -> None:
    ray.search_raises = [ValueError("no such actor")]
    ray.call_raises = [RayError("unavailable"), ActorDiedError()]
    assert cluster.deploy(FLEET).names == ADDRESS
    assert not ray.call_raises
    assert ray.killed == 0


def test_a_name_service_that_cannot_start_is_removed_with_the_reason(cluster: Any, ray: FakeRay) -> None:
    text = "trace\nxlaserve.errors.ConfigError: port: expected a free port"
    ray.call_raises = [ActorDiedError(text, actor_init_failed=True)]
    with pytest.raises(ConfigError, match=r"^port: expected a free port$"):
        cluster.deploy(FLEET)
    assert ray.killed == 1


def test_a_name_service_that_does_not_answer_in_time_is_an_error(
    cluster: Any, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "NAMES_TIMEOUT_S", 0.0)
    with pytest.raises(XlaserveError, match=r"expected an answer of the name service within 0 s, got .*timed out"):
        cluster.deploy(FLEET)
    assert ray.killed == 0


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([], REVISION),
        ([REVISION], REVISION),
        (["older"], REVISION),
        (["older-1"], REVISION),
        ([f"{REVISION}-1"], f"{REVISION}-1"),
        ([REVISION, f"{REVISION}-1", f"{REVISION}-2", "older-3"], f"{REVISION}-2"),
    ],
)
def test_restarted_servers_are_not_replaced_when_nothing_has_changed(
    cluster: Any, ray: FakeRay, running: list[str], expected: str
) -> None:
    ray.servers = [entry(str(index), revision) for index, revision in enumerate(running)]
    assert cluster.deploy(FLEET).revision == expected
    assert ray.version == expected


def test_a_restart_is_a_new_revision_of_the_same_settings(cluster: Any, ray: FakeRay) -> None:
    first = cluster.deploy(FLEET, restart=True).revision
    ray.servers = [entry("a", first)]
    time.sleep(0.002)  # it has the milliseconds
    second = cluster.deploy(FLEET, restart=True).revision
    assert REVISION < first < second
    assert second.startswith(f"{REVISION}-")


COMPLETE = [entry("a"), entry("b")]


@pytest.mark.parametrize(
    ("servers", "running"),
    [
        ([], 2),
        (COMPLETE[:1], 1),
        (COMPLETE, 3),
        ([entry("a"), entry("b", state=DRAINING)], 2),
        ([*COMPLETE, entry("c", "older", DRAINING)], 2),
    ],
    ids=["none", "fewer_than_should_be", "fewer_than_run", "one_drains", "an_old_one_is_left"],
)
def test_an_update_is_not_done_until_all_servers_have_its_revision(
    cluster: Any, ray: FakeRay, servers: list[Entry], running: int
) -> None:
    ray.applications = {FLEET.name: application(running=running)}
    ray.servers = servers
    with pytest.raises(XlaserveError, match="not ready after 0 s"):
        cluster.wait(FLEET, REVISION, 0.0, lambda _: None)


def test_an_update_is_not_done_while_the_name_service_does_not_answer(cluster: Any, ray: FakeRay) -> None:
    ray.applications = {FLEET.name: application(running=0)}
    one = FLEET.model_copy(update={"min_servers": 0})
    ray.call_raises = [RayError("away")]
    assert cluster.wait(one, REVISION, 60.0, lambda _: None).names == ADDRESS
    assert not ray.call_raises


def test_an_update_is_done_once_all_servers_are_listed(cluster: Any, ray: FakeRay) -> None:
    ray.applications = {FLEET.name: application()}
    ray.servers = COMPLETE
    assert cluster.wait(FLEET, REVISION, 0.0, lambda _: None).servers == COMPLETE


def test_a_fleet_that_is_taken_down_during_an_update_is_an_error_in_words(cluster: Any) -> None:
    with pytest.raises(XlaserveError, match="another command has taken it down"):
        cluster.wait(FLEET, REVISION, 60.0, lambda _: None)


async def test_a_replica_has_its_server_in_a_private_folder_and_names_its_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes: list[tuple[Any, ...]] = []

    async def start(_: object) -> None:
        pass

    monkeypatch.setattr(cluster, "ServerProcess", lambda *given, recover_s: processes.append(given))
    monkeypatch.setattr(cluster.Member, "start", start)
    await cluster.Replica.__init__(SimpleNamespace(), FLEET, REVISION)
    ((values, flags, folder, _, node),) = processes
    assert (values, flags["host"], node) == (NOOP, "10.0.0.3", "10.0.0.3")
    assert folder == folders.private() / "xlaserve-tag"


def test_a_local_cluster_is_in_a_file_while_it_is_connected_to(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    local = FLEET.model_copy(update={"ray": "local"})
    with cluster.connected(local):
        assert folders.read(local.local_address) == "127.0.0.1:6379"
    assert not local.local_address.exists()
    with cluster.connected(local):
        folders.write(local.local_address, "127.0.0.1:1")  # by a fleet that was started later
    assert folders.read(local.local_address) == "127.0.0.1:1"
