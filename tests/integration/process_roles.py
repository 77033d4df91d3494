"""What the processes of `test_processes` do: small, and badly behaved on purpose."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from xlaserve.errors import ConfigError
from xlaserve.processes.supervision import pulse
from xlaserve.processes.supervision.child import Child
from xlaserve.telemetry.counts import LoopCounter
from xlaserve.telemetry.http import on_loop

log = logging.getLogger("xlaserve.tests")

pulse.BEAT_S = 0.1  # type: ignore[misc]


def serve(child: Child) -> int:
    """Behaves: counts each SIGHUP, and ends when it is told to, after it has counted ten more."""

    async def run() -> int:
        loop, stopping, registry = asyncio.get_running_loop(), asyncio.Event(), CollectorRegistry()
        child.beat()
        news = LoopCounter("news", "SIGHUP.", (), registry=registry).labels()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGHUP, news.inc)
        child.show_metrics(registry, partial(on_loop, loop, lambda: None))
        log.info("it serves")
        child.tell_ready({"cores": sorted(os.sched_getaffinity(0)), "payload": child.payload.decode()})
        await stopping.wait()
        news.inc(10)
        log.info("it has stopped")
        return 0

    return asyncio.run(run())


def tells_of_itself(child: Child) -> int:
    """Says what it would have from the process that it is a fork of, if it was not set right."""
    child.tell_ready(
        {
            "drawn": random.random(),
            "priority": [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)],
            "parent": os.getppid(),
            "leads_session": os.getsid(0) == os.getpid(),
            "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "open": sorted(
                os.readlink(f"/proc/self/fd/{number}").split(":")[0]  # noqa: PTH115 - what is none
                for number in range(20)
                if _is_open(number)
            ),
        }
    )
    signal.pause()
    return 0


def _is_open(number: int) -> bool:
    with suppress(OSError):
        os.fstat(number)
        return True
    return False


def ignores_sigterm(child: Child) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child.tell_ready()
    while True:
        time.sleep(60)


def hangs_its_loop(child: Child) -> int:
    """Shows its metrics though nothing else goes on."""
    registry = CollectorRegistry()
    LoopCounter("news", "SIGHUP.", (), registry=registry).labels().inc(3)
    child.show_metrics(registry, Future)
    child.tell_ready()
    while True:
        time.sleep(60)


def spins(child: Child) -> int:
    """Serves for a moment, and then its event loop never comes to anything else."""

    async def run() -> int:
        child.beat()
        child.tell_ready()
        await asyncio.sleep(0.5)
        while True:
            pass

    return asyncio.run(run())


def tells_outcomes(child: Child) -> int:
    """Says the sizes of the outcomes that it was told, the first of which it takes long to take in."""
    sizes: list[int] = []

    def take(outcome: str) -> None:
        if not sizes:
            time.sleep(1)
        sizes.append(len(outcome))
        child.tell_ready({"sizes": sizes})

    child.ask_for_successor(b"", take)
    time.sleep(60)
    return 0


def is_cut_off(child: Child) -> int:
    """Closes what its supervisor tells it by, and would do as if all was well."""

    async def run() -> int:
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        child.tell_ready()
        await asyncio.sleep(0.2)
        child._channel.shutdown(socket.SHUT_RDWR)
        child.keep(b"")
        await stopping.wait()
        return 0

    return asyncio.run(run())


def dies_at_start(child: Child) -> int:
    os._exit(3)


def raises(child: Child) -> int:
    raise RuntimeError("a defect")


def refuses(child: Child) -> int:
    raise ConfigError("lanes: expected at least 1, got 0")


def ends_with_0(child: Child) -> int:
    child.tell_ready()
    return 0


def writes_garbage(child: Child) -> int:
    """Neither what it writes on stderr nor what it says can be understood."""
    os.write(2, bytes(range(256)) * 300 + b"\nF0000 Check failed: all is lost\n")
    child.tell_ready()
    os.write(child._channel.fileno(), b"\xff" * 100)
    while True:
        time.sleep(60)


def leaves_others(child: Child) -> int:
    """Starts a process that holds its stderr and goes on writing there, and is killed."""
    program = "import os, time\nfor _ in range(3000): os.write(2, b'still here\\n'); time.sleep(0.02)"
    other = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True)
    Path(child.payload.decode()).write_text(str(other.pid))
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def tells_descriptors(child: Child) -> int:
    """Says what it can read from each descriptor, and whether it would hand it on."""
    child.tell_ready(
        {
            name: [os.read(number, 100).decode(), os.get_inheritable(number)]
            for name, number in child.descriptors.items()
        }
    )
    time.sleep(60)
    return 0
