"""A server that is one process: an engine and a front on one event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import Final

from xlaserve.config import Settings
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.processes.beginning import Beginning
from xlaserve.processes.configuration import ConfigurationFollower
from xlaserve.processes.engine import Engine
from xlaserve.processes.event_loop import Stopping, end_at_once
from xlaserve.processes.first_call import first_call
from xlaserve.processes.front import Front
from xlaserve.processes.ready_file import ReadyFile
from xlaserve.processes.spans import Tracing
from xlaserve.processes.supervision.pulse import BEAT_S, Pulse
from xlaserve.programs.watch.stderr_tap import StderrTap
from xlaserve.telemetry.http import HttpEndpoint, on_loop
from xlaserve.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

CRASHED: Final = 1


class App:
    """A server: build it on a running event loop, then `run` it.

    `read_settings` reads the configuration again, on a thread, for a load and on SIGHUP. `on_record` is called with
    each program that warm-up compiled, on the compiling thread; `on_loaded` once every model was loaded or failed.
    `xla_events` is entered already. `beginning` is the state that a crashed process before this one has left.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        read_settings: Callable[[], Settings] | None = None,
        on_record: Callable[[Entry], None] = lambda entry: None,
        on_loaded: Callable[[], None] = lambda: None,
        xla_events: StderrTap | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        beginning = beginning or Beginning()
        read_settings = read_settings or (lambda: settings)
        self._settings = settings
        self._on_loaded = on_loaded
        self._ready_file = ReadyFile(settings.ready_file, beginning.pid)
        self._stopping = Stopping(partial(_end_at_once, self._ready_file, beginning))
        self._service_manager = beginning.service_manager
        self._pulse = beginning.pulse
        """The pulse that the parent looks at; None without a parent, and once it is counted."""
        self._metrics = Metrics()
        self._tracing = Tracing.of(settings)
        self._engine = Engine(
            settings,
            self._metrics,
            read_settings=read_settings,
            on_record=on_record,
            on_change=self._on_change,
            on_crash=self._stopping.crash,
            tracing=self._tracing,
            xla_events=xla_events,
            set_aside=beginning.set_aside,
            under_way=beginning.under_way,
            on_endless=partial(end_at_once, CRASHED),  # without a word to the parent, which starts another
        )
        self._configuration = ConfigurationFollower(settings, read_settings, self._engine.repository.reconfigure)
        self._front = Front(
            settings,
            self._engine,
            self._metrics,
            stopping=self._stopping.begun,
            on_crash=self._stopping.crash,
            gpus=self._engine.gpus,
            tracing=self._tracing,
            telemetry=HttpEndpoint.of(
                settings,
                self._metrics.registry,
                is_ready=lambda: self._was_ready,
                refresh=partial(on_loop, asyncio.get_running_loop(), self._take_snapshot),
            ),
            refresh=self._take_snapshot,
        )
        self._take_snapshot()

    async def run(self) -> int:
        """Serves until a signal, and returns the exit status: 0, or 1 after a crash.

        Listens from the start, so that a warm-up can be watched, but is ready only after it. Raises ConfigError if a
        port can't be opened and ModelFailed if a required model fails.
        """
        # An interrupt that came while TensorFlow was imported ends the server here, before anything is open.
        await asyncio.sleep(0)
        self._stopping.listen()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._configuration.request)
        self._ready_file.check()
        self._ready_file.remove_left()
        watching = asyncio.create_task(self._service_manager.watch())
        try:
            log.info("device: %s", self._engine.device)
            self._engine.repository.announce()  # else clients are told that these models don't exist
            await self._front.open()
            self._front.ports.announce()
            self._service_manager.tell_status("compiling")
            try:
                if await self._engine.start(self._stopping.begun):
                    self._tell_loaded()
                    await self._configuration.follow(
                        self._stopping.begun,
                        on_reload=self._service_manager.tell_reloading,
                        on_reloaded=lambda: self._service_manager.tell_ready(self._engine.serving),
                    )
            finally:
                await self._stop()
        finally:
            self._front.ports.close()
            self._ready_file.remove()
            watching.cancel()
            self._service_manager.close()
        return CRASHED if self._stopping.has_crashed else 0

    def _tell_loaded(self) -> None:
        self._on_loaded()
        if self._pulse is not None:
            self._beat(self._pulse)
        self._front.health.refresh()
        log.info(self._engine.serving)
        if self._front.is_ready():
            addresses = self._front.ports.addresses()
            log.info(first_call(self._settings, addresses))
            self._ready_file.write(addresses)
        self._service_manager.tell_ready(self._engine.serving)

    async def _stop(self) -> None:
        """Finishes accepted requests and refuses new ones: first health says so, then calls end, then ports close."""
        repository = self._engine.repository
        is_serving = repository.is_ready and not self._stopping.has_crashed
        self._service_manager.tell_stopping()
        repository.stop_loading()
        await self._front.drain(self._stopping.draining, self._settings.shutdown_delay_s if is_serving else 0)
        await repository.drain(timeout_s=0)
        await self._front.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        log.info("stopped")

    def _take_snapshot(self) -> None:
        """Reads on the event loop the values that the HTTP endpoint shows on its own thread."""
        self._was_ready = self._front.is_ready()
        self._engine.see_versions()
        self._metrics.read_gauges()

    def _on_change(self) -> None:
        self._front.health.refresh()

    def _beat(self, pulse: Pulse) -> None:
        """Counts the pulse of the event loop from now on. If that stops, the parent ends this process.

        Not before the models of the start are loaded: libraries that they need, from a slow disk, may hold Python's
        lock for long.
        """
        pulse.beat()
        asyncio.get_running_loop().call_later(BEAT_S, self._beat, pulse)


def _end_at_once(ready_file: ReadyFile, beginning: Beginning) -> None:
    ready_file.remove()
    beginning.end()
