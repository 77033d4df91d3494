"""Checks how the options of `loadtest` fit together, and makes settings of them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from xlaserve_loadtest import option_uses, transport_options
from xlaserve_loadtest.addresses import CLEAR, Address
from xlaserve_loadtest.analysis.mlperf import SCENARIOS
from xlaserve_loadtest.options import DEADLINE_S, DEFAULT_MODELS, EQUALITY_IMAGES, PROCESSES, START_TIMEOUT_S
from xlaserve_loadtest.record.requests import MAX_MODELS
from xlaserve_loadtest.run.crew import MAX_IN_FLIGHT
from xlaserve_loadtest.run.handshake import read_key
from xlaserve_loadtest.schedule.arms import ALL, MODES, USUAL_MODES
from xlaserve_loadtest.schedule.arrivals import ArrivalsError, ClosedLoop, Load, OpenLoop, Process, Replay
from xlaserve_loadtest.schedule.mix import Mix, Size, draw_kinds
from xlaserve_loadtest.schedule.search import COVERED_S, Slo
from xlaserve_loadtest.settings import IN_PROCESS, NULL, Settings
from xlaserve_loadtest.targets.channel import Transport

SCENARIO_IMAGES: Final = {name: scenario.images for name, scenario in SCENARIOS.items()}
"""Images of a query in each scenario of MLPerf Inference; None: as many as the largest bucket holds, as its one query
is sent in pieces."""
DURATION_S: Final = 5.0
OFFLINE_SLOTS: Final = 16
"""Requests of the largest bucket under way: enough that no lane waits, few enough for the queues."""


def settings_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """Checks how the options fit together, and returns the settings. Ends with status 2 on a wrong command line."""
    if options.replay and options.duration:
        try:
            options.replay = options.replay.until(options.duration)
        except ArrivalsError as error:
            parser.error(f"--replay: {error}")
    targets = (IN_PROCESS,) if options.in_process else options.target
    transport = transport_options.transport(options, parser)
    _check(options, parser, transport)
    option_uses.check(options, parser)
    slo = Slo(99.0, options.slo_ms) if options.slo_ms else options.slo
    mix = options.images_per_request or Mix({1: 1.0})
    if images := SCENARIO_IMAGES.get(options.scenario):
        mix = Mix({images: 1.0})
    is_search = option_uses.is_search(options)
    models, loads = _models(options), _loads(options)
    shares = tuple(options.mix.shares.values()) if options.mix else ()
    duration_s = options.duration or (COVERED_S if is_search else DURATION_S)
    if options.replay:
        try:
            replay = _replay(options, models, mix)
        except ArrivalsError as error:
            parser.error(f"--replay: {error}")
        loads, duration_s = (replay,), replay.duration_s()
        shares = _shares(replay, models) if options.mix or options.replay.models != (None,) else ()
    return Settings(
        models=models,
        model_shares=shares,
        modes=options.mode,
        loads=loads,
        duration_s=duration_s,
        warmup_s=options.warmup,
        block_s=options.block,
        mix=mix,
        payload=options.payload or ("encoded" if _has_files(options) else "pixels"),
        images=options.images,
        sizes=tuple(options.size.shares) if options.size else (),
        size_shares=tuple(options.size.shares.values()) if options.size else (),
        is_distinct=options.distinct,
        inputs=tuple(dict(options.input).items()),
        shapes=tuple(dict(options.shape).items()),
        targets=targets,
        target_http=options.target_http,
        transport=transport,
        config=options.config,
        arms=tuple(options.arm),
        processes=options.processes or PROCESSES,
        is_shared=options.share_process,
        baseline=options.baseline,
        has_control=not options.no_control,
        workers=options.workers,
        generators=tuple(options.generator),
        generator_key=_generator_key(options, parser),
        max_in_flight=options.max_in_flight or MAX_IN_FLIGHT,
        # What a scenario reports needs a least number of requests, however steady they are.
        ends_when_steady=not options.full_duration and options.scenario is None,
        scenario=options.scenario,
        slo=slo,
        search_arrivals=options.arrivals or "poisson",
        find_max=is_search,
        equality_images=EQUALITY_IMAGES if options.equality_images is None else options.equality_images,
        save_arrivals=options.save_arrivals,
        record=options.record,
        seed=options.seed,
        schedule_seed=options.seed if options.schedule_seed is None else options.schedule_seed,
        sample_seed=options.seed if options.sample_seed is None else options.sample_seed,
        draws_samples=options.scenario is not None,
        deadline_s=options.deadline or DEADLINE_S,
        start_timeout_s=options.start_timeout or START_TIMEOUT_S,
    )


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser, transport: Transport) -> None:
    shapes = [
        f"--{name}" for name in ("concurrency", "rate", "profile", "replay") if getattr(options, name) is not None
    ]
    is_search = option_uses.is_search(options)
    fixed = shapes + ["--find-max"] * options.find_max + ["--scenario"] * bool(options.scenario)
    modes = MODES if options.mode == (ALL,) else options.mode or USUAL_MODES
    known = [arm.name for arm in options.arm] or modes
    named = options.replay.models if options.replay else (None,)
    trace, kinds = (options.replay.path, options.replay.kinds) if options.replay else (None, ())
    problems = {
        "--arm, --target and --in-process exclude each other": options.arm and (options.target or options.in_process),
        "--arm: each needs a name of its own": len({arm.name for arm in options.arm}) < len(options.arm),
        "--mode: an arm that is a server names its own, as in --arm NAME=ADDRESS,mode=M": options.arm and options.mode,
        "--model: one for all arms; name others as in --arm NAME=ADDRESS,model=NAME": options.arm
        and len(options.model) > 1,
        "--target and --in-process exclude each other": options.target and options.in_process,
        "--mix stands in place of --model": options.mix and options.model != DEFAULT_MODELS,
        "--mix: expected several models, as in NAME:0.7,OTHER:0.3; --model takes one": options.mix
        and len(options.mix.shares) < 2,
        "--mix: expected a target of several models, --target null has one": options.mix and NULL in options.target,
        f"{trace} names a model: --target null has one": named != (None,) and NULL in options.target,
        f"{trace} names models: expected --mix, or one --model": named != (None,)
        and not options.mix
        and len(options.model) > 1,
        f"{trace} names the model of each request: --mix and --model are of no use": None not in named
        and (options.mix or options.model not in (DEFAULT_MODELS, named)),
        f"{trace} names models: no --arm can have one of its own": named != (None,)
        and any(arm.model for arm in options.arm),
        f"expected up to {MAX_MODELS} models, got {len(_models(options))}": len(_models(options)) > MAX_MODELS,
        "--model: --target null has one of its own": NULL in options.target and options.model != DEFAULT_MODELS,
        "--model and --mix: every --arm names a model of its own": (options.mix or options.model != DEFAULT_MODELS)
        and options.arm
        and all(arm.model for arm in options.arm),
        f"{trace} names the images of each request: --images-per-request is of no use": options.images_per_request
        and kinds
        and all(kind.images for kind in kinds),
        f"{trace} names the size of each request: --size is of no use": options.size
        and kinds
        and all(kind.size for kind in kinds),
        f"{trace} names the file of each request: --images is of no use": options.images
        and kinds
        and all(kind.file for kind in kinds),
        "--target null stands alone": NULL in options.target and len(options.target) > 1,
        f"{' and '.join(fixed)} exclude each other": len(fixed) > 1,
        "--find-max needs --slo, and --scenario server --slo-ms": is_search and not (options.slo or options.slo_ms),
        "--abort-if: a search goes over the limit on purpose": is_search and options.abort_if,
        "--slo and --slo-ms exclude each other": options.slo and options.slo_ms,
        "--images-per-request: the scenario sets it": options.scenario and options.images_per_request,
        "--in-process takes pixels": options.in_process
        and (options.payload == "encoded" or (_has_files(options) and options.payload is None)),
        f"--mode: expected {', '.join(MODES)} or all, got {','.join(options.mode)}": not options.target
        and options.mode != (ALL,)
        and not set(options.mode) <= set(MODES),
        f"--baseline: expected {', '.join(known)}, got {options.baseline}": not options.target
        and options.baseline
        and option_uses.compares(options)
        and options.baseline not in known,
        "--tls and the options that begin so: http:// is in the clear; expected https://": transport.is_secure
        and any(Address.parse(one).protocol in CLEAR for one in option_uses.addresses(options)),
        "--input and --shape exclude --images, --size and --payload": (options.input or options.shape)
        and (options.images or options.size or options.payload),
        "--save-arrivals: expected one rate": options.save_arrivals and len(options.rate or ()) > 1,
        f"--save-arrivals: expected a file in the folder of {trace}, whose files it names": options.save_arrivals
        and options.replay
        and options.replay.has_files
        and options.save_arrivals.parent.resolve() != options.replay.path.parent.resolve(),
        "--generator: --in-process sends nothing, and --target null is on this machine": options.generator
        and (options.in_process or NULL in options.target),
        f"--target, --arm and --generator: expected up to {MAX_MODELS} addresses": max(
            len(options.target),
            len(options.generator),
            *(len(arm.addresses) for arm in options.arm),
        )
        > MAX_MODELS,
        "--generator: each is named once": len(set(options.generator)) < len(options.generator),
    }
    for problem, is_there in problems.items():
        if is_there:
            parser.error(problem)


def _generator_key(options: argparse.Namespace, parser: argparse.ArgumentParser) -> bytes:
    try:
        return read_key(options.generator_key) if options.generator else b""
    except ValueError as error:
        parser.error(str(error))


def _has_files(options: argparse.Namespace) -> bool:
    return bool(options.images or (options.replay and options.replay.has_files))


def _models(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the models of the run: those of requests that name none, and then those that a trace names."""
    own = tuple(options.mix.shares) if options.mix else options.model
    if not options.replay:
        return own
    named = options.replay.models
    return tuple(dict.fromkeys([*(own if None in named else ()), *filter(None, named)]))


def _replay(options: argparse.Namespace, models: Sequence[str], counts: Mix[int]) -> Replay:
    own = Mix(dict(enumerate(options.mix.shares.values() if options.mix else (1.0,))))
    sizes: Mix[Size | None] = options.size or Mix({None: 1.0})
    replay: Replay = options.replay.replay(models, draw_kinds(own, counts, sizes, None, options.seed))
    return replay


def _shares(replay: Replay, models: Sequence[str]) -> tuple[float, ...]:
    """Returns each model's share of the requests; none where there is one model."""
    counts = Counter(kind.model for kind in replay.sequence())
    return tuple(counts[index] / counts.total() for index in range(len(models))) if len(models) > 1 else ()


def _loads(options: argparse.Namespace) -> tuple[Load, ...]:
    if options.scenario == "offline":
        return (ClosedLoop(OFFLINE_SLOTS, is_offline=True),)
    if options.scenario in ("single-stream", "multi-stream"):
        return (ClosedLoop(1),)
    process: Process = options.arrivals or "poisson"
    burst = options.burst or 1
    if options.profile:
        return (replace(options.profile, process=process, burst=burst),)
    if options.rate:
        return tuple(OpenLoop(rate, process, end, burst) for rate, end in options.rate)
    return tuple(ClosedLoop(slots) for slots in options.concurrency or (16,))
