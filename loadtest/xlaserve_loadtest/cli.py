"""The `loadtest` command."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console

from xlaserve_client.cli_parser import add_completion
from xlaserve_loadtest import option_checks, options
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.record.lines import SUFFIX
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.reports import compare_cli, mlperf_log
from xlaserve_loadtest.run import generate
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.session import Session
from xlaserve_loadtest.run.watch import Watch
from xlaserve_loadtest.schedule.payload import PayloadError
from xlaserve_loadtest.study import sweep
from xlaserve_loadtest.targets.target import TargetError
from xlaserve_loadtest.transport_options import without_secrets

_COMMANDS: Final = {"report": report, "compare": compare_cli, "sweep": sweep, "generate": generate}
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: everything was measured to the end; 1: some of it was not, or the target could not be used; 2: a wrong command
    line; 3: a `--fail-if` or `--abort-if` condition is met, or can't be judged, even where 1 is true; 130: interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _COMMANDS:
        return int(_COMMANDS[words[0]].main(words[1:]))
    command = parser()
    chosen = command.parse_args(words)
    if chosen.command:
        command.error(f"{chosen.command}: expected as the first word")
    settings = option_checks.settings_of(chosen, command)
    report.check(chosen, command)
    failure: Exception | None = None
    watch = Watch(chosen.abort_if)
    with Progress(watch=watch) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        session = Session(settings, progress)
        try:
            with watch.served(chosen.live_port):
                loop.run(_run(session, chosen.out, ["loadtest", *without_secrets(words, settings.transport)], watch))
        except (TargetError, PayloadError, OSError) as error:
            failure = error
    if failure:
        sys.stderr.write(f"loadtest: {printable(str(failure))}\n")
    status = _report(session, chosen, watch)
    if session.interrupted:
        return _INTERRUPTED
    if status == report.EXIT_CONDITION:
        return status
    return 1 if failure or not (session.is_complete or watch.reason) else status


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and its subcommands."""
    parser = options.parser()
    commands = parser.add_subparsers(title="further commands", dest="command", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        own = module.parser()
        about = str(own.description)
        commands.add_parser(
            name,
            parents=[own],
            add_help=False,
            help=about.partition(".")[0],
            description=about,
            formatter_class=own.formatter_class,
        )
    add_completion(parser)
    return parser


async def _run(session: Session, folder: Path, command: Sequence[str], watch: Watch) -> None:
    """Runs the session; Ctrl-C and SIGTERM end it cleanly."""
    task = asyncio.create_task(session.run(folder, command))
    watch.on_met = task.cancel
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        # The session had not begun, so it could not end by itself.
        session.interrupted = True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _report(session: Session, chosen: argparse.Namespace, watch: Watch) -> int:
    """Reports from the run file, as `loadtest report` does."""
    if session.path is None or not session.blocks:
        return 0
    if chosen.html is None:
        chosen.html = session.path.with_name(session.path.name.removesuffix(SUFFIX) + ".html")
    out = Console()
    try:
        summary = summarize(read_run(session.path), chosen.fail_if)
    except RunFileError as error:
        sys.stderr.write(f"loadtest: {error}\n")
        return 1
    files = [("run", session.path), ("page", chosen.html)]
    if summary.scenario:
        files.append(("summary", session.path.with_name(session.path.name.removesuffix(SUFFIX) + mlperf_log.SUFFIX)))
    status, lost = 0, list[str]()
    try:
        status = report.publish([summary], chosen, out, watch.judged())
    except report.NotWrittenError as error:
        sys.stderr.write(f"loadtest: {error}\n")
        status, lost = 1, error.paths
    try:
        if summary.scenario:
            report.write(files[-1][1], mlperf_log.render(summary))
    except OSError as error:
        sys.stderr.write(f"loadtest: {error}\n")
        status, lost = 1, [*lost, error.filename]
    for what, path in files:
        if str(path) in lost:
            continue
        out.print(f"{what}: {path}", markup=False, highlight=False, soft_wrap=True)
    return status
