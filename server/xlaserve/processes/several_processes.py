"""A server of several processes: this one supervises fronts and an engine, and shows the metrics of all."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector

from xlaserve.admission import shared_counts
from xlaserve.admission.hosts import Hosts
from xlaserve.admission.shared_counts import SharedCounts, Upgrade
from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.processes import front_process
from xlaserve.processes.capacity import needed
from xlaserve.processes.engines import DRAINING, LATER_S, Engines, folder_of_engines, is_engine, point
from xlaserve.processes.event_loop import in_background
from xlaserve.processes.front import FLUSH_S
from xlaserve.processes.handover import Predecessor, Successor, changes_are_made
from xlaserve.processes.link.engine_end.host import bound
from xlaserve.processes.ready_file import ReadyFile
from xlaserve.processes.reserved_ports import reserve
from xlaserve.processes.supervision import linux
from xlaserve.processes.supervision.child_handle import Launcher
from xlaserve.processes.supervision.liveness import Liveness
from xlaserve.processes.supervision.merged_metrics import AllMetrics, Restarted
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.restarts import RestartPolicy, Restarts
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.service_manager import ServiceManager
from xlaserve.processes.supervision.supervisor import Supervisor
from xlaserve.processes.supervision.watcher import Watcher
from xlaserve.programs.tf.device import usable_cores
from xlaserve.telemetry.http import HttpEndpoint, listens_at
from xlaserve.wire.shared import shared_regions

FRONT: Final = "front {}"
PORTS: Final = ("grpc_port", "http_port")
UPGRADING: Final = "upgrading"
"""The name of a server's process from when it is asked for another server until that serves or has failed."""
LEAVING: Final = "xlaserve leaving"
"""What `ps` shows of a server whose place another one has taken."""
SPARE_LOOK_S: Final = 0.25
"""How often it is seen whether a process waits for the end of a front."""
SPARES: Final = RestartPolicy(window_s=600.0, at_once=0, first_wait_s=SPARE_LOOK_S, longest_wait_s=60.0, jitter=0.0)
"""When another is started where that process has ended by itself, or could not be started."""
AT_ONCE: Final = 128 + signal.SIGTERM
"""The status of a process that ended at a second signal: see `Stopping`."""

log = logging.getLogger(__name__)


class Server(Watcher):
    """A server of `settings.front_processes` fronts. `read_settings`, which can be pickled, reads them again.

    It takes the place of `before`, where there is one. One that `grows` begins with one front, and adds others, up to
    that number, as engines turn out to compute more than it brings.
    """

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        before: Predecessor | None = None,
        *,
        grows: bool = False,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._before = before
        self._successor: Successor | None = None
        """The server that takes this one's place, from its start on."""
        self._has_handed_over = False
        self._service_manager = ServiceManager(is_silent=before is not None)
        self._ready_file = ReadyFile(settings.ready_file)
        self._metrics_address: str | None = None
        self._ready: dict[str, Mapping[str, Any]] = {}
        """What each process that is ready said of itself, by the name of its role."""
        self._grows = grows
        self._numbers = _numbers(1, 1 if grows else settings.front_processes)
        """Of the fronts, by the names of their roles."""
        self._serving_engines: dict[str, Process] = {}
        """By role, the one that fills it."""
        self._one_succeeds = asyncio.Lock()
        """Held while an engine takes the place of another: memory and processors are to hold one more, not as many."""
        self._reloading: set[str] = set()
        """Engines that have not said yet that they have read the configuration again."""
        self._starting: set[asyncio.Task[None]] = set()
        self._was_ready = False
        self._at_once = 0
        """The exit status where some process was told again to end, and did not wait for what it had under way."""
        self._is_stopping = False

    async def run(self) -> int:
        """Serves until a signal, and returns the exit status. Raises ConfigError where it can't listen."""
        settings = self._settings
        with ExitStack() as stack:
            stack.callback(self._service_manager.close)
            self._ready_file.check()
            stack.callback(self._ready_file.remove)
            if self._before is None:  # an older version holds no lock on its own
                self._ready_file.remove_left()
            self._ports = {name: self._reserve(name, stack) for name in PORTS}
            used = _shared(partial(shared_counts.create, settings.front_processes), stack)
            self._regions = _shared(shared_regions.create, stack) if self._before is None else self._before.regions
            changes = None if self._before is None else self._before.changes
            folder = folder_of_engines(stack)
            self._changes_socket, self._successor_address = folder / "changes", folder / "successor"
            self._shared = {
                front_process.USAGE: used,
                front_process.REGIONS: self._regions,
                front_process.CHANGES: _shared(lambda: bound(self._changes_socket).detach(), stack),
            }
            self._engines = Engines(settings, self._read_settings, folder, lambda: self._was_ready, changes)
            self._usage = SharedCounts(used, settings.front_processes)
            self._usage.serving = len(self._numbers)
            registry = CollectorRegistry()
            registry.register(ProcessCollector(registry=None))
            metrics, liveness = AllMetrics(registry), Liveness()
            endpoint = self._metrics_endpoint = self._endpoint(metrics)
            if endpoint is not None:
                endpoint.start()
                stack.callback(endpoint.stop)
            self._metrics_address = None if endpoint is None else endpoint.address
            fronts = self._fronts(self._numbers)
            self._front = fronts[0]
            self._launcher = Launcher(settings.log_level, settings.log_format)
            stack.callback(self._launcher.close)
            watchers = [metrics, Restarted(registry), liveness, self]
            self._supervisor = Supervisor([*self._engines.roles, *fronts], self._launcher, watchers)
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._upgrade)
            following = [
                in_background(work, lambda: self._supervisor.fail("it can't watch its processes"))
                for work in (metrics.follow(), liveness.follow(), self._keep_spare(), self._service_manager.watch())
            ]
            self._service_manager.tell_status("compiling")
            try:
                return await self._supervisor.run() or self._at_once
            finally:
                if self._successor is not None and not self._has_handed_over:
                    await self._successor.end()
                for number in (
                    signal.SIGTERM,
                    signal.SIGINT,
                    signal.SIGUSR2,
                ):  # all have ended: nothing is left to be told
                    signal.signal(number, signal.SIG_IGN)
                for task in (*following, *self._starting):
                    task.cancel()

    def began(self, role: Role, process: Process) -> None:
        """Notes where an engine listens."""
        if is_engine(role.name):
            self._engines.began(process)

    def filled(self, role: Role, process: Process) -> None:
        """Has fronts link to an engine from now on."""
        if is_engine(role.name):
            self._serving_engines[role.name] = process
            self._engines.filled(role, process)

    def keeps(self, role: Role, process: Process, content: bytes) -> None:
        """Notes what an engine that follows one that ends is to begin with."""
        self._engines.keep(content)

    def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
        """Starts an engine that takes the place of the one that asks, and tells that what has become of it."""
        self._do(self._succeed(role, process, content))

    async def _succeed(self, role: Role, process: Process, start: bytes) -> None:
        told: Mapping[str, Any] = {}

        def unfit(about: Mapping[str, Any]) -> str:
            nonlocal told
            told = {key: about[key] for key in ("reason", "failed") if key in about}
            return str(about.get("reason", ""))

        try:
            async with self._one_succeeds:
                reason = "another process has taken its place"
                if self._serving_engines.get(role.name) is process:
                    reason = await self._supervisor.succeed(self._engines.beside(role, start), unfit)
        except Exception:  # it waits for an outcome, and no other change is made before
            log.exception("%s: another process could not be started", role.name)
            reason = "another process could not be started; the server's log says why"
        if not self._is_stopping:  # else all changes end with that
            process.tell_outcome({**told, "reason": reason})

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = in_background(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def became_ready(self, role: Role, process: Process) -> None:
        """Tells the world once all fronts and an engine are ready, and of what changes then. To take another server's
        place, all engines have to be."""
        self._ready[role.name] = self._supervisor.about[role.name]
        self._reloading.discard(role.name)
        if self._grows:
            self._grow()
        engine = self._engine_ready
        awaited = {*self._numbers}
        if self._before is not None and not self._was_ready:
            awaited |= {role.name for role in self._engines.roles}
        if engine is None or not awaited <= self._ready.keys():
            return
        if not self._was_ready:
            self._was_ready = True
            log.info("%s", engine["serving"])
            if self._before is not None:
                self._do(self._take_over(self._before, self._ready[FRONT.format(1)]))
            elif engine["is_ready"]:
                try:
                    self._ready_file.write(self._ready[FRONT.format(1)])
                except ConfigError as error:
                    self._supervisor.fail(str(error))
        if not self._reloading:
            self._service_manager.tell_ready(engine["serving"])

    def _grow(self) -> None:
        """Adds the fronts that are missing to bring each engine what it computes.

        None while another server starts: its fronts have to be the last to listen (`Ports.leave`).
        """
        if (engine := self._engine_ready) is None or self._usage.upgrade is not Upgrade.NONE or self._is_stopping:
            return
        images_per_s: float = engine["images_per_s"]
        wanted = needed(images_per_s, usable_cores(), len(self._engines.roles))
        added = _numbers(len(self._numbers) + 1, min(wanted, self._settings.front_processes))
        if not added:
            return
        log.info("fronts: %d more, for up to %.0f images/s of each engine", len(added), images_per_s)
        self._numbers = {**self._numbers, **added}  # others may read it meanwhile
        self._usage.serving = len(self._numbers)
        self._supervisor.add(self._fronts(added))

    async def _keep_spare(self) -> None:
        """Has a process wait for the end of a front for as long as one is ready: others may need it before all are."""
        restarts = Restarts(SPARES)
        while True:
            await asyncio.sleep(SPARE_LOOK_S)
            if self._has_front and not self._launcher.prepare(self._front):
                wait_s = restarts.wait_s(asyncio.get_running_loop().time())
                await asyncio.sleep(wait_s or SPARES.longest_wait_s)

    @property
    def _has_front(self) -> bool:
        return not self._numbers.keys().isdisjoint(self._ready)

    @property
    def _engine_ready(self) -> Mapping[str, Any] | None:
        """What an engine says of itself, one that serves if there is any."""
        engines = [about for name, about in self._ready.copy().items() if is_engine(name)]
        return max(engines, key=lambda about: bool(about["is_ready"]), default=None)

    async def _take_over(self, before: Predecessor, addresses: Mapping[str, Any]) -> None:
        await before.leaves()
        for address in before.successor_addresses:
            with suppress(OSError):  # that server has ended
                point(address, self._changes_socket)
        log.info("upgrade: this is the server from now on")
        self._service_manager.is_silent = False
        self._service_manager.tell_ready(self._serving)
        try:
            self._ready_file.write(addresses)
        except ConfigError as error:  # nobody else is left to serve
            log.warning("upgrade: this server goes on without a ready file: %s", error)

    @property
    def _serving(self) -> str:
        return str((self._engine_ready or {}).get("serving", "starting"))

    def _upgrade(self) -> None:
        if not self._was_ready or self._is_stopping:
            log.warning("upgrade: this server is %s; nothing is done", "ending" if self._is_stopping else "starting")
        elif os.getpid() == 1 or not self._settings.upgrades:
            log.error("upgrade: who has started this server would take it for ended (upgrades: false); nothing is done")
        elif self._usage.upgrade is not Upgrade.NONE:
            number = "another server" if self._successor is None else f"process {self._successor.pid}"
            log.warning("upgrade: %s is starting already; nothing more is done", number)
        else:
            self._usage.upgrade = Upgrade.STARTING
            self._do(self._hand_over())

    async def _hand_over(self) -> None:
        """Starts another server, and leaves once that serves. Clients change no models meanwhile."""
        is_ready = False
        try:
            with linux.named(UPGRADING):
                is_ready = await self._has_successor()
        except Exception:
            log.exception("upgrade: an error of this server, which goes on")
            if self._successor is not None:
                await self._successor.end()
        finally:
            if is_ready:
                self._usage.upgrade = Upgrade.DONE
                self._leave()
            elif not self._is_stopping:
                self._successor, self._usage.upgrade = None, Upgrade.NONE
                if self._grows:
                    self._grow()

    async def _has_successor(self) -> bool:
        """Starts another server, and returns whether it serves."""
        if not await changes_are_made(self._usage):
            log.error("upgrade: a client is changing models, this server goes on; ask again once that is done")
            return False
        if self._is_stopping:
            return False
        metrics = None if self._metrics_endpoint is None else self._metrics_endpoint.listener
        try:
            addresses = [self._successor_address, *(() if self._before is None else self._before.successor_addresses)]
            self._successor = successor = Successor(
                self._ports, metrics, self._regions, self._engines.changes, addresses
            )
        except OSError as error:
            log.error("upgrade: another server can't be started, this one goes on: %s", error)
            return False
        log.info("upgrade: process %d starts", successor.pid)
        is_ready = await successor.is_ready()
        if self._is_stopping:  # and so does that
            return False
        if not is_ready:
            log.error("upgrade: process %d %s, this one goes on", successor.pid, await successor.end())
        return is_ready

    def _leave(self) -> None:
        assert self._successor is not None
        log.info("upgrade: process %d serves, this one leaves", self._successor.pid)
        self._has_handed_over = True
        with ExitStack() as stack:  # an error keeps none of the steps that follow from being taken
            stack.callback(self._supervisor.drain)
            if self._metrics_endpoint is not None:
                stack.callback(self._metrics_endpoint.leave)
            stack.callback(self._successor.go)
            self._service_manager.tell_main(self._successor.pid)
            linux.set_title(LEAVING, LEAVING)

    def reloading(self) -> None:
        """Tells who started the server; that it has happened is told once the engine says so."""
        if self._was_ready:
            self._reloading = {*filter(is_engine, self._ready)}
            self._service_manager.tell_reloading()
        if self._successor is not None:
            self._successor.request_reload()

    def announced_end(self, role: Role, process: Process) -> None:
        """Notes that an engine has not crashed."""
        if is_engine(role.name):
            self._engines.announced_end(process)

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """Notes that the role is not filled, and what a front had in use is not."""
        is_filling = not is_engine(role.name) or process is self._serving_engines.get(role.name)
        if is_filling:
            self._ready.pop(role.name, None)
            self._reloading.discard(role.name)
        if is_engine(role.name) and self._engines.ended(process, status):
            self._supervisor.forgive(role.name)
        if status == AT_ONCE:
            self._at_once = status
        if number := self._numbers.get(role.name):
            self._usage.clear(number - 1)

    def stopping(self) -> None:
        """Tells the world that the server ends."""
        self._is_stopping = True
        self._ready.clear()
        self._service_manager.tell_stopping()
        if not self._has_handed_over:
            self._usage.upgrade = Upgrade.NONE  # changes that wait for it end as all others do
            if self._successor is not None:
                self._successor.send_signal(signal.SIGTERM)

    def is_ready(self) -> bool:
        """Whether models serve, and some front does. Called on any thread."""
        engine = self._engine_ready
        return engine is not None and bool(engine["is_ready"]) and self._has_front

    def _fronts(self, numbers: Mapping[str, int]) -> list[Role]:
        settings, engines = self._settings, self._engines.addresses
        successor, metrics = self._successor_address, self._metrics_address

        def orders(number: int) -> bytes:
            waits = self._before is not None and not self._was_ready
            of_front = settings.model_copy(update={**self._ports, "metrics_port": None})
            return pickle.dumps(front_process.FrontOrders(of_front, engines, successor, metrics, number, waits))

        stop_timeout_s = settings.shutdown_delay_s + settings.drain_timeout_s + 2 * FLUSH_S + LATER_S
        return [
            Role(
                name=name,
                target=f"{front_process.__name__}:{front_process.run.__name__}",
                payload=partial(orders, number),
                descriptors=self._shared,
                has_spare=True,
                stage=DRAINING,
                drain_s=front_process.leaving_s(settings),
                stop_timeout_s=stop_timeout_s,
            )
            for name, number in numbers.items()
        ]

    def _endpoint(self, metrics: AllMetrics) -> HttpEndpoint | None:
        settings, loop = self._settings, asyncio.get_running_loop()
        listening = None if self._before is None else self._before.metrics
        if listening is not None and not listens_at(listening, settings.host, settings.metrics_port):
            listening.close()
            listening = None
        if settings.metrics_port is None:
            return None
        registry = CollectorRegistry()
        registry.register(metrics.merged)
        return HttpEndpoint(
            settings.host,
            settings.metrics_port,
            registry,
            is_ready=self.is_ready,
            refresh=lambda: asyncio.run_coroutine_threadsafe(metrics.refresh(), loop),
            hosts=Hosts.of(settings, is_locked=False),
            listening=listening,
        )

    def _reserve(self, name: str, stack: ExitStack) -> int:
        """Takes a port, that of the server whose place this one takes unless the configuration says another one."""
        wanted, before = getattr(self._settings, name), self._before
        if before is not None and wanted in (0, (port := before.ports[name])):
            return reserve(name, self._settings.host, port, stack, is_taken_over=True)
        return reserve(name, self._settings.host, wanted, stack)


def _shared(create: Callable[[], int], stack: ExitStack) -> int:
    """Returns a file for all fronts. Raises ConfigError."""
    try:
        file = create()
    except OSError as error:
        raise ConfigError(f"fronts: expected memory and a file for each, got {error.strerror}") from None
    stack.callback(os.close, file)
    return file


def _numbers(first: int, last: int) -> dict[str, int]:
    return {FRONT.format(number): number for number in range(first, last + 1)}
