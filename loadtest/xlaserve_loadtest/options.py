"""The command line of `loadtest`: from words to `Settings`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from xlaserve_loadtest import transport_options
from xlaserve_loadtest.analysis.mlperf import SCENARIOS
from xlaserve_loadtest.parser import Parser, checked, counts, names, number_over
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.run.crew import MAX_IN_FLIGHT
from xlaserve_loadtest.run.watch import parse_abort
from xlaserve_loadtest.schedule import arrivals, payload, tensors
from xlaserve_loadtest.schedule.arms import ALL, MODES, USUAL_MODES, ServerArm
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, OpenLoop, Process, Profile
from xlaserve_loadtest.schedule.mix import Mix, parse_counts, parse_models, parse_sizes
from xlaserve_loadtest.schedule.search import Slo
from xlaserve_loadtest.settings import IN_PROCESS, NULL, Settings
from xlaserve_loadtest.targets.channel import PLAIN, Transport

FOLDER: Final = Path("loadtest-results")
SCENARIO_IMAGES: Final = {name: scenario.images for name, scenario in SCENARIOS.items()}
"""Images of a query in each scenario of MLPerf Inference; None: as many as the largest bucket holds, as its one query
is sent in pieces."""
OFFLINE_SLOTS: Final = 16
"""Requests of the largest bucket under way: enough that no lane waits, few enough for the queues."""

DEFAULT_MODELS: Final = ("digits",)
MAX_PORT: Final = 65_535

_MAX_WORKERS: Final = 256
_POSITIVE: Final = number_over(float, 0.0)
_COUNT: Final = number_over(int, 0)
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)(?:\.\.(\d+(?:\.\d+)?))?")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command, without its subcommands."""
    parser = Parser(
        prog="loadtest",
        description="Measures images/s and latency of models in several modes, in interleaved blocks, and says which "
        "is faster. Without --target it starts servers of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version("xlaserve"))
    _add_arms(parser)
    _add_target(parser)
    transport_options.add(parser)
    _add_load(parser)
    _add_payload(parser)
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="folder for the run file and its page")
    kept.add_argument("--record", type=Path, metavar="FILE", help="name the run file")
    _add_live(parser)
    report.add_options(parser)
    return parser


def _add_arms(parser: argparse.ArgumentParser) -> None:
    arms = parser.add_argument_group("what is measured")
    arms.add_argument(
        "--mode",
        type=names,
        default=(),
        metavar="M,M",
        help=f"of {', '.join(MODES)}; or {ALL} ({','.join(USUAL_MODES)}; a server that names no modes: as it is)",
    )
    arms.add_argument(
        "--model",
        type=names,
        default=DEFAULT_MODELS,
        metavar="NAME,NAME",
        help="served names; without a target sources",
    )
    arms.add_argument(
        "--mix",
        type=checked(parse_models),
        metavar="NAME:P,NAME:P",
        help="in place of --model: several models together, each with its share of requests",
    )
    arms.add_argument(
        "--arm",
        type=checked(ServerArm.parse),
        action="append",
        default=[],
        metavar="NAME=HOST:PORT",
        help="compare running servers instead of modes: NAME=HOST:PORT[,HOST:PORT][,model=MODEL][,mode=M]; repeatable",
    )
    arms.add_argument("--baseline", metavar="M|NAME", help="what the others are compared with (graph; the first --arm)")
    arms.add_argument("--no-control", action="store_true", help="leave out the A/A control, a twin of the baseline")
    arms.add_argument(
        "--equality-images", type=number_over(int, -1), default=32, metavar="N", help="compare outputs; 0: no"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("target")
    target.add_argument(
        "--target", type=names, default=(), metavar="HOST:PORT,...", help="running servers, or null: a no-op server"
    )
    target.add_argument("--target-http", metavar="HOST:PORT", help="the target's /metrics, if not found by itself")
    target.add_argument("--in-process", action="store_true", help="call the compiled functions without a server")
    target.add_argument("--config", type=Path, metavar="FILE", help="configuration of the servers that are started")
    target.add_argument(
        "--processes", type=_COUNT, default=6, metavar="N", help="server processes of each arm, one after the other"
    )
    target.add_argument(
        "--share-process",
        "--shared-server",
        action="store_true",
        help="one server process for all arms: quicker, and blind to what differs between processes",
    )
    target.add_argument("--start-timeout", type=_POSITIVE, default=900.0, metavar="S", help="until a server is ready")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=counts, metavar="N,N", help="closed loop: requests at a time (16)")
    load.add_argument("--rate", type=_rates, metavar="R,R|R..R", help="open loop: requests/s, several, or a ramp")
    load.add_argument(
        "--profile",
        type=checked(Profile.parse),
        metavar="R..R:S,R:S",
        help="open loop: stages of rates and seconds, such as 0..100:10,100:30; lasts as long as they do",
    )
    load.add_argument("--arrivals", choices=arrivals.PROCESSES, help="of --rate, --profile and --find-max (poisson)")
    load.add_argument("--burst", type=_COUNT, metavar="N", help="of --rate and --profile: requests due at once (1)")
    load.add_argument(
        "--replay",
        type=checked(lambda text: arrivals.read(Path(text))),
        metavar="FILE",
        help="open loop: seconds of arrival, one a line",
    )
    load.add_argument("--save-arrivals", type=Path, metavar="FILE", help="write the schedule for --replay")
    load.add_argument("--max-in-flight", type=_COUNT, default=MAX_IN_FLIGHT, metavar="N", help="more is dropped")
    load.add_argument(
        "--scenario",
        choices=tuple(SCENARIO_IMAGES),
        help="modelled on MLPerf Inference; its notes list each rule that is relaxed",
    )
    load.add_argument(
        "--find-max", action="store_true", help="search the highest rate that keeps --slo, with 99%% confidence"
    )
    load.add_argument(
        "--accuracy", action="store_true", help="for --scenario: first write the outputs of every image as a log"
    )
    load.add_argument("--slo", type=checked(Slo.parse), metavar="COND", help="such as p99<50ms")
    load.add_argument("--slo-ms", type=_POSITIVE, metavar="MS", help="the same for p99, for --scenario server")
    load.add_argument(
        "--duration",
        type=_POSITIVE,
        default=5.0,
        metavar="S",
        help="measured at most, for each arm; in a search each run's least",
    )
    load.add_argument(
        "--warmup", type=number_over(float, -1e-9), default=1.0, metavar="S", help="before an arm is measured"
    )
    load.add_argument("--full-duration", action="store_true", help="go on when every arm is steady")
    load.add_argument("--deadline", type=_POSITIVE, default=10.0, metavar="S", help="of a request")
    load.add_argument("--workers", type=_workers, default="auto", metavar="N", help="processes that send")
    load.add_argument("--seed", type=number_over(int, -1), default=0, metavar="N", help="of images, arrivals and order")
    load.add_argument("--schedule-seed", type=number_over(int, -1), metavar="N", help="of arrivals alone (--seed)")
    load.add_argument(
        "--sample-seed", type=number_over(int, -1), metavar="N", help="of the images drawn in a scenario (--seed)"
    )


def _add_payload(parser: argparse.ArgumentParser) -> None:
    sent = parser.add_argument_group("what is sent")
    sent.add_argument("--images", type=Path, metavar="DIR", help="JPEG, PNG and WebP files; synthetic without")
    sent.add_argument("--payload", choices=payload.FORMS, help="files as they are (for --images), or raw pixels")
    sent.add_argument(
        "--images-per-request", type=checked(parse_counts), metavar="N|N:P,N:P", help="a number or shares (1)"
    )
    sent.add_argument(
        "--input",
        type=checked(tensors.parse_source),
        action="append",
        default=[],
        metavar="NAME=WHAT",
        help="of other models: noise (for what is not named), zeros, a file (.npy or an image) or a folder; repeatable",
    )
    sent.add_argument(
        "--shape",
        type=checked(tensors.parse_shape),
        action="append",
        default=[],
        metavar="NAME=SxS",
        help="of an input whose sides the model leaves open, without the batch; repeatable",
    )
    sent.add_argument(
        "--size", type=checked(parse_sizes), metavar="HxW|HxW:P,HxW:P", help="of the images, or shares; the model's own"
    )


def _add_live(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group("while it runs")
    live.add_argument(
        "--abort-if",
        type=checked(parse_abort),
        action="append",
        default=[],
        metavar="COND",
        help=f"end the run early and exit with {report.EXIT_CONDITION}: errors>0, errors>1%%, dropped>1%%, p99>80ms; "
        "shares and percentiles once more requests are over the limit than chance explains",
    )
    live.add_argument(
        "--live-port", type=_address, metavar="[HOST:]PORT", help="metrics for Prometheus, on 127.0.0.1 without HOST"
    )


def settings_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """Checks how the options fit together, and returns the settings. Ends with status 2 on a wrong command line."""
    targets = (IN_PROCESS,) if options.in_process else options.target
    transport = transport_options.transport(options, parser)
    _check(options, parser, transport)
    slo = Slo(99.0, options.slo_ms) if options.slo_ms else options.slo
    mix = options.images_per_request or Mix({1: 1.0})
    if images := SCENARIO_IMAGES.get(options.scenario):
        mix = Mix({images: 1.0})
    return Settings(
        models=tuple(options.mix.shares) if options.mix else options.model,
        model_shares=tuple(options.mix.shares.values()) if options.mix else (),
        modes=options.mode,
        loads=_loads(options),
        duration_s=options.duration,
        warmup_s=options.warmup,
        mix=mix,
        payload=options.payload or ("encoded" if options.images else "pixels"),
        images=options.images,
        sizes=tuple(options.size.shares) if options.size else (),
        size_shares=tuple(options.size.shares.values()) if options.size else (),
        inputs=tuple(dict(options.input).items()),
        shapes=tuple(dict(options.shape).items()),
        targets=targets,
        target_http=options.target_http,
        transport=transport,
        config=options.config,
        arms=tuple(options.arm),
        processes=options.processes,
        is_shared=options.share_process,
        baseline=_baseline(options),
        has_control=not options.no_control,
        workers=options.workers,
        max_in_flight=options.max_in_flight,
        ends_when_steady=not options.full_duration,
        scenario=options.scenario,
        slo=slo,
        search_arrivals=options.arrivals or "poisson",
        find_max=options.find_max or options.scenario == "server",
        equality_images=options.equality_images,
        save_arrivals=options.save_arrivals,
        record=options.record,
        seed=options.seed,
        schedule_seed=options.seed if options.schedule_seed is None else options.schedule_seed,
        sample_seed=options.seed if options.sample_seed is None else options.sample_seed,
        draws_samples=options.scenario is not None,
        writes_accuracy_log=options.accuracy,
        deadline_s=options.deadline,
        start_timeout_s=options.start_timeout,
    )


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser, transport: Transport) -> None:
    shapes = [
        f"--{name}" for name in ("concurrency", "rate", "profile", "replay") if getattr(options, name) is not None
    ]
    is_search = options.find_max or options.scenario == "server"
    fixed = shapes + ["--find-max"] * options.find_max + ["--scenario"] * bool(options.scenario)
    known = [arm.name for arm in options.arm] or MODES
    is_remote = options.target or options.arm
    problems = {
        "--config and --share-process are for servers that are started here": (options.target or options.arm)
        and (options.config or options.share_process),
        "--arm, --target and --in-process exclude each other": options.arm and (options.target or options.in_process),
        "--arm: each needs a name of its own": len({arm.name for arm in options.arm}) < len(options.arm),
        "--mode: an arm that is a server names its own, as in --arm NAME=HOST:PORT,mode=M": options.arm
        and options.mode,
        "--model: one for all arms; name others as in --arm NAME=HOST:PORT,model=NAME": options.arm
        and len(options.model) > 1,
        "--target and --in-process exclude each other": options.target and options.in_process,
        "--mix stands in place of --model": options.mix and options.model != DEFAULT_MODELS,
        "--mix: expected several models, --target null has one": options.mix
        and (len(options.mix.shares) < 2 or NULL in options.target),
        "--target null stands alone": NULL in options.target and len(options.target) > 1,
        f"{' and '.join(fixed)} exclude each other": len(fixed) > 1,
        "--find-max needs --slo, and --scenario server --slo-ms": is_search and not (options.slo or options.slo_ms),
        "--slo and --slo-ms are for --find-max and --scenario server": (options.slo or options.slo_ms)
        and not is_search,
        "--abort-if: a search goes over the limit on purpose": is_search and options.abort_if,
        "--slo and --slo-ms exclude each other": options.slo and options.slo_ms,
        "--arrivals is for --rate, --profile and --find-max": options.arrivals
        and not (options.rate or options.profile or options.find_max),
        "--burst is for --rate and --profile": options.burst and not (options.rate or options.profile),
        "--accuracy is for --scenario": options.accuracy and not options.scenario,
        "--sample-seed is for --scenario": options.sample_seed is not None and not options.scenario,
        "--images-per-request: the scenario sets it": options.scenario and options.images_per_request,
        "--in-process takes pixels": options.in_process
        and (options.payload == "encoded" or (options.images and options.payload is None)),
        f"--mode: expected {', '.join(MODES)} or all, got {','.join(options.mode)}": not options.target
        and options.mode != (ALL,)
        and not set(options.mode) <= set(MODES),
        f"--baseline: expected {', '.join(known)}, got {options.baseline}": not options.target
        and options.baseline
        and options.baseline not in known,
        "--tls-cert and --tls-key go together": bool(options.tls_cert) != bool(options.tls_key),
        "--tls, --header and --compression are for --target and --arm": (not is_remote or NULL in options.target)
        and transport != PLAIN,
        "--input and --shape are for --target and --arm, and exclude --images and --size": (
            options.input or options.shape
        )
        and (not is_remote or options.images or options.size),
        f"--images: no folder {options.images}": options.images and not options.images.is_dir(),
        f"--config: no file {options.config}": options.config and not options.config.is_file(),
        f"--record: no folder {options.record and options.record.parent}": options.record
        and not options.record.parent.is_dir(),
        "--save-arrivals: a closed loop has no schedule": options.save_arrivals
        and not (options.rate or options.replay or options.profile),
    }
    for problem, is_there in problems.items():
        if is_there:
            parser.error(problem)


def _baseline(options: argparse.Namespace) -> str:
    return str(options.baseline or (options.arm[0].name if options.arm else "graph"))


def _loads(options: argparse.Namespace) -> tuple[Load, ...]:
    if options.scenario == "offline":
        return (ClosedLoop(OFFLINE_SLOTS, is_offline=True),)
    if options.scenario in ("single-stream", "multi-stream"):
        return (ClosedLoop(1),)
    if options.replay:
        return (options.replay,)
    process: Process = options.arrivals or "poisson"
    burst = options.burst or 1
    if options.profile:
        return (replace(options.profile, process=process, burst=burst),)
    if options.rate:
        return tuple(OpenLoop(rate, process, end, burst) for rate, end in options.rate)
    return tuple(ClosedLoop(slots) for slots in options.concurrency or (16,))


def _rates(text: str) -> tuple[tuple[float, float | None], ...]:
    rates = []
    for part in names(text):
        match = _RATE.fullmatch(part)
        ends = [float(end) for end in match.groups() if end] if match else []
        if not ends or not all(0 < end < float("inf") for end in ends):
            raise argparse.ArgumentTypeError(f"expected rates such as 50,100 or a ramp such as 50..200, got {text!r}")
        rates.append((ends[0], ends[1] if len(ends) > 1 else None))
    return tuple(rates)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected a port such as 9100 or 0.0.0.0:9100, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    number = int(_COUNT(text))
    if number > _MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"expected {_MAX_WORKERS} processes at most, got {number}")
    return number
