"""`xlaserve serve`: compiles every model, then serves."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from xlaserve.commands.command import Command, Invocation
from xlaserve.config import Settings, check_files
from xlaserve.errors import ConfigError
from xlaserve.models import catalog
from xlaserve.processes.beginning import Beginning, CrashedError, begin, end_at_sigterm
from xlaserve.processes.capacity import resolve_fronts
from xlaserve.processes.event_loop import run_loop
from xlaserve.processes.handover import Predecessor
from xlaserve.processes.ready_file import ReadyFile
from xlaserve.programs.watch.stderr_tap import StderrTap
from xlaserve.telemetry import console, log_writer


def run(invocation: Invocation) -> int:
    """Serves until a signal."""
    # SIGHUP, from a terminal that closes or to have the configuration read again, must not end a starting server; nor
    # may SIGUSR2, which has another one take its place.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_at_sigterm()
    settings = resolve_fronts(invocation.settings)
    if settings.exit_on_model_failure:  # otherwise it is the model that fails
        check_files(settings)

    async def serve(settings: Settings, beginning: Beginning) -> int:
        from xlaserve.processes.one_process import App  # noqa: PLC0415

        with ExitStack() as stack:
            tap: StderrTap | None = None
            if settings.watch_compilations and any(map(catalog.uses_tensorflow, settings.models)):
                tap = stack.enter_context(StderrTap())
            stack.enter_context(log_writer.without_waiting())
            progress = stack.enter_context(console.WarmUpProgress(settings))
            app = App(
                settings,
                read_settings=lambda: invocation.load().model_copy(update=own),
                on_record=progress.record,
                on_loaded=progress.end,
                xla_events=tap,
                beginning=beginning,
            )
            return await app.run()

    async def serve_with_fronts() -> int:
        from xlaserve.processes.several_processes import Server  # noqa: PLC0415

        with log_writer.without_waiting():
            grows = invocation.settings.fronts == "auto"
            return await Server(settings, partial(_read, invocation.load), before, grows=grows).run()

    before = Predecessor.of()
    if before is not None and not settings.front_processes:
        raise ConfigError("fronts: expected at least 1 to take the place of another server, got 0")
    if settings.front_processes:
        return run_loop(serve_with_fronts())
    try:
        beginning = begin(
            ReadyFile(settings.ready_file), delay_s=settings.shutdown_delay_s, drain_s=settings.drain_timeout_s
        )
    except CrashedError as crashed:
        return crashed.status
    # A model that fails ends a start, and never what was serving.
    own = {"exit_on_model_failure": settings.exit_on_model_failure and not beginning.has_served}
    try:
        status = run_loop(serve(settings.model_copy(update=own), beginning))
    except (Exception, KeyboardInterrupt):
        beginning.end()
        raise
    # Not after SystemExit, which no code of the server raises: that is a crash.
    beginning.end()
    return status


def _read(load: Callable[[], Settings]) -> Settings:
    return resolve_fronts(load())


COMMAND = Command(run, sources="*")
