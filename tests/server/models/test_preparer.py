from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from xlaserve.config import BucketSettings, Mode, ModelSettings, Settings
from xlaserve.engine.niceness import NICE, Starvation
from xlaserve.errors import ModelFailed, ShuttingDown
from xlaserve.models import preparer, preparer_process
from xlaserve.models.change_queue import Stop
from xlaserve.models.load_turns import LoadTurns
from xlaserve.models.networks import cached
from xlaserve.models.preparer import Preparer, can_be_prepared
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.tf.device import Device

PATIENCE_S = 60
MODEL = ModelSettings(name="digits", source="builtin:digits", buckets=(BucketSettings(1),))
DEVICE = Device("cpu", "a processor", 2, 1)
READ = "import json, os, pathlib, sys; s = json.loads(sys.stdin.readline()); f = pathlib.Path(s['compile_cache']);"
DONE = "\nprint('xlaserve is done', flush=True)"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Preparer]:
    """Makes one whose process runs a script in place of our own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", "")

    def make(script: str, kept: CompileCache | None = None, turns: LoadTurns | None = None) -> Preparer:
        process = (sys.executable, "-c", f"{READ}{script}{DONE}")
        return Preparer(Settings(), DEVICE, Stop(), kept, process, turns=turns)

    return make


async def test_what_the_process_leaves_is_there_until_the_model_is_loaded(
    make: Callable[..., Preparer], tmp_path: Path
) -> None:
    preparer = make("[m] = s['models']; (f / m['name']).write_text('made')")
    async with preparer.prepare(MODEL) as prepared:
        assert prepared is not None
        assert not prepared.is_filling
        assert (prepared.root / "digits").read_text() == "made"
    assert not prepared.root.exists()


@pytest.mark.parametrize("is_starved", [False, True])
async def test_the_process_runs_on_idle_processors_or_takes_a_share_without_any(
    make: Callable[..., Preparer], monkeypatch: pytest.MonkeyPatch, is_starved: bool
) -> None:
    monkeypatch.setattr(Starvation, "is_starved", lambda self: is_starved)
    script = """
import time
how = os.sched_getscheduler(0)
time.sleep(how == os.SCHED_IDLE)
(f / f'{how} {os.nice(0)}').touch()
"""
    async with make(script).prepare(MODEL) as prepared:
        assert prepared is not None
        [how] = [file.name for file in prepared.root.iterdir()]
    lower = min(os.nice(0) + NICE, 19)  # the lowest that there is, where the tests run at low priority themselves
    assert how == (f"{os.SCHED_OTHER} {lower}" if is_starved else f"{os.SCHED_IDLE} {os.nice(0)}")


async def test_a_configured_compile_cache_keeps_it(make: Callable[..., Preparer], tmp_path: Path) -> None:
    kept = CompileCache(tmp_path / "kept")
    async with make("(f / 'made').touch()", kept).prepare(MODEL) as prepared:
        assert prepared is kept
    assert (tmp_path / "kept" / "made").exists()


async def test_a_read_only_cache_that_has_the_model_is_what_it_is_loaded_from(
    make: Callable[..., Preparer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").mkdir()
    kept = CompileCache(tmp_path / "kept", read_only=True)
    for is_there in (True, False):
        monkeypatch.setattr(cached, "has", lambda *arguments, is_there=is_there: is_there)
        async with make("", kept).prepare(MODEL) as prepared:
            assert (prepared is None) is is_there
    assert not caplog.records


async def test_one_model_is_prepared_at_a_time(make: Callable[..., Preparer], tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    preparer = make(
        f"import time; os.close(os.open({lock!r}, os.O_CREAT | os.O_EXCL)); time.sleep(0.1); os.unlink({lock!r})"
    )

    async def prepare() -> bool:
        async with preparer.prepare(MODEL) as prepared:
            return prepared is not None

    assert await asyncio.gather(*(prepare() for _ in range(4))) == [True] * 4


async def test_a_model_that_never_builds_does_not_hold_up_the_others(
    make: Callable[..., Preparer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = "\nprint('xlaserve is building the model', flush=True)\nimport time"
    script = f"{step}; [m] = s['models']; time.sleep({PATIENCE_S} * (m['name'] == 'hung'))"
    preparer = make(script, turns=LoadTurns(patience_s=0.05))
    hung = asyncio.create_task(never_prepared(preparer, MODEL.model_copy(update={"name": "hung"})))
    async with asyncio.timeout(PATIENCE_S):
        while "model hung: " not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
    async with preparer.prepare(MODEL) as prepared:
        assert prepared is not None
    hung.cancel()
    await asyncio.wait([hung], timeout=PATIENCE_S)
    assert hung.cancelled()


@pytest.mark.parametrize("process", [("/nonexistent",), (sys.executable, "-c", "")])
async def test_a_process_that_cannot_start_leaves_the_model_to_the_server(
    process: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = MODEL.model_copy(update={"name": "m" * 1_000_000})  # more than a pipe holds
    async with Preparer(Settings(), DEVICE, Stop(), process=process).prepare(model) as prepared:
        assert prepared is None
    assert not prepared_folders(tmp_path)


async def test_folders_of_killed_servers_are_removed_and_those_in_use_are_not(
    make: Callable[..., Preparer], tmp_path: Path
) -> None:
    # Process 1 of each of two containers that share a /tmp: here too both have one process id.
    (tmp_path / f"xlaserve-prepared-{os.getpid()}-left").mkdir()
    (tmp_path / "xlaserve-prepared-left").mkdir()
    (tmp_path / "xlaserve-prepared-file").touch()
    (tmp_path / "another").mkdir()
    (tmp_path / "xlaserve-prepared-link").symlink_to(tmp_path / "another")
    async with make("(f / 'made').touch()").prepare(MODEL) as prepared:
        assert prepared is not None
        another = make("")
        await asyncio.to_thread(another._threads.shutdown)
        left = [prepared.root.name, "another", "xlaserve-prepared-file", "xlaserve-prepared-link"]
        assert names(tmp_path) == set(left)
        assert names(prepared.root) == {"made"}
    assert not prepared.root.exists()


async def test_without_folder_locks_none_is_left_and_the_server_loads_the_model(
    make: Callable[..., Preparer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    async with make("").prepare(MODEL) as prepared:
        assert prepared is None
    assert not prepared_folders(tmp_path)
    assert "a folder for temporary files (TMPDIR) can't be locked: No locks available" in caplog.text


async def test_a_process_that_ends_by_a_signal_as_the_server_stops_is_no_failure(
    make: Callable[..., Preparer], tmp_path: Path
) -> None:
    preparer = make("import signal; os.kill(os.getpid(), signal.SIGTERM)")
    asyncio.get_running_loop().call_later(0.05, preparer._stop.set)
    with pytest.raises((ShuttingDown, ModelFailed)) as raised:
        async with preparer.prepare(MODEL):
            pass
    assert raised.type is ShuttingDown


async def test_where_the_process_fails_the_model_is_loaded_here_which_says_why(
    make: Callable[..., Preparer], caplog: pytest.LogCaptureFixture
) -> None:
    async with make("print('first'); sys.exit('it has no weights')").prepare(MODEL) as prepared:
        assert prepared is None
    ((_, level, message),) = [record for record in caplog.record_tuples if record[1] >= logging.WARNING]
    assert (level, message) == (
        logging.WARNING,
        "model digits: can't be compiled in a process of its own and is compiled here: it has no weights",
    )


async def test_code_installed_since_the_server_began_does_not_compile_for_it(
    make: Callable[..., Preparer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("xlaserve.programs.cache.environment._on_disk", lambda: {"xlaserve": "another"})
    async with make("").prepare(MODEL) as prepared:
        assert prepared is None
    assert "other code has been installed since the server began; restart it" in caplog.text


async def test_a_process_that_is_killed_fails_the_model(make: Callable[..., Preparer]) -> None:
    # By the kernel, for lack of memory: loading the model here would end the server.
    with pytest.raises(ModelFailed, match="signal 9"):
        async with make("os.kill(os.getpid(), 9)").prepare(MODEL):
            pass


def test_a_step_is_told_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    sys.stdout.write("50%")  # as the model's own code may
    preparer_process._tell(preparer.DONE)
    assert f"{preparer.STEP}{preparer.DONE}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("end", "status"), [("sys.exit()", 0), ("os._exit(0)", 0), ("os._exit(143)", 143)])
async def test_a_process_that_a_library_ends_fails_the_model_whatever_its_status(
    make: Callable[..., Preparer], end: str, status: int
) -> None:
    with pytest.raises(ModelFailed, match=rf"with status {status} while building the model$"):
        async with make(f"print('xlaserve is building the model', flush=True); {end}").prepare(MODEL):
            pass


async def test_a_process_that_crashes_fails_the_model_with_what_it_did_last(make: Callable[..., Preparer]) -> None:
    steps = ("building the model", "compiling mode xla, bucket 1x8x8")
    said = "; ".join(f"print('xlaserve is {step}', flush=True)" for step in steps)
    with pytest.raises(ModelFailed, match=f"signal 11 while {steps[-1]}$"):
        async with make(f"{said}; os.kill(os.getpid(), 11)").prepare(MODEL):
            pass


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def prepared_folders(folder: Path) -> list[Path]:
    return list(folder.glob("xlaserve-prepared-*"))


def wait_for(file: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)


async def never_prepared(preparer: Preparer, model: ModelSettings = MODEL) -> None:
    async with preparer.prepare(model):
        pytest.fail("it was prepared")


@pytest.fixture
async def waiting(make: Callable[..., Preparer], tmp_path: Path) -> tuple[Preparer, asyncio.Task[None], int]:
    """A load whose process waits, and the id of that process."""
    pid = tmp_path / "pid"
    preparer = make(f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); import time; time.sleep({PATIENCE_S})")
    preparing = asyncio.create_task(never_prepared(preparer))
    await asyncio.to_thread(wait_for, pid)
    return preparer, preparing, int(pid.read_text())


async def test_a_stop_ends_the_process(waiting: tuple[Preparer, asyncio.Task[None], int]) -> None:
    preparer, preparing, pid = waiting
    preparer._stop.set()
    with pytest.raises(ShuttingDown):
        await asyncio.wait_for(preparing, PATIENCE_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_load_that_is_cancelled_leaves_no_process_and_no_folder(
    waiting: tuple[Preparer, asyncio.Task[None], int], tmp_path: Path
) -> None:
    _, preparing, pid = waiting
    assert prepared_folders(tmp_path)
    preparing.cancel()
    await asyncio.wait([preparing], timeout=PATIENCE_S)
    assert preparing.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not prepared_folders(tmp_path)


async def test_the_error_of_a_cancelled_load_is_taken(
    make: Callable[..., Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def end(preparer: Preparer, model: ModelSettings, temporary: object, stop: Stop, steps: object) -> None:
        begun.set()
        stop.wait(PATIENCE_S)
        stop.check()

    monkeypatch.setattr(Preparer, "_make", end)
    unasked: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unasked.append(context))
    preparing = asyncio.create_task(never_prepared(make("")))
    await asyncio.to_thread(begun.wait)
    preparing.cancel()
    await asyncio.wait([preparing], timeout=PATIENCE_S)
    assert preparing.cancelled()
    del preparing  # with it go the frames that hold the future
    gc.collect()
    assert unasked == [], "asyncio logs errors that nobody takes"


async def test_a_load_that_is_cancelled_waits_for_its_thread_only_so_long(
    make: Callable[..., Preparer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlaserve.models.preparer.KILL_S", 0.01)
    begun, may_end = threading.Event(), threading.Event()

    def hang(*arguments: object) -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    monkeypatch.setattr(Preparer, "_make", hang)

    preparing = asyncio.create_task(never_prepared(make("")))
    try:
        await asyncio.to_thread(begun.wait)
        preparing.cancel()
        await asyncio.wait([preparing], timeout=PATIENCE_S / 2)
        assert preparing.cancelled()
    finally:
        may_end.set()


async def test_a_thread_that_outlasts_its_cancelled_load_removes_its_folder(
    make: Callable[..., Preparer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xlaserve.models.preparer.KILL_S", 0.01)
    begun, may_go_on = threading.Event(), threading.Event()
    preparer = make("(f / 'made').touch()")

    def hang() -> bool:
        begun.set()
        may_go_on.wait(PATIENCE_S)
        return False

    monkeypatch.setattr("xlaserve.models.preparer.is_replaced", hang)

    preparing = asyncio.create_task(never_prepared(preparer))
    try:
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        preparing.cancel()
        await asyncio.wait([preparing], timeout=PATIENCE_S)
        assert preparing.cancelled()
    finally:
        may_go_on.set()
        await asyncio.to_thread(preparer._threads.shutdown)
    assert not prepared_folders(tmp_path)


@pytest.mark.parametrize(
    ("settings", "can_be"),
    [
        ({}, True),
        ({"buckets": "auto"}, False),
        ({"modes": (Mode.XLA, Mode.GRAPH)}, True),
        ({"modes": (Mode.AUTO,)}, True),
        ({"modes": (Mode.XLA, Mode.EAGER)}, False),
        ({"unmatched": "background"}, False),
        ({"source": "builtin:noop"}, False),
        ({"source": "kagglehub:google/mobilenet"}, False),
    ],
)
async def test_only_what_a_compile_cache_holds_whole_is_compiled_apart(
    make: Callable[..., Preparer], settings: dict[str, Any], can_be: bool
) -> None:
    model = ModelSettings(**{"name": "m", "source": "builtin:digits", "buckets": (BucketSettings(1),), **settings})
    assert can_be_prepared(model) is can_be
    async with make("").prepare(model) as prepared:
        assert (prepared is not None) is can_be
