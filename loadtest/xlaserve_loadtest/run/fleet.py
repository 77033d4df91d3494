"""All processes of a load test: the targets, the workers that load them, and what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from xlaserve_loadtest.record.lines import Arm, Server
from xlaserve_loadtest.run import crew, environment, running_targets, workers
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.requests import make_requests
from xlaserve_loadtest.run.running_targets import RunningTarget
from xlaserve_loadtest.run.worker import Setup, Worker
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule import arms as arms_of
from xlaserve_loadtest.schedule.arrivals import ClosedLoop
from xlaserve_loadtest.schedule.mix import Mix
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.schedule.tensors import ANY, Tensor
from xlaserve_loadtest.settings import NULL, Settings
from xlaserve_loadtest.targets import embedded
from xlaserve_loadtest.targets.embedded import EmbeddedServer, configuration, narrowed, served_name, with_cache
from xlaserve_loadtest.targets.target import Array, ModelInfo, TargetError, describe

CEILING_S: Final = 0.5
CEILING_SLOTS: Final = 16
NULL_SIZE: Final = (224, 224)

_NULL_COMMAND: Final = (sys.executable, "-m", "xlaserve_loadtest.targets.null_server")
_CEILING: Final = "generator's ceiling"


async def name_arms(settings: Settings) -> list[Arm]:
    """Returns the arms to measure, without controls.

    Raises TargetError where the target does not offer them, or where servers of our own would refuse the models.
    """
    if settings.arms:
        return arms_of.name_servers(settings.arms, settings.models, settings.model_shares)
    shares = settings.model_shares
    if settings.targets == (NULL,):
        return arms_of.name_arms([NULL], [NULL], settings.target)
    if settings.is_remote:
        return arms_of.name_arms(settings.models, await _offered_modes(settings), settings.target, shares)
    modes = arms_of.MODES if settings.modes == (arms_of.ALL,) else settings.modes or arms_of.USUAL_MODES
    if settings.config is not None:
        return arms_of.name_arms(settings.models, modes, settings.target, shares)
    await asyncio.to_thread(embedded.check, settings.models, modes)
    return arms_of.name_arms([served_name(model) for model in settings.models], modes, settings.target, shares)


async def _offered_modes(settings: Settings) -> tuple[str, ...]:
    """Returns the modes to measure on running servers."""
    is_all = settings.modes == (arms_of.ALL,)
    if settings.modes and not is_all:
        return settings.modes
    info = await describe(settings.targets[0], settings.models[0], settings.transport)
    if is_all and not info.modes:
        raise TargetError(f"{settings.targets[0]} names no modes of {settings.models[0]}: leave out --mode")
    usual = tuple(mode for mode in arms_of.USUAL_MODES if mode in info.modes)
    return info.modes if is_all else usual or info.modes[:1] or (arms_of.AS_IT_IS,)


class Fleet:
    """`async with` starts everything, and ends it. Entering raises TargetError and PayloadError."""

    def __init__(
        self,
        settings: Settings,
        arms: Sequence[Arm],
        progress: Progress,
        *,
        on_server: Callable[[Server], None],
        make_server: Callable[..., EmbeddedServer] = EmbeddedServer,
    ) -> None:
        self.ceiling_per_s: float | None = None
        """Requests of this run that the generator can send each second; None where that was not measured."""
        self.mixes: dict[str, Mix[int]] = {}
        """Images per request, by arm."""
        self.requests: dict[str, Sequence[Request]] = {}
        """Requests to send, by arm."""
        self._settings = settings
        self._arms = {arm.name: arm for arm in arms}
        self._progress = progress
        self._on_server = on_server
        self._make_server = make_server
        self._stack = contextlib.AsyncExitStack()
        self._servers = contextlib.AsyncExitStack()
        self._cache: Path | None = None
        self._targets: dict[str, RunningTarget] = {}
        self._started = 0
        self._workers: tuple[WorkerProcess, ...] = ()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        try:
            if self.generations > 1:
                self._cache = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="loadtest-cache-")))
                self._progress.say(f"each arm has {self.generations} server processes, one after the other")
            self._stack.push_async_callback(self._servers.aclose)
            await self._start_all()
            self._make_requests()
            await self._start_workers()
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

    def workers_for(self, target: RunningTarget) -> tuple[Worker, ...]:
        """Returns the workers that load a target."""
        return tuple(process.calls for process in target.own_workers or self._workers)

    async def outputs(self, name: str, requests: int) -> list[list[Array]]:
        """Returns an arm's outputs for its first `requests`. Raises TargetError."""
        target = self.target(name)
        return await self.workers_for(target)[0].outputs(name, target.addresses, requests)

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
            self._on_server(target.line())

    async def _start_target(self, own: Sequence[Arm], stack: contextlib.AsyncExitStack) -> RunningTarget:
        settings = self._settings
        arms = tuple(own)
        models = list(dict.fromkeys(name for arm in own for name in arm.served))
        if settings.targets == (NULL,):
            server = await stack.enter_async_context(self._null_server())
            return RunningTarget(
                self._started, arms, (server.address,), pid=server.pid, models={NULL: _null_info(settings)}
            )
        if settings.is_remote:
            return await running_targets.of_targets(
                self._started,
                arms,
                arms[0].target.split(","),
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

    def _null_server(self) -> EmbeddedServer:
        return EmbeddedServer("", start_timeout_s=self._settings.start_timeout_s, command=_NULL_COMMAND)

    def _make_requests(self) -> None:
        settings = self._settings
        alike: dict[tuple[str, str], list[Arm]] = {}
        for arm in self._arms.values():
            alike.setdefault((arm.model, arm.target), []).append(arm)
        for own in alike.values():
            by_mode, mix = make_requests(
                settings, self.infos(own[0].name), tuple(dict.fromkeys(arm.mode for arm in own))
            )
            for arm in own:
                self.requests[arm.name] = by_mode[arm.mode]
                self.mixes[arm.name] = mix

    async def _start_workers(self) -> None:
        settings = self._settings
        models = {name: self.infos(name) for name in self._arms}
        seed = settings.sample_seed if settings.draws_samples else None
        if settings.is_in_process:
            for target in self._targets.values():
                own = {arm.name: self.requests[arm.name] for arm in target.arms}
                await target.own_workers[0].calls.setup(
                    Setup({name: models[name] for name in own}, own, settings.deadline_s, sample_seed=seed)
                )
            return
        number = settings.workers or workers.choose_number(environment.cores(), settings.most_slots)
        self._workers = tuple([await self._stack.enter_async_context(WorkerProcess()) for _ in range(number)])
        # The first arm's requests, sent to a server that does nothing, are the generator's ceiling.
        models[_CEILING] = (_null_info(settings),) * len(next(iter(models.values())))
        requests: Mapping[str, Sequence[Request]] = {**self.requests, _CEILING: next(iter(self.requests.values()))}
        setups = [Setup(models, requests, settings.deadline_s, index, seed) for index in range(number)]
        await asyncio.gather(*(worker.calls.setup(own) for worker, own in zip(self._workers, setups, strict=True)))
        if settings.targets != (NULL,):
            await self._find_ceiling()

    async def _find_ceiling(self) -> None:
        async with self._null_server() as server:
            block = BlockPlan(_CEILING, ClosedLoop(CEILING_SLOTS * len(self._workers)), CEILING_S / 5, CEILING_S)
            shares = crew.tasks(block, (server.address,), len(self._workers), seed=0, max_in_flight=1)
            outcome = await crew.run_block(block, [worker.calls.generator for worker in self._workers], shares)
        if outcome.interrupted:
            raise asyncio.CancelledError
        self.ceiling_per_s = len(outcome.answered) / CEILING_S
        self._progress.say(f"the load generator can send {self.ceiling_per_s:,.0f} such requests a second")


def _null_info(settings: Settings) -> ModelInfo:
    size = settings.sizes[0] if settings.sizes else NULL_SIZE
    return ModelInfo(NULL, size, (), {}, "null server", inputs=(Tensor("pixels", "UINT8", (ANY, *size, 3)),))
