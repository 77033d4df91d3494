"""A whole load test: its plan, its run, and its record."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import numpy as np

from xlaserve_loadtest.analysis.compare import baselines
from xlaserve_loadtest.analysis.samples import label
from xlaserve_loadtest.record.lines import Arm, End, Header
from xlaserve_loadtest.record.requests import ANSWERED, in_words
from xlaserve_loadtest.record.run_file import RunWriter, new_file
from xlaserve_loadtest.run import crew, environment, fleet, usage
from xlaserve_loadtest.run.alone import ask_alone
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.equality_run import compare_models, incomparable, not_compared
from xlaserve_loadtest.run.fleet import Fleet
from xlaserve_loadtest.run.highest_rate import RateSearch
from xlaserve_loadtest.run.others import Others
from xlaserve_loadtest.run.progress import Progress
from xlaserve_loadtest.run.recorder import Recorder, load_line
from xlaserve_loadtest.schedule import arms as arms_of
from xlaserve_loadtest.schedule import arrivals, plan, steady, trace
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load
from xlaserve_loadtest.schedule.payload import PayloadError
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.settings import NULL, Settings
from xlaserve_loadtest.targets.embedded import EmbeddedServer
from xlaserve_loadtest.targets.target import TargetError


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
        self._silent: dict[str, str] = {}
        """How the requests of each arm failed that was given up."""
        self._pace = plan.Pace()
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
        arms = await fleet.name_arms(settings, self._progress.say)
        header = Header(
            started_at=started_at.isoformat(timespec="seconds"),
            command=tuple(command),
            configuration=settings.document(),
            seed=settings.seed,
            scenario=settings.scenario,
            baseline=_baseline(arms, settings),
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
        reason, began_s = "", time.monotonic()
        try:
            async with Fleet(
                self._settings,
                header.arms,
                self._progress,
                record=self._recorder.write,
                make_server=self._make_server,
            ) as self._fleet:
                if self._settings.equality_images and self._settings.targets != (NULL,):
                    await self._check_equality(header)
                await self._measure([arm.name for arm in header.arms], time.monotonic() - began_s)
        except asyncio.CancelledError:
            reason = self._progress.watch.reason
            self.interrupted = not reason
        except (TargetError, PayloadError) as error:
            reason = str(error)
            raise
        finally:
            if self._silent:
                silent = ", ".join(f"{arm} ({failures})" for arm, failures in sorted(self._silent.items()))
                reason = reason or f"every request failed in the last block of {silent}"
            reason = self._exit_report or reason or ("interrupted" if self.interrupted else "")
            self.is_complete = not reason
            self._recorder.end(End(self.interrupted, self.is_complete, reason))

    async def _check_equality(self, header: Header) -> None:
        alone = await ask_alone(self._fleet, header, self._settings.equality_images, self._recorder)
        for arm in header.arms:
            base = baselines(header).get(arm.name)
            if base is None or arm.is_control_of is not None:
                continue
            why = incomparable(self._fleet.infos(arm.name), self._fleet.infos(base))
            if not why and (silent := [name for name in (arm.name, base) if not any(alone.get(name, ()))]):
                why = f"there are no outputs of {' and '.join(silent)} for requests that were sent alone"
            if why:
                self._recorder.write(not_compared(arm.name, base, why))
                continue
            requests = self._fleet.requests[arm.name]
            for found in compare_models(arm, base, requests, alone[arm.name], alone[base]):
                self._recorder.write(found)

    async def _measure(self, names: Sequence[str], starting_s: float) -> None:
        settings = self._settings
        if settings.find_max:
            await RateSearch(settings, self._run_block, self._progress, self._recorder).run(names)
            return
        stretches: list[tuple[BlockPlan, ...]] = []
        generations = self._fleet.generations
        for _ in range(generations):
            for load in settings.loads:
                first_round = sum(map(plan.rounds_of, stretches))
                stretches.append(
                    _blocks(
                        load,
                        names,
                        settings,
                        first_round=first_round,
                        generations=generations,
                        twins=self._fleet.twins(),
                    )
                )
        self._save_arrivals(stretches[0][0])
        self._announce(names, stretches, starting_s)
        for position, blocks in enumerate(stretches):
            generation, is_next = divmod(position, len(settings.loads))
            if generation and not is_next:
                began_s = time.monotonic()
                await self._fleet.start_next_generation()
                self._pace.starts_s.append(time.monotonic() - began_s)
            self._recorder.windows.clear()
            await self._run_blocks(blocks, list(chain(*stretches[position + 1 :])), generations - 1 - generation)

    def _announce(self, names: Sequence[str], stretches: Sequence[Sequence[BlockPlan]], starting_s: float) -> None:
        settings, starts = self._settings, self._fleet.generations - 1
        if settings.replay:
            self._progress.say(f"replaying {trace.described(settings.replay.document())}")
        start_s = starts * self._pace.start_s(self._fleet.start_s)
        starting = f", of which starting servers {plan.lasting(start_s)}" * (starts > 0)
        may_end = settings.ends_when_steady and (
            len(names) > 1 or any(load.duration_s() is None for load in settings.loads)
        )
        sooner = ", less where everything is steady sooner" * may_end
        whole = plan.lasting(self._pace.blocks_s(list(chain(*stretches))) + start_s)
        ready = f"; getting ready took {plan.lasting(starting_s)}"
        self._progress.say(f"measuring {', '.join(names)}: about {whole}{starting}{sooner}{ready}")

    def _save_arrivals(self, block: BlockPlan) -> None:
        path, load = self._settings.save_arrivals, block.load
        if path is None or isinstance(load, ClosedLoop):
            return
        seed = (self._seed(block, self._settings.schedule_seed), arrivals.MEASURED_PART)
        due_ns = arrivals.schedule(load, block.duration_s, seed)
        trace.write(path, due_ns, self._fleet.contents[block.arm].kinds, self._settings.models)

    async def _run_blocks(self, blocks: Sequence[BlockPlan], rest: Sequence[BlockPlan], starts: int) -> None:
        """Runs the blocks of one load, leaving out arms whose requests all failed for SILENCE_S, or in all blocks.

        `rest` are the blocks that come after them, for which servers are started so many times.
        """
        failing_s: defaultdict[str, float] = defaultdict(float)
        answering: set[str] = set()
        for number, block in enumerate(blocks, start=1):
            if block.arm in self._silent:
                continue
            left_s = self._pace.blocks_s([*blocks[number - 1 :], *rest])
            left_s += starts * self._pace.start_s(self._fleet.start_s)
            self._progress.arm(f"{block.arm}: block {number} of {len(blocks)}", left_s)
            is_last = all(later.arm != block.arm for later in blocks[number:])
            began_s = time.monotonic()
            outcome = await self._run_block(block, is_last=is_last)
            self._pace.add(block, time.monotonic() - began_s)
            if np.isin(outcome.rows["status"], ANSWERED).any():
                answering.add(block.arm)
                failing_s[block.arm] = 0.0
            elif outcome.failures:
                failing_s[block.arm] += (outcome.end_ns - outcome.start_ns) / 1e9
                if failing_s[block.arm] >= crew.SILENCE_S or (is_last and block.arm not in answering):
                    self._silent[block.arm] = ", ".join(in_words(status.name) for status in outcome.failures)
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
            seed=self._seed(block, self._settings.schedule_seed),
            max_in_flight=self._settings.max_in_flight,
            sample_seed=self._seed(block, self._settings.sample_seed) if self._settings.draws_samples else None,
        )
        models = target.models_of(block.arm)
        before = await usage.counts(target.http_address, models)
        use = usage.Usage(target.pid)
        others = None if self._settings.has_generators or target.is_hidden else Others(target.pid)
        images_per_request = self._fleet.contents[block.arm].images_per_request
        self._progress.watch.begin(block.arm, label(load_line(block.load, images_per_request)))
        with use.looking():
            outcome = await crew.run_block(
                block,
                [worker.generator for worker in workers],
                shares,
                end_when_steady=self._settings.ends_when_steady
                and block.role == "measure"
                and block.round is None
                and block.load.duration_s() is None,
                on_live=self._progress.live,
            )
        used, others_share = use.result(), others.share() if others else None
        after = await usage.counts(target.http_address, models)
        self._recorder.block(
            block,
            outcome,
            images_per_request=images_per_request,
            server=target.id,
            workers=len(workers),
            ceiling=self._fleet.ceiling(block.arm),
            use=used,
            counters=usage.change(before, after),
            others=others_share,
            is_last=is_last,
        )
        if target.process and not self._exit_report and (end := target.process.exit_report()):
            self._exit_report = end
            self._recorder.event(outcome.end_ns, "error", end)
        if outcome.interrupted:
            raise asyncio.CancelledError
        return outcome

    def _seed(self, block: BlockPlan, seed: int) -> int:
        # The blocks of a round get the same arrivals: arms differ in nothing else. Runs of a search are independent.
        number = self._recorder.blocks if block.role in ("search", "confirm") else block.round or 0
        return seed * 1_000_003 + number


def _blocks(
    load: Load,
    names: Sequence[str],
    settings: Settings,
    *,
    first_round: int,
    generations: int,
    twins: Mapping[str, str],
) -> tuple[BlockPlan, ...]:
    """Returns the blocks of one generation of servers under one load."""
    return plan.mirrored(
        names,
        load,
        duration_s=settings.duration_s / generations,
        warmup_s=settings.warmup_s,
        seed=settings.seed,
        first_round=first_round,
        min_rounds=math.ceil(plan.MIN_ROUNDS / generations),
        block_s=settings.block_s,
        twins=twins,
    )


def _baseline(arms: Sequence[Arm], settings: Settings) -> str | None:
    """Returns the arm that the others are compared with. Raises TargetError where the named one is not measured."""
    named = settings.baseline
    found = arms_of.choose_baseline(arms, named or (settings.arms[0].name if settings.arms else "graph"))
    if named and found is None:
        measured = ", ".join(arm.name for arm in arms)
        raise TargetError(f"--baseline: expected one of several arms that are measured ({measured}), got {named}")
    return found


def _free_path(folder: Path, models: Sequence[str], settings: Settings, started_at: datetime) -> Path:
    """Returns the path of a new, empty file; makes its folder."""
    what = settings.scenario or ("find-max" if settings.find_max else "run")
    subject = models[0] if len(models) == 1 else f"{len(models)}-models"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{subject}-{what}-{started_at:%Y%m%dT%H%M%SZ}")
    return new_file(folder, name)
