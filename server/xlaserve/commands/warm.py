"""`xlaserve warm`: compiles every model and shows what it took.

It does so as each kind of engine does that the server has: XLA divides work by the number of cores, and what it has
compiled for another number is of no use.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Final

from xlaserve.commands.command import EXECUTION, FAILED, Command, Invocation
from xlaserve.config import check_files
from xlaserve.processes.capacity import resolve_fronts
from xlaserve.processes.engines import shares_of_machine
from xlaserve.processes.event_loop import run_loop
from xlaserve.processes.handover import command
from xlaserve.programs.tf.device import Share, unlike
from xlaserve.telemetry import console
from xlaserve.telemetry.metrics import Metrics

CACHE: Final = ("compile_cache", "compile_cache_read_only", "compile_threads", "exit_on_model_failure")
PROCESSES: Final = ("fronts", "engines")


def run(invocation: Invocation) -> int:
    """Prints the ledger, of each kind of engine; fails where a model failed."""
    settings = resolve_fronts(invocation.settings)
    if settings.exit_on_model_failure:
        check_files(settings)
    shares = shares_of_machine(settings) if settings.front_processes else [Share()]
    *others, share = unlike(shares)
    failed = [other for other in others if not _warm_elsewhere(other)]
    if share.cores:
        os.sched_setaffinity(0, share.cores)

    # Nothing is served meanwhile, and what compiles beside the traffic is not kept.
    for_this = {**share.settings, "ready_when": "all", "load_process": False}
    settings = settings.model_copy(update=for_this)

    async def warm() -> int:
        from xlaserve.processes.engine import Engine  # noqa: PLC0415

        with console.WarmUpProgress(settings) as progress:
            engine = Engine(settings, Metrics(), on_record=progress.record)
            await engine.repository.load_all()
        versions = engine.repository.index()
        console.print_ledger((entry for version in versions for entry in version.ledger), invocation.own.json)
        return 0 if all(engine.repository.serving().values()) else FAILED

    return run_loop(warm()) or (FAILED if failed else 0)


def _warm_elsewhere(share: Share) -> bool:
    """Does the same in another process, as an engine that has `share`; returns whether no model failed."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share.cores or mine)
    try:
        return subprocess.run([*command(), "--engines", "1"], check=False).returncode == 0
    finally:
        os.sched_setaffinity(0, mine)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


COMMAND = Command(run, add_options, (*EXECUTION, *CACHE, *PROCESSES), sources="*")
