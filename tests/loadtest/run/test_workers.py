from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from multiprocessing import Pipe
from typing import Any, cast

import pytest
import uvloop
from tests.loadtest.conftest import StartPuppet
from tests.loadtest.run.odd_worker import Unreadable
from tests.required import required

from xlaserve_loadtest.run import crew
from xlaserve_loadtest.run.calls import WorkerDied
from xlaserve_loadtest.run.sender import Task
from xlaserve_loadtest.run.worker import Setup
from xlaserve_loadtest.run.workers import WorkerProcess, choose_number, start_worker
from xlaserve_loadtest.schedule.arrivals import ClosedLoop
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.targets.target import ModelInfo, TargetError

PATIENCE_S = 60
ODD_WORKER = "from tests.loadtest.run import odd_worker; odd_worker.main()"
BLOCK = BlockPlan("xla", ClosedLoop(2), 0.0, 0.1)
SETUP = Setup({"xla": [ModelInfo("digits", (32, 32), (), {}, "")]}, {"xla": [Request(b"", 1, "xla")]}, deadline_s=1)


async def test_a_worker_loads_a_target_and_ends_with_its_context(start_puppet: StartPuppet) -> None:
    async with WorkerProcess() as worker:
        await worker.calls.setup(SETUP)
        shares = crew.tasks(BLOCK, (start_puppet(),), 1, seed=0, max_in_flight=1)
        outcome = await crew.run_block(BLOCK, [worker.calls.generator], shares)
        assert outcome.sends > 0
        assert outcome.failures
        pid = worker.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_messages_of_any_size_pass_on_the_loop_that_the_command_uses() -> None:
    async def main() -> None:
        async with WorkerProcess() as worker:
            large = Setup(SETUP.models, {"xla": [Request(bytes(20_000_000), 1, "xla")]}, deadline_s=1)
            await asyncio.gather(*(worker.calls.setup(large) for _ in range(3)))
            with pytest.raises(KeyError) as caught:
                await worker.calls.generator.prepare(Task("x" * 5_000_000, ()))
            assert len(str(caught.value)) > 5_000_000

    uvloop.run(asyncio.wait_for(main(), 60))


async def test_an_error_in_a_worker_is_raised_here() -> None:
    async with WorkerProcess() as worker:
        with pytest.raises(KeyError):
            await worker.calls.setup(SETUP)
            await worker.calls.generator.prepare(
                crew.tasks(BlockPlan("other", ClosedLoop(1), 0, 1), (), 1, seed=0, max_in_flight=1)[0]
            )


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("value", (), "worker: value: its answer, a Loop, can't be sent: ."),
        ("unreadable_value", (), "worker: unreadable_value: its answer can't be read: .*why"),
        ("unpicklable_error", (), "worker: unpicklable_error: Unpicklable: what went wrong"),
        ("unreadable_error", (), "worker: unreadable_error: Unreadable: what went wrong"),
        ("cancelled", (), "worker: cancelled was cancelled"),
        ("right", (Unreadable("what", why="why"),), "required keyword-only argument: 'why'"),
    ],
)
async def test_an_answer_that_cannot_be_sent_fails_its_call_and_is_named(
    monkeypatch: pytest.MonkeyPatch, method: str, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.setattr("xlaserve_loadtest.run.workers.WORKER_COMMAND", (sys.executable, "-c", ODD_WORKER))
    async with WorkerProcess() as process:
        with pytest.raises((TargetError, TypeError), match=message):
            await asyncio.wait_for(getattr(process.calls, method)(*arguments), PATIENCE_S)
        assert await cast(Any, process.calls).right() == "right"


@pytest.mark.parametrize("end", ["the connection", "its stdin"])
async def test_a_worker_whose_loop_is_busy_ends_when_its_parent_has_gone(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("xlaserve_loadtest.run.workers.WORKER_COMMAND", (sys.executable, "-c", ODD_WORKER))
    connection, theirs = Pipe()
    with theirs:
        process = await start_worker(theirs.fileno(), stdout=asyncio.subprocess.PIPE)
    try:
        with connection:
            connection.send((0, "busy", pickle.dumps(((), {}))))
            assert await asyncio.wait_for(required(process.stdout).readline(), PATIENCE_S) == b"busy\n"
            if end == "its stdin":
                required(process.stdin).close()
                assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_worker_that_dies_is_noticed_by_whoever_waits_for_it() -> None:
    async with WorkerProcess() as worker:
        await worker.calls.setup(SETUP)
        waiting = asyncio.create_task(worker.calls.outputs("xla", ("127.0.0.1:1",), 1))
        os.kill(worker.pid, 9)
        with pytest.raises(WorkerDied, match="ended with status -9"):
            await waiting
        with pytest.raises(WorkerDied):
            await worker.calls.generator.live()


@pytest.mark.parametrize(
    ("cores", "concurrency", "workers"), [(1, 16, 1), (2, 16, 1), (16, 16, 4), (16, 2, 2), (128, 64, 8)]
)
def test_the_number_of_workers_leaves_the_target_most_cores(cores: int, concurrency: int, workers: int) -> None:
    assert choose_number(cores, concurrency) == workers


def test_processes_start_while_grpc_is_busy_and_it_says_nothing_of_it() -> None:
    script = """
import asyncio, xlaserve_loadtest, grpc, uvloop

async def main():
    server = grpc.aio.server()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await channel.channel_ready()
    for _ in range(5):
        process = await asyncio.create_subprocess_exec("true")
        assert await process.wait() == 0
    await channel.close()
    await server.stop(10)  # without a grace it cancels what the channel has not closed yet, and gRPC logs that

uvloop.run(main())
"""
    without = {key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run([sys.executable, "-c", script], env=without, stderr=subprocess.PIPE, timeout=60, check=True)
    assert done.stderr == b""
