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
from xlaserve_loadtest import compare_versions, option_checks, options
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.record.lines import SUFFIX
from xlaserve_loadtest.record.run_file import RunFileError, read_run
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.reports import compare_cli
from xlaserve_loadtest.run import generate
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.session import Session
from xlaserve_loadtest.run.watch import Watch
from xlaserve_loadtest.schedule.payload import PayloadError
from xlaserve_loadtest.study import sweep
from xlaserve_loadtest.targets.target import TargetError
from xlaserve_loadtest.transport_options import without_secrets

_COMMANDS: Final = {
    "report": report,
    "compare": compare_cli,
    "compare-versions": compare_versions,
    "sweep": sweep,
    "generate": generate,
}
_INTERRUPTED: Final = 130
_PAGE: Final = ".html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: everything was measured to the end; 1: some of it was not, or the target could not be used; 2: a wrong command
    line; 3: a `--fail-if` or `--abort-if` condition is met, or can't be judged, or requests failed or outputs differ
    where no condition is about that, even where 1 is true; 130: interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _COMMANDS:
        return int(_COMMANDS[words[0]].main(words[1:]))
    command = parser()
    chosen = command.parse_args(words)
    if chosen.command:
        command.error(f"{chosen.command}: expected as the first word")
    settings = option_checks.settings_of(chosen, command)
    try:
        report.discard(chosen, *_beside(chosen.record))
    except OSError as error:
        return report.fail(chosen, f"loadtest: {error}")
    failure: Exception | None = None
    watch = Watch(chosen.abort_if)
    as_typed = ["loadtest", *without_secrets(words, settings.transport)]
    with Progress(watch=watch) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        session = Session(settings, progress)
        try:
            with watch.served(chosen.live_port):
                loop.run(_run(session, chosen.out or options.FOLDER, as_typed, watch))
        except (TargetError, PayloadError, OSError) as error:
            failure = error
    if not session.blocks:
        status = _report_nothing(chosen, failure)
    else:
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
    """Runs the session; Ctrl-C, SIGTERM and the end of the terminal end it cleanly: servers that it started end too."""
    task = asyncio.create_task(session.run(folder, command))
    watch.on_met = task.cancel
    loop = asyncio.get_running_loop()
    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        ending.append(signal.SIGHUP)
    for number in ending:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        # The session had not begun, so it could not end by itself.
        session.interrupted = True
    finally:
        for number in ending:
            loop.remove_signal_handler(number)


def _beside(record: Path | None) -> list[Path]:
    """Returns the files that a run writes where it has a run file: that file, and the page of its report."""
    return [] if record is None else [record, _page_of(record)]


def _page_of(record: Path) -> Path:
    return record.with_name(record.name.removesuffix(SUFFIX) + _PAGE)


def _report_nothing(chosen: argparse.Namespace, failure: Exception | None) -> int:
    """Says why nothing was measured, in the JUnit file too, which must not be missing where others fail."""
    if failure is None and not chosen.junit:
        return 0
    return report.fail(chosen, f"loadtest: {failure or 'interrupted before anything was measured'}")


def _report(session: Session, chosen: argparse.Namespace, watch: Watch) -> int:
    """Reports from the run file, as `loadtest report` does."""
    assert session.path is not None
    if chosen.html is None:
        chosen.html = _page_of(session.path)
    out = Console()
    try:
        summary = summarize(read_run(session.path), chosen.fail_if)
    except RunFileError as error:
        return report.fail(chosen, f"loadtest: {error}")
    status, lost = 0, list[str]()
    try:
        status = report.publish([summary], chosen, out, watch.judged())
    except report.NotWrittenError as error:
        sys.stderr.write(f"loadtest: {error}\n")
        status, lost = 1, error.paths
    for what, path in (("run", session.path), ("page", chosen.html)):
        if str(path) in lost:
            continue
        out.print(f"{what}: {path}", markup=False, highlight=False, soft_wrap=True)
    return status
