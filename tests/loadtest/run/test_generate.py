"""`loadtest generate` in processes of their own, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.loadtest.conftest import StartPuppet

from xlaserve_loadtest import cli
from xlaserve_loadtest.cli import main
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.run import crew, generate, handshake, remote
from xlaserve_loadtest.run.calls import WorkerDied
from xlaserve_loadtest.run.environment import Machine
from xlaserve_loadtest.run.handshake import HandshakeError
from xlaserve_loadtest.run.remote import RemoteWorker, check_reach
from xlaserve_loadtest.run.worker import Setup
from xlaserve_loadtest.schedule.arrivals import ClosedLoop
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.settings import Settings
from xlaserve_loadtest.targets.target import ModelInfo, TargetError
from xlaserve_proto import open_inference_pb2 as oip

KEY = b"a key for tests alone"
PATIENCE_S = 60
ENDLESS = BlockPlan("xla", ClosedLoop(2), 0.0, 3600.0)
MESSAGE = oip.ModelInferRequest(model_name="digits")
MESSAGE.parameters["mode"].string_param = "xla"
MESSAGE.inputs.add(name="pixels", datatype="UINT8", shape=[1, 32, 32, 3])
MODEL = ModelInfo("digits", (32, 32), (Tensor("scores", "FP32", (-1, 10)),), {}, "puppet 1")
SETUP = Setup({"xla": [MODEL]}, {"xla": [Request(MESSAGE.SerializeToString(), 1, "xla")]}, deadline_s=1)


class Agent:
    """A process of `loadtest generate`."""

    def __init__(self) -> None:
        command = (sys.executable, "-m", "xlaserve_loadtest", "generate", "--listen", "127.0.0.1:0")
        environment = {**os.environ, handshake.KEY_VARIABLE: KEY.decode()}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.address = self.line().rpartition(" ")[2]

    def line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline().rstrip("\n")

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@pytest.fixture
def start_agent() -> Iterator[Callable[[], Agent]]:
    started: list[Agent] = []

    def start() -> Agent:
        started.append(Agent())
        return started[-1]

    yield start
    for agent in started:
        with agent.process:
            agent.process.kill()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.KEY_VARIABLE, KEY.decode())


@asynccontextmanager
async def loaded(*addresses: str, target: str) -> AsyncIterator[asyncio.Task[crew.Outcome]]:
    """Runs an endless block on generators, and yields its task once it is under way."""
    async with AsyncExitStack() as stack:
        workers, _ = await remote.start_workers(addresses, KEY, stack, number=1, slots=2)
        await asyncio.gather(*(worker.calls.setup(SETUP) for worker in workers))
        shares = crew.tasks(ENDLESS, (target,), len(workers), seed=0, max_in_flight=1)
        looks: asyncio.Queue[object] = asyncio.Queue()
        block = asyncio.create_task(
            crew.run_block(ENDLESS, [worker.generator for worker in workers], shares, on_live=looks.put_nowait)
        )
        first_look = asyncio.create_task(looks.get())
        await asyncio.wait((first_look, block), return_when=asyncio.FIRST_COMPLETED)
        assert first_look.done() or block.result()
        try:
            yield block
        finally:
            block.cancel()
            await asyncio.wait((block,))


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def test_two_generators_send_one_load_and_the_record_says_what_each_did(
    start_agent: Callable[[], Agent], start_puppet: StartPuppet, tmp_path: Path, key: None
) -> None:
    agents = [start_agent(), start_agent()]
    file = tmp_path / "run.gz"
    status = main(
        [
            *("--target", start_puppet(), "--mode", "xla", "--no-control", "--rate", "200", "--workers", "2"),
            *("--duration", "1", "--warmup", "0.2", "--record", str(file), "--full-duration"),
            *(word for agent in agents for word in ("--generator", agent.address)),
        ]
    )
    assert status == 0
    run = read_run(file)
    assert [(line.address, line.workers) for line in run.generators] == [(agent.address, 2) for agent in agents]
    assert run.generators[0].environment.cores > 0
    (block,) = run.blocks
    assert block.generator.workers == 4
    assert [own.generator for own in block.generator.machines] == [agent.address for agent in agents]
    assert set(run.requests["generator"].tolist()) == {0, 1}
    for own in block.generator.machines:
        assert own.sends == pytest.approx(block.generator.sends / 2, rel=0.2)
        assert 0 < own.clock_error_ms < 1000
        # One kernel has one monotonic clock: what differs is the comparison's error.
        assert abs(own.clock_drift_ms) <= 2 * own.clock_error_ms
    assert KEY not in file.read_bytes()


async def test_workers_of_several_generators_alternate_in_their_order(start_agent: Callable[[], Agent]) -> None:
    addresses = [start_agent().address for _ in range(2)]
    async with AsyncExitStack() as stack:
        workers, _ = await remote.start_workers(addresses, KEY, stack, number=2, slots=4)
        assert [worker.address for worker in workers] == addresses * 2


async def test_a_second_coordinator_is_refused_until_the_first_has_ended(start_agent: Callable[[], Agent]) -> None:
    agent = start_agent()
    async with RemoteWorker(agent.address, KEY, "first"), RemoteWorker(agent.address, KEY, "first"):
        with pytest.raises(TargetError, match=f"generator {agent.address} is at work for another coordinator, 127"):
            await RemoteWorker(agent.address, KEY, "second").__aenter__()
    async with RemoteWorker(agent.address, KEY, "second") as worker:
        assert await worker.calls.clock() > 0


@pytest.mark.parametrize("killed", ["agent", "worker"])
async def test_a_generator_that_is_killed_in_a_block_ends_it_with_its_name(
    start_agent: Callable[[], Agent], start_puppet: StartPuppet, killed: str
) -> None:
    agents = [start_agent(), start_agent()]
    async with loaded(*(agent.address for agent in agents), target=start_puppet()) as block:
        workers = agents[1].workers()
        (agents[1].process if killed == "agent" else workers[0]).kill()
        with pytest.raises(WorkerDied, match=f"generator {agents[1].address} ended"):
            await asyncio.wait_for(block, PATIENCE_S)
        assert gone(workers)


async def test_a_generator_that_stands_still_in_a_block_ends_it_with_its_name(
    start_agent: Callable[[], Agent], start_puppet: StartPuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SILENCE_S", 2.0)
    agents = [start_agent(), start_agent()]
    async with loaded(*(agent.address for agent in agents), target=start_puppet()) as block:
        (worker,) = agents[0].workers()
        worker.suspend()
        with pytest.raises(WorkerDied, match=f"generator {agents[0].address} has not answered for 2 s"):
            await asyncio.wait_for(block, PATIENCE_S)
    worker.resume()
    assert gone([worker])


def test_a_coordinator_that_is_killed_ends_the_load(
    start_agent: Callable[[], Agent], start_puppet: StartPuppet, tmp_path: Path, key: None
) -> None:
    agent = start_agent()
    command = (sys.executable, "-m", "xlaserve_loadtest", "--target", start_puppet(), "--mode", "xla", "--no-control")
    more = ("--generator", agent.address, "--workers", "1", "--full-duration", "--duration", "600")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, *more, "--record", str(tmp_path / "run.gz")], **quiet) as coordinator:  # type: ignore[call-overload]
        try:
            assert agent.line().endswith("working for 127.0.0.1")
            end = time.monotonic() + PATIENCE_S
            while not (workers := agent.workers()) and time.monotonic() < end:
                time.sleep(0.05)
            assert workers
        finally:
            coordinator.kill()
    assert gone(workers)
    assert agent.line().endswith("done for 127.0.0.1")


async def test_interrupting_a_generator_ends_it_and_its_load(
    start_agent: Callable[[], Agent], start_puppet: StartPuppet
) -> None:
    agent = start_agent()
    async with loaded(agent.address, target=start_puppet()) as block:
        workers = agent.workers()
        agent.process.send_signal(signal.SIGINT)
        with pytest.raises(WorkerDied, match="ended"):
            await asyncio.wait_for(block, PATIENCE_S)
    assert agent.process.wait(PATIENCE_S) == 0
    assert gone(workers)
    assert "Traceback" not in agent.process.stderr.read()  # type: ignore[union-attr]


async def test_a_wrong_key_another_version_and_another_service_are_named(
    start_agent: Callable[[], Agent], start_puppet: StartPuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start_agent()
    with pytest.raises(TargetError, match=f"generator {agent.address} refuses the key: it has another"):
        await RemoteWorker(agent.address, b"another key of length", "me").__aenter__()
    assert agent.line().endswith("127.0.0.1 has another key")
    own = handshake.own_version()
    monkeypatch.setattr(handshake, "own_version", lambda: "xlaserve 0.0.1")
    with pytest.raises(TargetError) as caught:
        await RemoteWorker(agent.address, KEY, "me").__aenter__()
    assert str(caught.value) == (
        f"generator {agent.address} runs {own}, and this side xlaserve 0.0.1; both sides need the same code"
    )
    assert "runs xlaserve 0.0.1, and this side" in agent.line()
    monkeypatch.undo()
    with monkeypatch.context() as patched:
        patched.setattr("xlaserve_loadtest.run.handshake.json.dumps", lambda message: "[" * 4000)
        with pytest.raises(TargetError, match="the connection ended"):
            await RemoteWorker(agent.address, KEY, "me").__aenter__()
    assert agent.line().endswith("speaks another protocol")
    with pytest.raises(TargetError, match=r"speaks another protocol|connection"):
        await RemoteWorker(start_puppet(), KEY, "me").__aenter__()
    with pytest.raises(TargetError, match=r"generator 127\.0\.0\.1:1: "):
        await RemoteWorker("127.0.0.1:1", KEY, "me").__aenter__()
    async with RemoteWorker(agent.address, KEY, "me") as worker:
        assert await worker.calls.clock() > 0


async def test_connections_that_show_no_key_block_no_other(start_agent: Callable[[], Agent]) -> None:
    agent = start_agent()
    host, _, port = agent.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(generate.MAX_GREETINGS - 2)]
    try:
        with socket.create_connection((host, int(port))) as noise:
            noise.sendall(os.urandom(200))
            noise.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                while noise.recv(4096):
                    pass  # until it is closed
        assert agent.line().endswith("speaks another protocol")
        async with RemoteWorker(agent.address, KEY, "me") as worker:
            assert await worker.calls.clock() > 0
        assert "working" in agent.line()
        assert "done" in agent.line()
        # All of them are closed in time.
        for sock in silent:
            sock.settimeout(PATIENCE_S)
            while sock.recv(4096):
                pass
            assert agent.line().endswith("did not show the key in time")
    finally:
        for sock in silent:
            sock.close()


async def test_a_service_that_says_nothing_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TargetError, match=f"generator {address} does not answer within 0.2 s"):
            await asyncio.wait_for(RemoteWorker(address, KEY, "me").__aenter__(), PATIENCE_S)


async def test_a_peer_that_echoes_the_handshake_has_not_proved_its_key() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()

    async def mirror() -> None:
        while data := await loop.sock_recv(theirs, 4096):
            await loop.sock_sendall(theirs, data)

    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(False)
        mirroring = asyncio.create_task(mirror())
        with pytest.raises(HandshakeError, match="has another key"):
            await asyncio.wait_for(handshake.greet_generator(ours, KEY, "me"), PATIENCE_S)
        mirroring.cancel()


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["embedded"], "loadtest starts listen on loopback only"),
        (["10.0.0.1:8001", "127.0.0.1:8001"], "where 127.0.0.1:8001 is not the same server"),
        (["[::1]:8001"], r"where \[::1\]:8001 is not"),
        (["localhost:8001"], "where localhost:8001 is not"),
        (["10.0.0.1:8001"], None),
    ],
)
def test_a_loopback_target_is_refused_for_a_generator_elsewhere(targets: list[str], reason: str | None) -> None:
    here = Machine.of_this()
    check_reach("gen:7070", here, targets)
    elsewhere = replace(here, id="another", name="gen")
    if reason is None:
        check_reach("gen:7070", elsewhere, targets)
        return
    with pytest.raises(TargetError, match=f"generator gen:7070 is another machine, gen, .*{reason}"):
        check_reach("gen:7070", elsewhere, targets)


def test_containers_of_one_kernel_have_a_loopback_each(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.of_this()
    monkeypatch.setattr(os, "readlink", lambda path: "net:[1]")
    with pytest.raises(TargetError, match=r"where 127\.0\.0\.1:8001 is not the same server"):
        check_reach("gen:7070", here, ["127.0.0.1:8001"])


def test_the_key_is_read_once_and_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    class Stop(Exception):
        pass

    def take(settings: Settings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise Stop

    monkeypatch.setattr(cli, "Session", take)
    file = tmp_path / "key"
    file.write_bytes(KEY)
    with pytest.raises(Stop):
        main(["--target", "h:1", "--generator", "gen:7070", "--generator-key", str(file)])
    (settings,) = seen
    assert settings.generator_key == KEY
    assert KEY.decode() not in f"{settings} {settings.document()}"


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "a key of 16 bytes or more, got 0"), ("too short\n", "a key of 16 bytes or more, got 9"), (None, "No such")],
)
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        handshake.read_key(file)


def test_a_key_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(handshake.KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"expected the key .*{handshake.KEY_VARIABLE}"):
        handshake.read_key(None)
