"""`xlaserve warm`: compiles every model and shows what it took."""

from __future__ import annotations

import argparse
from typing import Final

from xlaserve import console
from xlaserve.app.event_loop import run_loop
from xlaserve.commands.command import EXECUTION, FAILED, Command, Invocation
from xlaserve.config import check_files
from xlaserve.telemetry.metrics import Metrics

CACHE: Final = ("compile_cache", "compile_cache_read_only", "compile_threads", "exit_on_model_failure")


def run(invocation: Invocation) -> int:
    """Prints the ledger; fails where a model failed."""
    if invocation.settings.exit_on_model_failure:
        check_files(invocation.settings)

    # Nothing is served meanwhile, and what compiles beside the traffic is not kept.
    settings = invocation.settings.model_copy(update={"ready_when": "all", "load_process": False})

    async def warm() -> int:
        from xlaserve.app.engine import Engine  # noqa: PLC0415

        with console.WarmUp(settings) as progress:
            engine = Engine(settings, Metrics(), on_record=progress.record)
            await engine.repository.load_all()
        versions = engine.repository.index()
        console.print_ledger((entry for version in versions for entry in version.ledger), invocation.own.json)
        return 0 if all(engine.repository.serving().values()) else FAILED

    return run_loop(warm())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


COMMAND = Command("warm", "compile every model, print the ledger, and exit", run, add_options, (*EXECUTION, *CACHE))
