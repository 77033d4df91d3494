"""Fleets on real Ray, with several nodes on this machine: every part is killed under load, every call accounted for."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fleet.cluster.conftest import SERVER, Fleet, free_port, is_running, kill, until
from tests.fleet.cluster.load import load

from xlaserve_client import VisionClient
from xlaserve_client.errors import ServerError

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("ray")

StartFleet = Callable[..., Fleet]


def test_the_commands_start_show_and_stop_a_fleet(fleet: StartFleet) -> None:
    one = fleet(2, min_servers=2)
    ids = one.wait_for(2)
    status = one.status()
    assert status["state"] == "RUNNING"
    assert status["replicas"]["running"] == 2
    assert sorted(server["id"] for server in status["servers"]) == sorted(ids)
    assert len({server["node"] for server in status["servers"]}) == 2
    shown = one.do("status")
    assert all(key in shown for key in ids)
    with load(one.url, callers=2) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
    assert not calls.lost
    pids = [server["pid"] for server in status["servers"]]
    one.do("down")
    assert not any(map(is_running, pids))
    assert one.ready() == []
    done = one.run("status")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "xlaserve: name: there is no fleet xlaserve",
    )


def test_a_fleet_grows_and_shrinks_with_the_load_without_losing_a_call(fleet: StartFleet) -> None:
    one = fleet(4, min_servers=1, max_servers=4, target_wait_s=0.001, scale_down_after_s=15)
    assert len(one.wait_for(1)) == 1
    with load(one.url, callers=16, images=8, pause_s=0) as calls:
        one.wait_for(4)
    with load(one.url, callers=1, images=1) as idle:
        one.wait_for(1)
    print(f"1 to 4 to 1: {calls.started} + {idle.started} calls, lost {calls.lost} {idle.lost}")
    assert not calls.lost
    assert not idle.lost


def test_a_server_that_is_killed_is_replaced_and_no_call_lost(fleet: StartFleet) -> None:
    one = fleet(3, min_servers=2)
    one.wait_for(2)
    victim = one.servers()[0]
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        killed_at = time.monotonic()
        kill(victim["pid"])
        until(lambda: victim["id"] not in one.ready(), "the list has it still")
        delisted_s = time.monotonic() - killed_at
        one.wait_for(2, without=(victim["id"],))
        replaced_s = time.monotonic() - killed_at
    print(
        f"server killed: off the list in {delisted_s:.2f} s, replaced in {replaced_s:.1f} s; {calls.started} calls,"
        f" lost {calls.lost}, longest gap {calls.longest_gap_s:.2f} s"
    )
    assert not calls.lost
    assert delisted_s < 1


def test_servers_of_several_processes_are_each_one_server(fleet: StartFleet, tmp_path: Path) -> None:
    """A front or an engine that dies is the server's own business: the fleet replaces no server for it."""
    server = {**SERVER, "fronts": 2, "compile_cache": str(tmp_path / "cache")}
    one = fleet(3, min_servers=2, server=server)
    before = one.wait_for(2)
    victim = one.servers()[0]
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        roles = processes(victim["pid"])
        assert roles.keys() == {"engine", "front 1", "front 2"}
        assert 0 <= victim["wait_s"] < 1, victim
        kill(roles["front 1"])
        until(lambda: processes(victim["pid"]).get("front 1") not in (None, roles["front 1"]), "no other front came")
        time.sleep(3)  # for some health checks
        assert sorted(one.ready()) == sorted(before)
        killed_at = time.monotonic()
        kill(roles["engine"])
        until(lambda: processes(victim["pid"]).get("engine") not in (None, roles["engine"]), "no other engine came")
        with VisionClient(victim["address"]) as client:
            until(client.ready, "it does not serve again")
            back_s = time.monotonic() - killed_at
        time.sleep(5)  # for what would replace it
        assert sorted(one.wait_for(2)) == sorted(before)
    print(
        f"front and engine killed: the engine serves {back_s:.1f} s later; {calls.started} calls, lost {calls.lost},"
        f" longest gap {calls.longest_gap_s:.2f} s"
    )
    assert not calls.lost


def processes(server: int) -> dict[str, int]:
    """Returns the numbers of the processes of a server, by their roles."""
    found = {}
    for child in psutil.Process(server).children():
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and child.name().startswith(("engine", "front")):
                found[child.name()] = child.pid
    return found


def test_a_server_drains_when_its_supervisor_is_killed_and_no_call_is_lost(fleet: StartFleet) -> None:
    one = fleet(3, min_servers=2)
    one.wait_for(2)
    victim = one.servers()[0]
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        killed_at = time.monotonic()
        kill(victim["supervisor"])
        until(lambda: not is_running(victim["pid"]), "the server goes on without its supervisor", 30)
        ended_s = time.monotonic() - killed_at
        one.wait_for(2, without=(victim["id"],))
        replaced_s = time.monotonic() - killed_at
    print(
        f"supervisor killed: server ended in {ended_s:.1f} s, replaced in {replaced_s:.1f} s; {calls.started} calls,"
        f" lost {calls.lost}"
    )
    assert not calls.lost


def test_a_node_that_is_lost_takes_no_call_with_it(fleet: StartFleet, ray_cluster: Any) -> None:
    one = fleet(3, min_servers=2)
    one.wait_for(2)
    victim = one.servers()[0]
    (node,) = [node for node in ray_cluster.worker_nodes if node.node_id == victim["node"]]
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        killed_at = time.monotonic()
        kill(victim["pid"], victim["supervisor"])  # a machine that is lost is lost as a whole
        ray_cluster.remove_node(node, allow_graceful=False)
        until(lambda: victim["id"] not in one.ready(), "the list has it still")
        delisted_s = time.monotonic() - killed_at
        one.wait_for(2, without=(victim["id"],))
        replaced_s = time.monotonic() - killed_at
    print(
        f"node lost: off the list in {delisted_s:.1f} s, replaced in {replaced_s:.1f} s; {calls.started} calls,"
        f" lost {calls.lost}"
    )
    assert not calls.lost


def test_calls_continue_without_the_name_service_and_its_list_is_restored(fleet: StartFleet) -> None:
    one = fleet(2, min_servers=2)
    ids = one.wait_for(2)
    before = one.listing()
    (names,) = [
        p
        for p in psutil.process_iter()
        if any(c.laddr.port == one.port and c.status == "LISTEN" for c in connections(p))
    ]
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        killed_at = time.monotonic()
        names.kill()
        after = until(lambda: (found := one.listing())["servers"] and found, "the name service stays away")
        back_s = time.monotonic() - killed_at
        time.sleep(1)
    print(f"name service killed: back in {back_s:.1f} s; {calls.started} calls, lost {calls.lost}")
    assert sorted(server["id"] for server in after["servers"]) == sorted(ids)
    assert after["generation"] > before["generation"]
    assert not calls.lost


def connections(process: psutil.Process) -> list[Any]:
    try:
        return [*process.net_connections("tcp")]
    except psutil.Error:
        return []


@pytest.mark.parametrize("update", ["start_first", "stop_first"])
def test_an_update_replaces_every_server_while_others_serve(fleet: StartFleet, update: str) -> None:
    one = fleet(3, min_servers=2, update=update)
    before = one.wait_for(2)
    server = {**SERVER, "max_queue_images": 1000}
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        started_at = time.monotonic()
        one.write(server=server)
        one.do("update")
        took_s = time.monotonic() - started_at
        one.wait_for(2, without=tuple(before))
    print(
        f"update {update}: {took_s:.1f} s; {calls.started} calls, lost {calls.lost},"
        f" longest gap {calls.longest_gap_s:.2f} s"
    )
    assert not calls.lost
    after = one.wait_for(2)
    # What servers are not started with changes none of them.
    one.write(max_servers=3, target_wait_s=1)
    one.do("update")
    assert sorted(one.ready()) == sorted(after)


def test_an_update_that_can_not_start_leaves_the_servers_as_they_are(fleet: StartFleet) -> None:
    one = fleet(3, min_servers=2)
    before = one.wait_for(2)
    models = [{**SERVER["models"][0], "source": "/nonexistent/model.keras"}]  # type: ignore[index]
    with load(one.url, callers=2) as calls:
        one.write(server={**SERVER, "models": models})
        done = one.run("update")
    assert done.returncode == 1
    assert "nonexistent" in done.stderr
    assert sorted(one.ready()) == sorted(before)
    assert not calls.lost


def test_servers_and_calls_go_on_when_the_head_is_killed(fleet: StartFleet, ray_cluster: Any) -> None:
    one = fleet(2, min_servers=2)
    one.wait_for(2)
    pids = [server["pid"] for server in one.servers()]
    with load(one.url) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        ray_cluster.remove_node(ray_cluster.head_node, allow_graceful=False)
        killed_at = time.monotonic()
        time.sleep(20)
        assert all(map(is_running, pids))
        answered = calls.rate(killed_at + 10, killed_at + 20)
    print(f"head killed: {calls.started} calls, lost {calls.lost}, {answered:.0f} answers/s after it")
    assert one.ready() == []
    assert not calls.lost
    assert answered > 0


def test_a_local_fleet_lives_as_long_as_its_command(tmp_path: Path) -> None:
    one = Fleet(tmp_path, "local", min_servers=1)
    up = one.start("up")
    try:
        one.wait_for(1)
        pids = [server["pid"] for server in one.servers()]
        with load(one.url, callers=1) as calls:
            until(lambda: calls.outcomes.total() > 10, "there were no answers")
        assert not calls.lost
        up.send_signal(signal.SIGTERM)
        _, said = up.communicate(timeout=120)
        assert up.returncode == 0, said
        assert not any(map(is_running, pids))
    finally:
        up.kill()
        up.communicate()


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[Callable[[Fleet], tuple[int, int]]]:
    """Starts HAProxy with the configuration that `fleet follow` writes; returns its ports."""
    if shutil.which("haproxy") is None:
        pytest.skip("needs haproxy")
    started: list[subprocess.Popen[bytes]] = []

    def start(one: Fleet) -> tuple[int, int]:
        grpc_port, http_port = free_port(), free_port()
        config, pid_file = tmp_path / "haproxy.cfg", tmp_path / "haproxy.pid"
        follow = [sys.executable, "-m", "xlaserve_fleet", "follow", one.url.removeprefix("fleet://")]
        written = ["--haproxy", str(config), "--grpc-port", str(grpc_port), "--http-port", str(http_port)]
        subprocess.run([*follow, *written, "--once"], check=True, timeout=60)
        started.append(subprocess.Popen(["haproxy", "-W", "-f", str(config), "-p", str(pid_file)]))
        until(pid_file.exists, "haproxy did not start", 10)
        reload = f"sh -c 'kill -USR2 $(cat {pid_file})'"
        started.append(subprocess.Popen([*follow, *written, "--reload", reload]))
        return grpc_port, http_port

    yield start
    for process in reversed(started):
        process.terminate()
        process.wait(30)


def answers(client: VisionClient) -> bool:
    try:
        return bool(client.models(deadline_s=5))
    except ServerError:
        return False


def test_haproxy_follows_the_servers(fleet: StartFleet, haproxy: Callable[[Fleet], tuple[int, int]]) -> None:
    one = fleet(2, min_servers=2)
    one.wait_for(2)
    grpc_port, http_port = haproxy(one)
    with VisionClient(f"127.0.0.1:{grpc_port}") as client:
        until(lambda: answers(client), "no server behind the proxy", 30)
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v2/health/ready", timeout=10) as answer:
        assert answer.status == 200
    victim = one.servers()[0]
    with load(f"127.0.0.1:{grpc_port}", callers=4) as calls:
        until(lambda: calls.outcomes.total() > 100, "there were no answers")
        kill(victim["pid"])
        one.wait_for(2, without=(victim["id"],))
        time.sleep(3)
    print(f"haproxy, server killed: {calls.started} calls, lost {calls.lost}")
    assert not calls.lost
