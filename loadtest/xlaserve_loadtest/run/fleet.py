"""All processes of a load test: the targets, the workers that load them, and what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from xlaserve_loadtest.schedule.payload import Mix, Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.schedule.tensors import ANY, Tensor
from xlaserve_loadtest.settings import NULL, Settings
from xlaserve_loadtest.targets import embedded
from xlaserve_loadtest.targets.embedded import EmbeddedServer, configuration, narrowed, served_name
from xlaserve_loadtest.targets.target import Array, ModelInfo, TargetError, describe

CEILING_S: Final = 0.5
CEILING_SLOTS: Final = 16
NULL_SIZE: Final = (224, 224)

_NULL_COMMAND: Final = (sys.executable, "-m", "xlaserve_loadtest.targets.null_server")
_CEILING: Final = "generator's ceiling"


async def model_names(settings: Settings) -> list[str]:
    """Returns the names under which the targets serve the models."""
    if settings.targets == (NULL,):
        return [NULL]
    if settings.config is not None or settings.is_remote:
        return list(settings.models)
    return [served_name(model) for model in settings.models]


async def modes(settings: Settings, models: Sequence[str]) -> tuple[str, ...]:
    """Returns the modes to measure. Raises TargetError where the target does not offer them."""
    if settings.targets == (NULL,):
        return (NULL,)
    chosen, is_all = settings.modes, settings.modes == (arms_of.ALL,)
    if settings.is_remote and (is_all or not chosen):
        info = await describe(settings.targets[0], models[0], settings.transport)
        offered = tuple(filter(None, info.properties.get("modes", "").split(",")))
        if is_all and not offered:
            raise TargetError(f"{settings.targets[0]} does not say what modes {models[0]} has: name them with --mode")
        usual = tuple(mode for mode in arms_of.USUAL_MODES if mode in offered)
        return offered if is_all else usual or offered[:1] or (arms_of.AS_IT_IS,)
    if is_all:
        return arms_of.MODES
    return chosen or arms_of.USUAL_MODES


async def check(settings: Settings, modes: Sequence[str]) -> None:
    """Raises TargetError where servers of our own would refuse the models, before any is started."""
    if settings.config is None and not settings.is_remote and settings.targets != (NULL,):
        await asyncio.to_thread(embedded.check, settings.models, modes)


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
        self.mixes: dict[str, Mix] = {}
        """Images per request, by arm."""
        self.requests: dict[str, Sequence[Request]] = {}
        """Requests to send, by arm."""
        self._settings = settings
        self._arms = {arm.name: arm for arm in arms}
        self._progress = progress
        self._on_server = on_server
        self._make_server = make_server
        self._stack = contextlib.AsyncExitStack()
        self._targets: dict[str, RunningTarget] = {}
        self._started = 0
        self._workers: tuple[WorkerProcess, ...] = ()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        try:
            kinds: dict[str, list[Arm]] = {}
            for arm in self._arms.values():
                kinds.setdefault(self._kind(arm), []).append(arm)
            # One server after the other, since each times its programs while it warms up.
            for kind, own in kinds.items():
                self._targets[kind] = await self._start(own, self._stack)
            self._make_requests()
            await self._start_workers()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def target_for(self, name: str) -> AsyncIterator[RunningTarget]:
        """Yields the target of an arm; a fresh server process where blocks are isolated."""
        arm = self._arms[name]
        if not self._settings.is_isolated or self._settings.targets:
            yield self._targets[self._kind(arm)]
            return
        async with contextlib.AsyncExitStack() as stack:
            yield await self._start([arm], stack)

    def workers_for(self, target: RunningTarget) -> tuple[Worker, ...]:
        """Returns the workers that load a target."""
        return tuple(process.calls for process in target.own_workers or self._workers)

    async def outputs(self, name: str, requests: int) -> list[list[Array]]:
        """Returns an arm's outputs for its first `requests`. Raises TargetError."""
        target = self._targets[self._kind(self._arms[name])]
        return await self.workers_for(target)[0].outputs(name, target.addresses, requests)

    def _kind(self, arm: Arm) -> str:
        if self._settings.targets and not self._settings.is_in_process:
            return "target"
        return arms_of.process_kind(arm.mode, is_shared=self._settings.is_shared)

    async def _start(self, own: Sequence[Arm], stack: contextlib.AsyncExitStack) -> RunningTarget:
        target = await self._start_target(own, stack)
        self._started += 1
        self._on_server(target.line())
        return target

    async def _start_target(self, own: Sequence[Arm], stack: contextlib.AsyncExitStack) -> RunningTarget:
        settings = self._settings
        arms = tuple(own)
        models = list(dict.fromkeys(arm.model for arm in own))
        if settings.targets == (NULL,):
            server = await stack.enter_async_context(self._null_server())
            return RunningTarget(
                self._started, arms, (server.address,), pid=server.pid, models={NULL: _null_info(settings)}
            )
        if settings.is_remote:
            return await running_targets.of_targets(
                self._started,
                arms,
                settings.targets,
                models,
                http_address=settings.target_http,
                transport=settings.transport,
            )
        served = tuple(dict.fromkeys(arm.mode for arm in own))
        if settings.config is None:
            config = configuration([name for name in settings.models if served_name(name) in models], served)
        else:
            config = await asyncio.to_thread(narrowed, settings.config, models, served)
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
        self._progress.say(f"starting a server for {', '.join(models)} ({', '.join(arm.mode for arm in own)})")
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
        for model in dict.fromkeys(arm.model for arm in self._arms.values()):
            own = [arm for arm in self._arms.values() if arm.model == model]
            by_mode, mix = make_requests(settings, self._info(own[0]), tuple(dict.fromkeys(arm.mode for arm in own)))
            for arm in own:
                self.requests[arm.name] = by_mode[arm.mode]
                self.mixes[arm.name] = mix

    def _info(self, arm: Arm) -> ModelInfo:
        return self._targets[self._kind(arm)].models[arm.model]

    async def _start_workers(self) -> None:
        settings = self._settings
        models = {name: self._info(arm) for name, arm in self._arms.items()}
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
        models[_CEILING] = _null_info(settings)
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
