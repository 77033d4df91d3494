"""Any process may die, hang, or send anything: requests end at once, and what they held is given back."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes import outputs_of
from tests.server.processes.link.engines import EngineProcess, EnginesElsewhere, until, until_nothing_is_held
from tests.server.processes.link.front_process import ask, flood, start_front
from tests.server.processes.link.models import OTHER, PATIENCE_S, pictures

from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest, Result
from xlaserve.errors import EngineLost, QueueFull
from xlaserve.processes.link.arena import Arena
from xlaserve.processes.link.engine_end.host import bound
from xlaserve.processes.link.front_end.engine_link import connect
from xlaserve.processes.link.front_end.remote_model import RemoteModel
from xlaserve.processes.link.link_records import Cancel, Settled, Submit
from xlaserve.processes.link.record_codec import HELLO, pack, pack_hello, pack_request

FAR = float("inf")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path / "socket") as process:
        yield process


async def outcomes(tasks: list[asyncio.Task[Result]], seconds: float) -> tuple[int, int]:
    """Returns how many were answered right, and how many were lost, once all have ended within so many seconds."""
    _, pending = await asyncio.wait(tasks, timeout=seconds)
    assert not pending, "each request ends"
    answered = lost = 0
    for number, task in enumerate(tasks):
        if (error := task.exception()) is None:
            assert (outputs_of(task.result())[0] == number).all()
            answered += 1
        else:
            assert isinstance(error, EngineLost), error
            lost += 1
    return answered, lost


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
async def test_an_engine_that_is_killed_fails_all_that_it_held_at_once(process: EngineProcess, after_s: float) -> None:
    engines = await EnginesElsewhere.connect(process)
    engine = engines.engine("slow")
    tasks = flood(engines.link, "slow", 300)
    await asyncio.sleep(after_s)
    process.kill()
    _, lost = await outcomes(tasks, 5.0)
    assert lost
    with pytest.raises(EngineLost, match="another one takes its place"):
        engine.admit(1, 1)
    assert engines.link.is_lost
    tasks.clear()
    gc.collect()
    await until(lambda: not engines.held_here())


async def test_a_killed_engine_fails_idle_runs_and_resolutions_being_opened(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    running = asyncio.create_task(ask(engines.link, "gated", 1))
    await process.gate.started()
    idle = asyncio.create_task(engines.engine("gated").run_when_idle(EngineRequest((pictures(2),), Mode.XLA, FAR)))
    os.kill(process.pid, signal.SIGSTOP)
    with engines.engine("any size").admit(1, 1, OTHER) as admitted:
        opening = [asyncio.create_task(admitted.open(OTHER, Mode.XLA)) for _ in range(2)]
        await asyncio.sleep(0.02)
        process.kill()
        for task in (running, idle, *opening):
            with pytest.raises(EngineLost):
                await task
    del running, idle, opening, task
    gc.collect()
    await until(lambda: not engines.held_here())


async def test_what_no_request_waits_for_leaves_half_of_the_memory_to_requests(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    engine = engines.engine("numbers")
    assert isinstance(engine, RemoteModel)
    share = engine.share
    used = engines.link.arena.take(share.max_bytes // 2 + 1, share)
    with pytest.raises(QueueFull, match=f"more than half of {share.max_bytes} bytes"):
        await engine.run_when_idle(EngineRequest((pictures(1),), Mode.XLA, FAR))
    assert outputs_of(await ask(engines.link, "numbers", 2))[0] == [2]
    del used
    assert outputs_of(await engine.run_when_idle(EngineRequest((pictures(3),), Mode.XLA, FAR)))[0] == [3]
    await until_nothing_is_held(engines)
    await engines.stop()


async def test_nobody_hangs_on_an_engine_that_hangs_for_longer_than_they_want(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(engines.link, "numbers", 1), 0.1)
        assert engines.link.jobs == 1, "its memory is still the engine's"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert outputs_of(await ask(engines.link, "numbers", 2))[0] == [2]
    await until_nothing_is_held(engines)
    await engines.stop()


async def test_a_front_has_a_bounded_number_of_jobs_under_way(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process, max_jobs=3)
    tasks = [asyncio.create_task(ask(engines.link, "gated", number)) for number in range(3)]
    await process.gate.started()
    with pytest.raises(QueueFull, match="3 requests are under way in the engine"):
        await ask(engines.link, "gated", 4)
    process.gate.open()
    assert (await outcomes(tasks, PATIENCE_S))[0] == 3
    await engines.stop()


async def test_a_full_arena_refuses_at_once_and_serves_on(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process, arena_bytes=16 * 4096)
    tasks = [asyncio.create_task(ask(engines.link, "gated", number)) for number in range(16)]
    await process.gate.started()
    with pytest.raises(QueueFull, match="what is left of 65536 for images and outputs"):
        await ask(engines.link, "gated", 4)
    process.gate.open()
    assert (await outcomes(tasks, PATIENCE_S))[0] == 16
    await engines.stop()


async def test_answers_that_are_kept_count_to_their_own_model_alone(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    engines.model("numbers").share.max_bytes = 3 * 4096
    kept = [await ask(engines.link, "numbers", number) for number in range(3)]
    with pytest.raises(
        QueueFull, match=r"model numbers: .* 12288 for its images and outputs, of which 12288 are in use"
    ):
        await ask(engines.link, "numbers", 4)
    assert outputs_of(await ask(engines.link, "slow", 5))[0] == [5]
    kept.pop()
    assert outputs_of(await ask(engines.link, "numbers", 6))[0] == [6]
    await engines.stop()


async def test_fronts_that_are_killed_leave_nothing_behind_and_disturb_nobody(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    for round_ in range(4):
        front = await asyncio.to_thread(start_front, process.path, "slow")
        tasks = flood(engines.link, "slow", 100)
        await asyncio.sleep(0.02 * round_)
        front.kill()
        await asyncio.to_thread(front.wait)
        assert await outcomes(tasks, PATIENCE_S) == (100, 0)
    tasks.clear()
    await until_nothing_is_held(engines)
    await until_no_other_front(process)
    await engines.stop()


async def test_what_waits_for_a_front_that_was_killed_leaves_the_queue_at_once(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    front = await asyncio.to_thread(start_front, process.path, "gated")
    await process.gate.started()
    front.kill()
    await asyncio.to_thread(front.wait)
    await until_nothing_is_held(engines)
    answer = asyncio.create_task(ask(engines.link, "gated", 7))
    process.gate.open(2)
    assert outputs_of(await answer)[0] == [7], "behind the batch that was under way, and no other"
    await engines.stop()


class RawFront:
    """A front whose bytes a test chooses."""

    def __init__(self, path: Path, greeting: bytes | None = None, max_jobs: int = 100) -> None:
        arena, self.used_bytes = Arena(2**20), 0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))
        greeting = pack_hello(arena.size_bytes, max_jobs) if greeting is None else greeting
        socket.send_fds(self.socket, [greeting], [arena.file])
        arena.end()

    def submit(self, job: int, model: int) -> Submit:
        offset, self.used_bytes = self.used_bytes, self.used_bytes + 4096
        request = EngineRequest((pictures(1),), Mode.XLA, FAR)
        return pack_request(request, job, model, offset, 4096)

    async def received(self, words: bytes) -> bool:
        """Whether a record with these words comes before the end."""

        def read() -> bool:
            data = b""
            while words not in data:
                if not (more := self.socket.recv(2**16)):
                    return False
                data += more
            return True

        return await asyncio.to_thread(read)

    async def is_hung_up_on(self) -> bool:
        def read() -> bool:
            with self.socket:
                try:
                    while self.socket.recv(2**16):
                        pass
                except ConnectionResetError:
                    pass
            return True

        return await asyncio.to_thread(read)


async def test_what_no_front_would_send_ends_that_link_alone(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    model = engines.model("numbers").snapshot.id
    good = RawFront(process.path)
    submit = good.submit(1, model)
    garbled = [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(1000),
        pack(Settled(1, 0, 0, 0, 0)),
        pack(submit) * 2,
        pack(submit._replace(offset=1)),
        pack(submit._replace(offset=2**40 * 4096)),
        pack(submit._replace(size_bytes=2**30)),
        pack(submit._replace(size_bytes=5)),
        pack(submit._replace(images=0)),
        pack(submit._replace(height=2**32 - 1, width=2**32 - 1)),
        pack(submit._replace(mode=200)),
        pack(submit._replace(priority=7)),
        pack(submit._replace(deadline=float("nan"))),
        pack(submit) + pack(submit._replace(job=2)) + pack(submit._replace(job=3)) + b"\xff" * 8,
    ]
    for data in garbled:
        tasks = flood(engines.link, "slow", 5)
        front = RawFront(process.path)
        front.socket.sendall(data)
        assert await front.is_hung_up_on(), data
        assert await outcomes(tasks, PATIENCE_S) == (5, 0)
    with good.socket:
        pass
    tasks.clear()
    await until_nothing_is_held(engines)
    await until_no_other_front(process)
    await engines.stop()


async def test_a_job_of_a_model_that_was_unloaded_fails_alone(process: EngineProcess) -> None:
    """The job's rows need not fit another model's."""
    engines = await EnginesElsewhere.connect(process)
    front = RawFront(process.path)
    model = engines.model("numbers").snapshot.id
    with front.socket:
        unknown = front.submit(1, model)._replace(model=2**20, size_bytes=64)
        front.socket.sendall(pack(unknown) + pack(front.submit(2, model)))
        assert await front.received(b"unloaded")
        assert await process.ask("fronts") == 2
    await until_no_other_front(process)
    await engines.stop()


async def until_no_other_front(process: EngineProcess) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while await process.ask("fronts") > 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_front_that_has_more_jobs_than_it_said_is_hung_up_on(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    front = RawFront(process.path, max_jobs=2)
    model = engines.model("gated").snapshot.id
    front.socket.sendall(b"".join(pack(front.submit(job, model)) for job in (1, 2, 3)))
    assert await front.is_hung_up_on()
    await until_nothing_is_held(engines)
    await engines.stop()


@pytest.mark.parametrize("greeting", [b"x" * HELLO.size, b"", pack_hello(2**40, 1), pack_hello(2**20, 0)])
async def test_who_does_not_greet_as_a_front_is_hung_up_on(process: EngineProcess, greeting: bytes) -> None:
    engines = await EnginesElsewhere.connect(process)
    if greeting:
        assert await RawFront(process.path, greeting).is_hung_up_on()
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(str(process.path))
    assert outputs_of(await ask(engines.link, "numbers", 2))[0] == [2]
    await engines.stop()


async def test_a_front_that_reads_nothing_holds_up_nobody(process: EngineProcess) -> None:
    engines = await EnginesElsewhere.connect(process)
    front = RawFront(process.path)
    model = engines.model("numbers").snapshot.id
    front.socket.setblocking(False)
    submit, sent, job = front.submit(1, model), 0, 0
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:  # one after the other, so that it keeps within its bound
        job += 1
        try:
            sent += front.socket.send(pack(submit._replace(job=job)) + pack(Cancel(job)))
        except BlockingIOError:
            break
        assert outputs_of(await ask(engines.link, "numbers", job))[0] == [job]
    assert sent
    front.socket.close()
    await until_nothing_is_held(engines)
    await engines.stop()


def test_only_the_same_user_may_be_a_front(tmp_path: Path) -> None:
    with bound(tmp_path / "socket"):
        assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600


async def test_a_front_without_an_engine_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await connect(tmp_path / "nobody")
    here, there = socket.socketpair()
    there.close()
    with pytest.raises((EngineLost, BrokenPipeError)):
        await connect(here)
