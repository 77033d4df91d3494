"""A whole load test: its plan, its run, and its record."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from xlaserve_loadtest.analysis.compare import baselines
from xlaserve_loadtest.analysis.samples import label
from xlaserve_loadtest.record.lines import SUFFIX, End, Header, Status
from xlaserve_loadtest.record.run_file import RunWriter
from xlaserve_loadtest.run import accuracy_log, crew, environment, fleet, usage
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.equality_run import compare_models, incomparable
from xlaserve_loadtest.run.fleet import Fleet
from xlaserve_loadtest.run.highest_rate import RateSearch
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.recorder import Recorder, load_line
from xlaserve_loadtest.schedule import arms as arms_of
from xlaserve_loadtest.schedule import arrivals, plan, steady
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, Profile, Replay
from xlaserve_loadtest.schedule.payload import PayloadError, Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.settings import Settings
from xlaserve_loadtest.targets.embedded import EmbeddedServer
from xlaserve_loadtest.targets.target import Array, TargetError


class Session:
    """One load test; what was written is kept, however it ends."""

    def __init__(
        self, settings: Settings, progress: Progress, *, make_server: Callable[..., EmbeddedServer] = EmbeddedServer
    ) -> None:
        self.path: Path | None = None
        """Path of the run file, once there is one."""
        self.is_complete = False
        self.interrupted = False
        self._settings = settings
        self._progress = progress
        self._make_server = make_server
        self._silent: set[str] = set()
        self._exit_report = ""

    @property
    def blocks(self) -> int:
        """How many blocks were written."""
        return self._recorder.blocks if self.path else 0

    async def run(self, folder: Path, command: Sequence[str]) -> None:
        """Runs to the end; may be cancelled at any time, which ends it cleanly.

        Raises TargetError when there is nothing to measure, and PayloadError when there is nothing to send.
        """
        settings, started_at = self._settings, datetime.now(UTC)
        arms = await fleet.name_arms(settings)
        header = Header(
            started_at=started_at.isoformat(timespec="seconds"),
            command=tuple(command),
            configuration=settings.document(),
            seed=settings.seed,
            scenario=settings.scenario,
            baseline=arms_of.choose_baseline(arms, settings.baseline),
            arms=tuple(arms),
            environment=environment.describe(),
        )
        if settings.has_control and not settings.find_max:
            arms = arms_of.with_controls(arms, set(baselines(header).values()))
        models = list(dict.fromkeys(arm.model for arm in arms))
        self.path = settings.record or _free_path(folder, models, settings, started_at)
        with RunWriter(self.path) as writer:
            self._recorder = Recorder(writer)
            self._recorder.write(header := replace(header, arms=tuple(arms)))
            await self._run_to_the_end(header)

    async def _run_to_the_end(self, header: Header) -> None:
        reason = ""
        try:
            async with Fleet(
                self._settings,
                header.arms,
                self._progress,
                on_server=self._recorder.write,
                make_server=self._make_server,
            ) as self._fleet:
                if self._settings.equality_images:
                    await self._check_equality(header)
                if self._settings.writes_accuracy_log:
                    await self._write_accuracy_logs([arm.name for arm in header.arms if arm.is_control_of is None])
                await self._measure([arm.name for arm in header.arms])
        except asyncio.CancelledError:
            reason = self._progress.watch.reason
            self.interrupted = not reason
        except (TargetError, PayloadError) as error:
            reason = str(error)
            raise
        finally:
            if self._silent:
                reason = reason or f"stopped answering: {', '.join(sorted(self._silent))}"
            reason = self._exit_report or reason or ("interrupted" if self.interrupted else "")
            self.is_complete = not reason
            self._recorder.end(End(self.interrupted, self.is_complete, reason))

    async def _check_equality(self, header: Header) -> None:
        controls = {arm.name for arm in header.arms if arm.is_control_of is not None}
        of_base: dict[str, list[list[Array]]] = {}
        for arm, base in baselines(header).items():
            if arm in controls:
                continue
            if why := incomparable(self._fleet.infos(arm), self._fleet.infos(base)):
                text = f"The outputs of {arm} and {base} can't be compared: {why}."
                self._recorder.event(time.monotonic_ns(), "note", text)
                continue
            requests = _covering(self._fleet.requests[base], self._settings.equality_images)
            try:
                if base not in of_base:
                    of_base[base] = await self._fleet.outputs(base, requests)
                outputs = await self._fleet.outputs(arm, requests)
            except TargetError as error:
                text = f"{arm}: outputs could not be compared with {base}: {error}"
                self._recorder.event(time.monotonic_ns(), "error", text)
            else:
                own = next(one for one in header.arms if one.name == arm)
                for found in compare_models(own, base, self._fleet.requests[arm], outputs, of_base[base]):
                    self._recorder.write(found)

    async def _write_accuracy_logs(self, names: Sequence[str]) -> None:
        assert self.path is not None
        for name in names:
            path = await accuracy_log.write_log(self.path, name, self._fleet.requests[name], self._fleet.outputs)
            self._progress.say(f"{name}: outputs of every image are in {path}")

    async def _measure(self, names: Sequence[str]) -> None:
        settings = self._settings
        if settings.find_max:
            await RateSearch(settings, self._run_block, self._progress, self._recorder).run(names)
            return
        stretches: list[tuple[BlockPlan, ...]] = []
        generations = self._fleet.generations
        for _ in range(generations):
            for load in settings.loads:
                first_round = sum(map(plan.rounds_of, stretches))
                stretches.append(_blocks(load, names, settings, first_round=first_round, generations=generations))
        first = stretches[0][0]
        if settings.save_arrivals and not isinstance(first.load, ClosedLoop):
            seed = (self._arrival_seed(first), arrivals.MEASURED_PART)
            arrivals.write(settings.save_arrivals, arrivals.schedule(first.load, first.duration_s, seed))
        start_s = self._fleet.start_s
        whole_s = _length_s(stretches) + (generations - 1) * start_s
        starting = f", of which starting servers {plan.lasting((generations - 1) * start_s)}" * (generations > 1)
        sooner = ", less where everything is steady sooner" if settings.ends_when_steady else ""
        self._progress.say(f"measuring {', '.join(names)}: about {plan.lasting(whole_s)}{starting}{sooner}")
        for position, blocks in enumerate(stretches):
            generation, is_next = divmod(position, len(settings.loads))
            if generation and not is_next:
                await self._fleet.start_next_generation()
            self._recorder.windows.clear()
            rest_s = _length_s(stretches[position + 1 :]) + (generations - 1 - generation) * start_s
            await self._run_blocks(blocks, rest_s)

    async def _run_blocks(self, blocks: Sequence[BlockPlan], rest_s: float) -> None:
        """Runs the blocks of one load, leaving out arms of which nothing was answered in a block."""
        for number, block in enumerate(blocks, start=1):
            if block.arm in self._silent:
                continue
            left_s = rest_s + sum(map(plan.length_s, blocks[number - 1 :]))
            self._progress.arm(f"{block.arm}: block {number} of {len(blocks)}", left_s)
            is_last = all(later.arm != block.arm for later in blocks[number:])
            outcome = await self._run_block(block, is_last=is_last)
            if not (outcome.rows["status"] == Status.OK).any():
                self._silent.add(block.arm)
            if number < len(blocks) and blocks[number].round != block.round and self._may_end():
                text = f"ended before its time, after {number} of {len(blocks)} blocks: every arm was steady"
                self._recorder.event(outcome.end_ns, "note", text)
                return

    def _may_end(self) -> bool:
        windows = [own for arm, own in self._recorder.windows.items() if arm not in self._silent]
        return self._settings.ends_when_steady and bool(windows) and all(map(steady.may_end, windows))

    async def _run_block(self, block: BlockPlan, *, is_last: bool = False) -> Outcome:
        """Runs a block and writes it, and then raises CancelledError where it was interrupted."""
        target = self._fleet.target(block.arm)
        workers = self._fleet.workers_for(target)
        shares = crew.tasks(
            block,
            target.addresses,
            len(workers),
            seed=self._arrival_seed(block),
            max_in_flight=self._settings.max_in_flight,
        )
        models = target.models_of(block.arm)
        before = await usage.counts(target.http_address, models)
        use = usage.Usage(target.pid)
        images_per_request = str(self._fleet.mixes[block.arm])
        self._progress.watch.begin(block.arm, label(load_line(block.load, images_per_request)))
        with use.looking():
            outcome = await crew.run_block(
                block,
                [worker.generator for worker in workers],
                shares,
                end_when_steady=self._settings.ends_when_steady and block.role == "measure" and block.round is None,
                on_live=self._progress.live,
            )
        used = use.result()
        after = await usage.counts(target.http_address, models)
        self._recorder.block(
            block,
            outcome,
            images_per_request=images_per_request,
            server=target.id,
            workers=len(workers),
            ceiling_per_s=self._fleet.ceiling_per_s,
            use=used,
            counters=usage.change(before, after),
            is_last=is_last,
        )
        if target.process and not self._exit_report and (end := target.process.exit_report()):
            self._exit_report = end
            self._recorder.event(outcome.end_ns, "error", end)
        if outcome.interrupted:
            raise asyncio.CancelledError
        return outcome

    def _arrival_seed(self, block: BlockPlan) -> int:
        # The blocks of a round get the same arrivals: arms differ in nothing else. Runs of a search are independent.
        number = self._recorder.blocks if block.role in ("search", "confirm") else block.round or 0
        return self._settings.schedule_seed * 1_000_003 + number


def _blocks(
    load: Load, names: Sequence[str], settings: Settings, *, first_round: int, generations: int
) -> tuple[BlockPlan, ...]:
    """Returns the blocks of one generation of servers under one load."""
    duration_s, rounds = settings.duration_s / generations, None
    min_rounds = math.ceil(plan.MIN_ROUNDS / generations)
    if isinstance(load, Replay | Profile):
        duration_s = min(settings.duration_s, load.duration_s()) if isinstance(load, Replay) else load.duration_s()
        if len(names) > 1:
            # Each block goes through all of it.
            rounds = min_rounds
            duration_s *= 2 * rounds
    return plan.mirrored(
        names,
        load,
        duration_s=duration_s,
        warmup_s=settings.warmup_s,
        seed=settings.seed,
        first_round=first_round,
        rounds=rounds,
        min_rounds=min_rounds,
    )


def _length_s(stretches: Sequence[Sequence[BlockPlan]]) -> float:
    return sum(plan.length_s(block) for blocks in stretches for block in blocks)


def _covering(requests: Sequence[Request], images: int) -> int:
    """Returns how many requests it takes to send that many images."""
    sent = accumulate(request.images for request in requests)
    return next((number for number, total in enumerate(sent, start=1) if total >= images), len(requests))


def _free_path(folder: Path, models: Sequence[str], settings: Settings, started_at: datetime) -> Path:
    """Returns the path of a new, empty file; makes its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    what = settings.scenario or ("find-max" if settings.find_max else "run")
    subject = models[0] if len(models) == 1 else f"{len(models)}-models"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{subject}-{what}-{started_at:%Y%m%dT%H%M%SZ}")
    path = folder / f"{name}{SUFFIX}"
    number = 1
    while True:
        # Taken at once: another run may begin in the same second.
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            path = folder / f"{name}-{number}{SUFFIX}"
        else:
            return path
