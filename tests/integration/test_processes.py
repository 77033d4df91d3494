"""Supervisors with real processes, which are killed at any point, and behave as badly as processes can."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry

from xlaserve.processes.supervision import interpreters, liveness
from xlaserve.processes.supervision.child_handle import ChildProcess, Launcher
from xlaserve.processes.supervision.liveness import Liveness
from xlaserve.processes.supervision.merged_metrics import AllMetrics
from xlaserve.processes.supervision.orders import SPARE
from xlaserve.processes.supervision.parent import SILENCED
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.restart_policy import RestartPolicy
from xlaserve.processes.supervision.role import Role, State
from xlaserve.processes.supervision.supervisor import Supervisor
from xlaserve.processes.supervision.watcher import Watcher

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
KILLS = 20
LATE = 5
TIRELESS = RestartPolicy(at_once=1000, most=1000)
IMPATIENT = RestartPolicy(first_wait_s=0.01, most=3)


@pytest.fixture(autouse=True)
def _found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")


def role(target: str, name: str = "front 1", **about: object) -> Role:
    return Role(name=name, target=f"tests.integration.process_roles:{target}", **about)  # type: ignore[arg-type]


class Launched(Watcher):
    """Starts processes, and keeps them."""

    def __init__(self) -> None:
        self.processes: list[ChildProcess] = []
        self.ends: list[tuple[str, int, bool]] = []

    def __call__(self, role: Role, hear: Callable[..., None]) -> ChildProcess:
        self.processes.append(Launcher()(role, hear))
        return self.processes[-1]

    def last(self, name: str) -> ChildProcess:
        return next(process for process in reversed(self.processes) if process.role.name == name)

    def ended(self, role: Role, process: object, status: int, was_ready: bool) -> None:
        self.ends.append((role.name, status, was_ready))


@asynccontextmanager
async def supervised(
    *roles: Role, watchers: tuple[Watcher, ...] = (), launched: Launched | None = None
) -> AsyncIterator[tuple[Supervisor, Launched]]:
    launched = launched or Launched()
    supervisor = Supervisor(roles, launched, [launched, *watchers])
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, launched
    finally:
        supervisor.stop()
        async with asyncio.timeout(PATIENCE_S):
            await running
    assert all(process.ended.done() for process in launched.processes)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - processes set no events
            await asyncio.sleep(0.005)


class Prepared(Launched):
    """Keeps a spare while processes serve."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher = Launcher()

    def __call__(self, role: Role, hear: Callable[..., None]) -> ChildProcess:
        self.processes.append(self.launcher(role, hear))
        return self.processes[-1]

    def became_ready(self, role: Role, process: object) -> None:
        self.launcher.prepare(role)

    def has_spare(self) -> bool:
        return any(spare.is_ready for spare in self.launcher._spares.values())


def spares() -> list[psutil.Process]:
    """Returns the processes that wait to be of use."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).strip() == f"xlaserve {SPARE}":
                found.append(process)
    return found


def all_are_ready(supervisor: Supervisor) -> bool:
    return set(supervisor.states.values()) == {State.READY}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def result(*roles: Role) -> int:
    """Returns the status of a supervisor that gives up."""
    async with asyncio.timeout(PATIENCE_S):
        return await Supervisor(roles, Launched()).run()


async def test_processes_are_named_and_get_what_is_theirs() -> None:
    core = min(os.sched_getaffinity(0))
    reading, writing = os.pipe()
    os.write(writing, b"of the role")

    def connect() -> dict[str, int]:
        theirs, ours = os.pipe()
        os.write(ours, b"of this process")
        os.close(ours)
        return {"own": theirs}

    async with supervised(
        role("serve", "front 12", payload=b"x" * 300_000, cores=frozenset({core})),
        role("tells_descriptors", "engine 0", descriptors={"listening": reading}, connect=connect),
    ) as (supervisor, launched):
        await until(lambda: all_are_ready(supervisor))
        about = supervisor.about
        front = psutil.Process(launched.processes[0].pid)
        shown = subprocess.run(["ps", "-o", "args=,comm=", "-p", str(front.pid)], capture_output=True, check=True)  # noqa: ASYNC221
        assert shown.stdout.split() == [b"xlaserve", b"front", b"12", b"front", b"12"]
    os.close(reading)
    os.close(writing)
    assert about["front 12"] == {"cores": [core], "payload": "x" * 300_000}
    assert about["engine 0"] == {"listening": ["of the role", False], "own": ["of this process", False]}


async def test_a_process_killed_at_any_point_is_replaced_unnoticed_by_others() -> None:
    draw = random.Random(15)
    async with supervised(role("serve", restarts=TIRELESS), role("serve", "front 2")) as (supervisor, launched):
        await until(lambda: all_are_ready(supervisor))
        descriptors = open_descriptors()
        for number in range(KILLS):
            killed = launched.last("front 1")
            if number % 2:  # before it is ready
                await asyncio.sleep(draw.uniform(0, 0.3))
            else:
                await until(lambda: all_are_ready(supervisor))
            os.kill(killed.pid, signal.SIGKILL)
            await until(lambda killed=killed: launched.last("front 1") is not killed)  # type: ignore[misc]
        await until(lambda: all_are_ready(supervisor))
        assert [end[:2] for end in launched.ends] == [("front 1", -signal.SIGKILL)] * KILLS
        assert {was_ready for _, _, was_ready in launched.ends} == {True, False}
        await until(lambda: open_descriptors() == descriptors)
        alive = {process.pid for process in launched.processes if not process.ended.done()}
        assert {process.pid for process in launched.processes} & {
            child.pid for child in psutil.Process().children()
        } == alive
        assert len(alive) == 2


async def test_one_that_ignores_the_signal_is_killed_in_time() -> None:
    async with supervised(role("ignores_sigterm", stop_timeout_s=0.5)) as (supervisor, launched):
        await until(lambda: all_are_ready(supervisor))
    assert launched.ends == [("front 1", -signal.SIGKILL, True)]


@pytest.mark.parametrize(
    ("target", "ends"),
    [
        ("dies_at_start", "more than 3 times within 60 s, now process * ended with status 3 before it was ready"),
        ("raises", "more than 3 times within 60 s, now process * ended with status 1 before it was ready"),
        ("ends_with_0", "more than 3 times within 60 s, now process * ended with status 0"),
        ("refuses", "process * ended with status 78 before it was ready; another one would end in the same way"),
    ],
)
async def test_one_that_ends_again_and_again_is_given_up(
    target: str, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await result(role(target, restarts=IMPATIENT)) == 1
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    start, end = ends.split(" * ")
    assert start in error
    assert error.endswith(end)
    if target == "refuses":
        assert "ERROR [front 1] lanes: expected at least 1, got 0" in caplog.text


async def test_garbage_ends_the_process_that_says_it_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(role("writes_garbage", restarts=TIRELESS), role("serve", "front 2")) as (
        supervisor,
        launched,
    ):
        await until(lambda: launched.ends)
        await until(lambda: supervisor.states["front 2"] is State.READY)
        assert launched.ends[0][:2] == ("front 1", -signal.SIGKILL)
        assert {name for name, _, _ in launched.ends} == {"front 1"}
    assert "front 1: the process is killed, as its messages can't be understood" in caplog.text
    said = [record for record in caplog.records if record.name == "xlaserve.processes.supervision.output"]
    assert said[-1].getMessage() == "F0000 Check failed: all is lost"
    assert {record.__dict__["role"] for record in said} == {"front 1"}


async def test_one_that_is_cut_off_from_its_supervisor_ends_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    assert await result(role("is_cut_off", restarts=RestartPolicy(most=0))) == 1
    assert "the connection to the supervisor is lost, and this process ends" in caplog.text
    assert "ended with status 1" in caplog.text


async def test_an_outcome_reaches_a_process_that_does_not_read_yet_however_large() -> None:
    sizes = [3, 4 * 2**20, 5]

    class Telling(Watcher):
        def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
            for size in sizes:
                process.tell_outcome("x" * size)
                process.ask_for_metrics()

    async with supervised(role("tells_outcomes", stop_timeout_s=1), watchers=(Telling(),)) as (supervisor, _):
        await until(lambda: supervisor.about.get("front 1", {}).get("sizes") == sizes)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has processes that hang be killed after 3 s. Those of the tests beat every tenth of a second."""
    monkeypatch.setattr(liveness, "LOOK_S", 0.1)


@pytest.mark.usefixtures("impatient")
async def test_processes_that_hang_are_killed_and_replaced_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    alive = Liveness()
    looking = asyncio.create_task(alive.follow())
    async with supervised(
        role("serve"), role("serve", "front 2"), role("spins", "front 3", restarts=TIRELESS), watchers=(alive,)
    ) as (supervisor, launched):
        await until(lambda: all_are_ready(supervisor))
        stopped = launched.last("front 1")
        stopped.send_signal(signal.SIGSTOP)
        await until(lambda: {name for name, _, _ in launched.ends} == {"front 1", "front 3"})
        await until(lambda: all_are_ready(supervisor))
        # What is stopped acts on no other signal.
        assert {*launched.ends} == {("front 1", -signal.SIGKILL, True), ("front 3", -SILENCED, True)}
        assert f"front 1: process {stopped.pid} hangs, silent for 3 s; it is killed" in caplog.text
    looking.cancel()


async def test_what_a_process_leaves_behind_holds_up_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = tmp_path / "left"
    descriptors = open_descriptors()
    began = time.monotonic()
    try:
        assert await result(role("leaves_others", payload=str(left).encode(), restarts=RestartPolicy(most=0))) == 1
        assert "ended with signal 9 (Killed)" in caplog.text
        assert "still here" in caplog.text
        assert time.monotonic() - began < 30
        assert psutil.pid_exists(int(left.read_text()))
        assert open_descriptors() <= descriptors + 1  # the event loop's own
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(left.read_text()), signal.SIGKILL)


def counted(metrics: AllMetrics) -> float:
    return sum(sample.value for family in metrics.merged.collect() for sample in family.samples)


async def test_what_processes_count_is_shown_together_and_outlives_them() -> None:
    metrics = AllMetrics(CollectorRegistry())
    async with supervised(role("serve", restarts=TIRELESS), role("serve", "front 2"), watchers=(metrics,)) as (
        supervisor,
        launched,
    ):
        for number in range(1, 4):
            await until(lambda: all_are_ready(supervisor))
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(PATIENCE_S):
                while counted(metrics) < 2 * number:
                    await metrics.refresh()
                    await asyncio.sleep(0.01)
            killed = launched.last("front 1")
            os.kill(killed.pid, signal.SIGKILL)
            await until(killed.ended.done)
            assert counted(metrics) == 2 * number
            await until(lambda killed=killed: launched.last("front 1") is not killed)  # type: ignore[misc]
        await until(lambda: all_are_ready(supervisor))
    assert counted(metrics) == 26, "what is counted last is shown as well"


async def test_killed_processes_are_replaced_by_forks_of_a_waiting_one() -> None:
    before = open_descriptors()
    roles = [role("serve", f"front {number}", payload=b"mine", has_spare=True, restarts=TIRELESS) for number in (1, 2)]
    async with supervised(*roles, launched=(prepared := Prepared())) as (supervisor, _):
        await until(lambda: all_are_ready(supervisor) and prepared.has_spare())
        (spare,) = spares()
        held = spare.num_fds()
        for number in range(KILLS):
            killed = prepared.last(name := f"front {number % 2 + 1}")
            killed.send_signal(signal.SIGKILL)
            await until(lambda killed=killed, name=name: prepared.last(name) is not killed)  # type: ignore[misc]
            assert psutil.Process(prepared.last(name).pid).ppid() == os.getpid()
        await until(lambda: all_are_ready(supervisor))
        assert [status for _, status, _ in prepared.ends] == [-signal.SIGKILL] * KILLS
        assert {about["payload"] for about in supervisor.about.values()} == {"mine"}
        assert spares() == [spare], "it goes on waiting"
        assert spare.num_fds() == held
        titles = [" ".join(psutil.Process(process.pid).cmdline()).strip() for process in supervisor.ready]
        assert sorted(titles) == ["xlaserve front 1", "xlaserve front 2"]
    prepared.launcher.close()
    assert not spares()
    assert open_descriptors() == before


async def test_what_is_forked_is_as_if_it_had_been_started() -> None:
    roles = [role("tells_of_itself", f"front {number}", has_spare=True, restarts=TIRELESS) for number in (1, 2, 3)]
    async with supervised(*roles, launched=(prepared := Prepared())) as (supervisor, _):
        await until(lambda: all_are_ready(supervisor) and prepared.has_spare())
        started = supervisor.about["front 3"]
        for name in ("front 1", "front 2"):
            prepared.last(name).send_signal(signal.SIGKILL)
        await until(lambda: len(prepared.processes) == 5 and all_are_ready(supervisor))
        forked = [supervisor.about[name] for name in ("front 1", "front 2")]
    prepared.launcher.close()
    drawn = [about["drawn"] for about in (started, *forked)]
    assert len({*drawn}) == 3, "each draws random numbers of its own"
    for about in forked:
        assert {**about, "drawn": 0} == {**started, "drawn": 0}
    assert started["leads_session"]
    assert started["parent"] == os.getpid()


async def test_where_the_one_that_waits_was_killed_another_is_started() -> None:
    roles = [role("serve", has_spare=True)]
    async with supervised(*roles, launched=(prepared := Prepared())) as (supervisor, _):
        await until(lambda: all_are_ready(supervisor) and prepared.has_spare())
        (spare,) = spares()
        spare.kill()
        prepared.last("front 1").send_signal(signal.SIGKILL)
        await until(lambda: all_are_ready(supervisor) and len(prepared.processes) == 2)
        await until(lambda: prepared.launcher.prepare(roles[0]))
        await until(prepared.has_spare)
        assert spares() != [spare]
    prepared.launcher.close()


async def test_one_that_hangs_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    roles = [role("serve", has_spare=True)]
    async with supervised(*roles, launched=(prepared := Prepared())) as (supervisor, _):
        await until(lambda: all_are_ready(supervisor) and prepared.has_spare())
        (spare,) = spares()
        spare.suspend()
        prepared.last("front 1").send_signal(signal.SIGKILL)
        await until(lambda: all_are_ready(supervisor) and len(prepared.processes) == 2)
        assert "front 1: starts in a fresh interpreter" in caplog.text
        assert not spare.is_running()
    prepared.launcher.close()


async def test_what_is_forked_too_late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    front = role("serve", has_spare=True, restarts=TIRELESS)
    draw = random.Random(15)
    before = {child.pid for child in psutil.Process().children()}  # of other tests
    async with supervised(front, launched=(prepared := Prepared())) as (supervisor, _):
        for number in range(LATE):
            await until(lambda: prepared.launcher.prepare(front) and all_are_ready(supervisor) and prepared.has_spare())
            monkeypatch.setattr(interpreters, "FORK_S", draw.uniform(0.0005, 0.01))
            prepared.last("front 1").send_signal(signal.SIGKILL)
            await until(lambda number=number: all_are_ready(supervisor) and len(prepared.processes) == number + 2)  # type: ignore[misc]
        prepared.launcher.close()
        known = before | {process.pid for process in prepared.processes}
        await until(lambda: {child.pid for child in psutil.Process().children()} <= known)


async def test_processes_are_replaced_where_ends_of_children_are_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a server may inherit it
    front = role("serve", has_spare=True, restarts=TIRELESS)
    try:
        async with supervised(front, launched=(prepared := Prepared())) as (supervisor, _):
            for number in range(2):
                await until(lambda: prepared.has_spare() and all_are_ready(supervisor))
                prepared.last("front 1").send_signal(signal.SIGKILL)
                await until(lambda number=number: len(prepared.processes) == number + 2 and all_are_ready(supervisor))  # type: ignore[misc]
            prepared.launcher.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_a_spare_ends_that_was_ready_and_never_asked() -> None:
    launcher = Launcher()
    launcher.prepare(role("serve", has_spare=True))
    await until(spares)  # it has said that it is ready, and nobody has heard
    await asyncio.sleep(0.1)
    launcher.close()
    assert not spares()


async def test_a_module_that_starts_threads_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text("""
import threading, time
from tests.integration.process_roles import serve
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    front = replace(role("serve", has_spare=True), target="threaded:serve")
    async with supervised(front, launched=(prepared := Prepared())) as (supervisor, _):
        await until(lambda: all_are_ready(supervisor) and not prepared.launcher.prepare(front))
        assert "expected the modules to start no threads" in caplog.text
        prepared.last("front 1").send_signal(signal.SIGKILL)
        await until(lambda: all_are_ready(supervisor) and len(prepared.processes) == 2)
    prepared.launcher.close()


async def test_a_module_that_fails_is_told_of_by_the_process_that_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    failing = replace(role("serve", has_spare=True), target="tests.integration.no_such_module:serve")
    launcher = Launcher()
    launcher.prepare(failing)
    await until(lambda: not launcher.prepare(failing))
    assert "front 1: the spare process ended with status 1" in caplog.text
    caplog.clear()
    process = launcher(failing, lambda kind, content: None)
    async with asyncio.timeout(PATIENCE_S):
        assert await process.ended == 1
    assert "No module named 'tests.integration.no_such_module'" in caplog.text
    launcher.close()


async def test_metrics_are_shown_while_an_event_loop_hangs() -> None:
    metrics = AllMetrics(CollectorRegistry())
    async with supervised(role("hangs_its_loop", stop_timeout_s=1), watchers=(metrics,)) as (supervisor, _):
        await until(lambda: all_are_ready(supervisor))
        await metrics.refresh()
        assert counted(metrics) == 3


SUPERVISOR = """
import asyncio, signal, sys, uvloop
from xlaserve.processes.supervision.child_handle import Launcher
from xlaserve.processes.supervision.restart_policy import RestartPolicy
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.supervisor import Supervisor
from xlaserve.telemetry import logs

def role(name, target, **about):
    return Role(name=name, target=f"tests.integration.process_roles:{target}", **about)

async def main():
    logs.configure("info", sys.argv[1])
    tireless = {"has_spare": True, "restarts": RestartPolicy(most=1000, at_once=1000)}
    fronts = [role(f"front {number}", sys.argv[3], stage=1, **tireless) for number in (1, 2)]
    launcher = Launcher("info", sys.argv[1])
    supervisor = Supervisor([*fronts, role("engine 0", sys.argv[2])], launcher)

    async def kill():
        while launcher.prepare(fronts[0]):
            await asyncio.sleep(0.002)
            if any(spare.is_ready for spare in launcher._spares.values()):
                for process in supervisor.ready:
                    process.send_signal(signal.SIGKILL)

    killing = asyncio.create_task(kill()) if sys.argv[4:] else None
    return await supervisor.run()

sys.exit(uvloop.run(main()))
"""
TOKEN = "XLASERVE_TEST_TOKEN"


def started_with(token: str) -> list[psutil.Process]:
    """Returns the processes that live and have the token in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def supervisor_process(token: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, *arguments],
        env={**os.environ, TOKEN: token},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", range(10))
async def test_no_process_outlives_a_supervisor_that_is_killed_at_any_point(number: int, tmp_path: Path) -> None:
    token = str(tmp_path)
    supervisor = supervisor_process(token, "human", "ignores_sigterm", "serve")
    try:
        await until(lambda: len(started_with(token)) > 1)
        await asyncio.sleep(number * 0.05)
    finally:
        supervisor.kill()
        supervisor.communicate()
    await until(lambda: not started_with(token))


async def test_no_process_outlives_a_supervisor_killed_while_it_forks(tmp_path: Path) -> None:
    token = str(tmp_path)
    draw = random.Random(15)
    for _ in range(KILLS // 4):
        supervisor = supervisor_process(token, "human", "ignores_sigterm", "ignores_sigterm", "kills")
        assert supervisor.stderr is not None
        try:
            ends = 0
            while ends < 3:
                line = await asyncio.wait_for(asyncio.to_thread(supervisor.stderr.readline), PATIENCE_S)
                ends += "another is started" in line
            await asyncio.sleep(draw.uniform(0, 0.05))
        finally:
            supervisor.kill()
            supervisor.communicate()
        await until(lambda: not started_with(token))


@pytest.mark.parametrize("format", ["human", "json"])
async def test_the_log_of_all_is_one_and_signals_reach_all(format: str, tmp_path: Path) -> None:
    supervisor = supervisor_process(str(tmp_path), format, "serve", "serve")
    assert supervisor.stderr is not None
    lines: list[str] = []
    try:
        while sum("is ready" in line for line in lines) < 3:
            lines.append(await asyncio.wait_for(asyncio.to_thread(supervisor.stderr.readline), PATIENCE_S))
    finally:
        supervisor.terminate()
        with supervisor.stderr:
            lines += await asyncio.wait_for(asyncio.to_thread(supervisor.stderr.readlines), PATIENCE_S)
        assert await asyncio.to_thread(supervisor.wait, PATIENCE_S) == 0
    if format == "json":
        records = [json.loads(line) for line in lines]
        stopped = [record["role"] for record in records if record["message"] == "it has stopped"]
        assert {record["role"] for record in records if record["message"] == "it serves"} == {*stopped}
    else:
        stopped = [line.partition("[")[2].partition("]")[0] for line in lines if line.endswith("] it has stopped\n")]
    assert sorted(stopped) == ["engine 0", "front 1", "front 2"]
    assert stopped[-1] == "engine 0", "the engine ends last"
