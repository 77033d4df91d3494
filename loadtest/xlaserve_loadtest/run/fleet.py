"""All processes of a load test: the targets, the workers that load them, and what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from xlaserve_loadtest.addresses import FLEET, Address
from xlaserve_loadtest.record.lines import Arm, GeneratorLine, Server
from xlaserve_loadtest.run import ceilings, environment, remote, running_targets, setups, workers
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.recorder import Ceiling
from xlaserve_loadtest.run.remote import RemoteWorker
from xlaserve_loadtest.run.requests import Content, make_content
from xlaserve_loadtest.run.running_targets import RunningTarget
from xlaserve_loadtest.run.worker import Setup
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule import arms as arms_of
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.settings import NULL, Settings
from xlaserve_loadtest.targets import embedded
from xlaserve_loadtest.targets.embedded import EmbeddedServer, configuration, narrowed, served_name, with_cache
from xlaserve_loadtest.targets.protocols import describe, protocol_of
from xlaserve_loadtest.targets.references import Reference
from xlaserve_loadtest.targets.target import Array, ModelInfo, TargetError


async def name_arms(settings: Settings, say: Callable[[str], None]) -> list[Arm]:
    """Returns the arms to measure, without controls; `say` is called with what is left out.

    Raises TargetError where the target does not offer them, or where servers of our own would refuse the models.
    """
    if settings.arms:
        return arms_of.name_servers(settings.arms, settings.models, settings.model_shares)
    shares = settings.model_shares
    if settings.targets == (NULL,):
        return arms_of.name_arms([NULL], [NULL], settings.target)
    if settings.is_remote:
        return arms_of.name_arms(settings.models, await _offered_modes(settings, say), settings.target, shares)
    modes = arms_of.MODES if settings.modes == (arms_of.ALL,) else settings.modes or arms_of.USUAL_MODES
    if settings.config is not None:
        return arms_of.name_arms(settings.models, modes, settings.target, shares)
    await asyncio.to_thread(embedded.check, settings.models, modes)
    return arms_of.name_arms([served_name(model) for model in settings.models], modes, settings.target, shares)


async def _offered_modes(settings: Settings, say: Callable[[str], None]) -> tuple[str, ...]:
    """Returns the modes to measure on running servers, which every model has."""
    is_all = settings.modes == (arms_of.ALL,)
    if settings.modes and not is_all:
        return settings.modes
    infos = [await describe(settings.targets[0], model, settings.transport) for model in settings.models]
    if is_all and not all(info.modes for info in infos):
        without = ", ".join(info.name for info in infos if not info.modes)
        raise TargetError(f"{settings.targets[0]} names no modes of {without}: leave out --mode")
    modes, left_out = arms_of.common_modes([info.modes for info in infos])
    usual = tuple(mode for mode in arms_of.USUAL_MODES if mode in modes)
    for mode in left_out if is_all else set(left_out) & set(arms_of.USUAL_MODES):
        say(f"mode {mode} is left out: {', '.join(info.name for info in infos if mode not in info.modes)} has no such")
    return modes if is_all and modes else usual or modes[:1] or (arms_of.AS_IT_IS,)


class Fleet:
    """`async with` starts everything, and ends it. Entering raises TargetError and PayloadError."""

    def __init__(
        self,
        settings: Settings,
        arms: Sequence[Arm],
        progress: Progress,
        *,
        record: Callable[[Server | GeneratorLine], None],
        make_server: Callable[..., EmbeddedServer] = EmbeddedServer,
    ) -> None:
        self.contents: dict[str, Content] = {}
        """The requests by arm; arms of one target share them."""
        self.requests: dict[str, Sequence[Request]] = {}
        """Requests to send, by arm."""
        self._settings = settings
        self._arms = {arm.name: arm for arm in arms}
        self._progress = progress
        self._record = record
        self._make_server = make_server
        self._stack = contextlib.AsyncExitStack()
        self._servers = contextlib.AsyncExitStack()
        self._cache: Path | None = None
        self._targets: dict[str, RunningTarget] = {}
        self._started = 0
        self._workers: Sequence[WorkerProcess | RemoteWorker] = ()
        self._ceilings: dict[str, Ceiling] = {}
        """By protocol."""

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        try:
            if self.generations > 1:
                self._cache = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="loadtest-cache-")))
                self._progress.say(f"each arm has {self.generations} server processes, one after the other")
            self._stack.push_async_callback(self._servers.aclose)
            await self._start_workers()
            await self._start_all()
            self._make_requests()
            await self._set_up_workers()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def generations(self) -> int:
        """How many server processes each arm has, one after the other."""
        settings = self._settings
        is_fresh = settings.is_embedded and not settings.is_shared and not settings.find_max
        return settings.processes if is_fresh and len(self._arms) > 1 else 1

    @property
    def start_s(self) -> float:
        """About how long the servers of a later generation take to start: what was compiled is in the cache by then."""
        ready = [target.ready_s or 0.0 for target in self._targets.values()]
        return min(ready) * len(ready)

    async def start_next_generation(self) -> None:
        """Ends every server process and starts one for each arm, in another order. Raises TargetError."""
        await self._servers.aclose()
        await self._start_all()

    def target(self, arm: str) -> RunningTarget:
        """Returns what serves an arm now."""
        return self._targets[self._place(self._arms[arm])]

    def twins(self) -> dict[str, str]:
        """Returns the controls that run on the server of their baseline, by that baseline."""
        controls = {arm.name: arm.is_control_of for arm in self._arms.values() if arm.is_control_of is not None}
        return {base: name for name, base in controls.items() if self.target(base) is self.target(name)}

    def workers_for(self, target: RunningTarget) -> Sequence[WorkerProcess | RemoteWorker]:
        """Returns the workers that load a target."""
        return target.own_workers or self._workers

    def ceiling(self, arm: str) -> Ceiling | None:
        """Returns what the generator can send of this run's requests in an arm's protocol; None where that was not
        measured."""
        return self._ceilings.get(self._protocol(arm))

    async def outputs(self, name: str, requests: int, most_bytes: int | None = None) -> list[list[Array]]:
        """Returns an arm's outputs for its first `requests`, or as many as fit in `most_bytes`. Raises TargetError."""
        target = self.target(name)
        return await self.workers_for(target)[0].calls.outputs(name, target.addresses, requests, most_bytes)

    async def learn(self, name: str, references: Sequence[Reference]) -> None:
        """Has an arm's answers under load compared with these for its first requests."""
        for worker in self.workers_for(self.target(name)):
            await worker.calls.generator.learn(name, references)

    def infos(self, arm: str) -> tuple[ModelInfo, ...]:
        """Returns how an arm's target describes its models."""
        return tuple(self.target(arm).models[name] for name in self._arms[arm].served)

    def _place(self, arm: Arm) -> str:
        """Returns what arms that are served by the same processes have in common."""
        if self._settings.is_embedded or self._settings.is_in_process:
            return "all" if self._settings.is_shared else arm.name
        return arm.target

    async def _start_all(self) -> None:
        places: dict[str, list[Arm]] = {}
        for arm in self._arms.values():
            places.setdefault(self._place(arm), []).append(arm)
        order = random.Random(f"{self._settings.seed} {self._started}").sample(list(places), len(places))
        # One server after the other, since each times its programs while it warms up.
        for place in order:
            if self._cache is not None:
                embedded.forget_costs(self._cache)
            self._targets[place] = target = await self._start_target(places[place], self._servers)
            self._started += 1
            self._record(target.line())

    async def _start_target(self, own: Sequence[Arm], stack: contextlib.AsyncExitStack) -> RunningTarget:
        settings = self._settings
        arms = tuple(own)
        models = list(dict.fromkeys(name for arm in own for name in arm.served))
        if settings.targets == (NULL,):
            server = await stack.enter_async_context(ceilings.null_server(settings))
            return RunningTarget(
                self._started, arms, (server.address,), pid=server.pid, models={NULL: ceilings.null_info(settings)}
            )
        if settings.is_remote:
            return await running_targets.of_targets(
                self._started,
                arms,
                arms[0].targets,
                models,
                http_address=settings.target_http,
                transport=settings.transport,
            )
        served = tuple(dict.fromkeys(arm.mode for arm in own))
        if settings.config is None:
            config = configuration([name for name in settings.models if served_name(name) in models], served)
        else:
            config = await asyncio.to_thread(narrowed, settings.config, models, served)
        if self._cache is not None:
            config = with_cache(config, self._cache)
        if settings.is_in_process:
            self._progress.say(f"compiling {', '.join(models)} ({', '.join(arm.mode for arm in own)})")
            worker = await stack.enter_async_context(WorkerProcess())
            described = await worker.calls.load(config)
            return RunningTarget(
                self._started,
                arms,
                pid=worker.pid,
                models=described.models,
                ledger=described.ledger,
                ready_s=described.ready_s,
                own_workers=(worker,),
            )
        self._progress.say(f"starting a server for {', '.join(arm.name for arm in own)}")
        server = self._make_server(
            config,
            start_timeout_s=settings.start_timeout_s,
            on_output=self._progress.show,
        )
        await stack.enter_async_context(server)
        self._progress.say(f"server is ready at {server.address} after {server.ready_s:.1f} s")
        return await running_targets.of_server(self._started, arms, server, models)

    def _make_requests(self) -> None:
        settings = self._settings
        alike: dict[tuple[str, str], list[Arm]] = {}
        for arm in self._arms.values():
            alike.setdefault((arm.model, arm.target), []).append(arm)
        for own in alike.values():
            infos, modes = self.infos(own[0].name), tuple(dict.fromkeys(arm.mode for arm in own))
            content = make_content(settings, infos, modes)
            if settings.is_remote:
                content = content.rewritten(protocol_of(own[0].targets[0]).encode, infos)
            for arm in own:
                self.contents[arm.name] = content
                self.requests[arm.name] = content.requests[arm.mode]

    async def _start_workers(self) -> None:
        settings = self._settings
        if settings.is_in_process:
            return
        if not settings.has_generators:
            number = settings.workers or workers.choose_number(environment.cores(), settings.most_slots)
            self._workers = [await self._stack.enter_async_context(WorkerProcess()) for _ in range(number)]
            return
        self._workers, machines = await remote.start_workers(
            settings.generators,
            settings.generator_key,
            self._stack,
            number=settings.workers,
            slots=settings.most_slots,
        )
        for line, machine in machines:
            for arm in self._arms.values():
                remote.check_reach(line.address, machine, arm.targets)
            self._record(line)
            self._progress.say(f"generator {line.address} is {line.machine}; processes that send: {line.workers}")

    async def _set_up_workers(self) -> None:
        settings = self._settings
        models = {name: self.infos(name) for name in self._arms}
        seed = settings.sample_seed if settings.draws_samples else None
        if settings.is_in_process:
            for target in self._targets.values():
                own = {arm.name: self.requests[arm.name] for arm in target.arms}
                setup = Setup(models, own, settings.deadline_s, sample_seed=seed, is_distinct=settings.is_distinct)
                await setups.set_up(target.own_workers, setup)
            return
        # The first requests in each protocol, sent to a server that does nothing, are the generator's ceiling.
        protocols = {self._protocol(arm): arm for arm in reversed(self._arms)}
        requests = dict(self.requests)
        for protocol, arm in protocols.items():
            models[ceilings.arm_of(protocol)] = (ceilings.null_info(settings),) * len(models[arm])
            requests[ceilings.arm_of(protocol)] = requests[arm]
        setup = Setup(models, requests, settings.deadline_s, sample_seed=seed, is_distinct=settings.is_distinct)
        await setups.set_up(self._workers, setup)
        # The server that does nothing listens on this machine alone.
        if settings.targets != (NULL,) and not settings.has_generators:
            async with ceilings.null_server(settings) as server:
                for protocol in reversed(protocols):
                    self._ceilings[protocol] = found = await ceilings.measure(protocol, server, self._workers)
                    over = f" over {protocol}://" if protocol else ""
                    busy = f"; others used {found.others:.0%} of the processors meanwhile" if found.others else ""
                    can = f"the load generator can send {found.per_s:,.0f} such requests a second"
                    self._progress.say(f"{can}{over}{busy}")

    def _protocol(self, arm: str) -> str:
        protocol = Address.parse(self._arms[arm].targets[0]).protocol if self._settings.is_remote else ""
        return "" if protocol == FLEET else protocol
