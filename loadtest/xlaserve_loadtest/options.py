"""The options of `loadtest`, declared; `option_checks` makes settings of them."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from pathlib import Path
from typing import Final

from xlaserve_loadtest import transport_options
from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.analysis.mlperf import SCENARIOS
from xlaserve_loadtest.parser import (
    Parser,
    checked,
    count_to,
    counts_to,
    file,
    file_to_write,
    folder,
    folder_to_write,
    host_and_port,
    names,
    number_from,
    number_over,
)
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.run import generate
from xlaserve_loadtest.run.crew import MAX_IN_FLIGHT
from xlaserve_loadtest.run.watch import parse_abort
from xlaserve_loadtest.schedule import arrivals, payload, tensors, trace
from xlaserve_loadtest.schedule.arms import ALL, MODES, USUAL_MODES, ServerArm, check_addresses
from xlaserve_loadtest.schedule.arrivals import MAX_CONCURRENCY, Profile
from xlaserve_loadtest.schedule.mix import parse_counts, parse_models, parse_sizes
from xlaserve_loadtest.schedule.search import Slo
from xlaserve_loadtest.settings import NULL

FOLDER: Final = Path("loadtest-results")
DEFAULT_MODELS: Final = ("digits",)
EQUALITY_IMAGES: Final = 32
PROCESSES: Final = 6
START_TIMEOUT_S: Final = 900.0
DEADLINE_S: Final = 10.0

_MAX_WORKERS: Final = 256
_POSITIVE: Final = number_over(float, 0)
_SECONDS: Final = number_over(float, 0, "seconds")
_COUNT: Final = number_over(int, 0)
_SEED: Final = number_from(int, 0)
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
    kept.add_argument(
        "--out", type=folder_to_write, metavar="DIR", help=f"folder for the run file and its page ({FOLDER})"
    )
    kept.add_argument("--record", type=file_to_write, metavar="FILE", help="name the run file")
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
        metavar="NAME=ADDRESS",
        help="compare running servers, or protocols of one, instead of modes: NAME=ADDRESS[,ADDRESS][,model=MODEL]"
        "[,mode=M]; addresses as of --target; repeatable",
    )
    arms.add_argument("--baseline", metavar="M|NAME", help="what the others are compared with (graph; the first --arm)")
    arms.add_argument("--no-control", action="store_true", help="leave out the A/A control, a twin of the baseline")
    arms.add_argument(
        "--equality-images",
        type=number_from(int, 0),
        metavar="N",
        help=f"compare outputs ({EQUALITY_IMAGES}); 0: no",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("target")
    target.add_argument(
        "--target",
        type=checked(_targets),
        default=(),
        metavar="ADDRESS,...",
        help="running servers: HOST:PORT or, in other protocols, http://HOST:PORT, https://, tfs://, tfs+http:// or "
        "tfs+https://; or null, a no-op server",
    )
    target.add_argument(
        "--target-http",
        type=checked(_plain_address),
        metavar="HOST:PORT",
        help="the target's /metrics, if not found by itself",
    )
    target.add_argument("--in-process", action="store_true", help="call the compiled functions without a server")
    target.add_argument("--config", type=file, metavar="FILE", help="configuration of the servers that are started")
    target.add_argument(
        "--processes", type=_COUNT, metavar="N", help=f"server processes of each arm, one after the other ({PROCESSES})"
    )
    target.add_argument(
        "--share-process",
        "--shared-server",
        action="store_true",
        help="one server process for all arms: quicker, and blind to what differs between processes",
    )
    target.add_argument(
        "--start-timeout", type=_SECONDS, metavar="S", help=f"until a server is ready ({START_TIMEOUT_S:g})"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=counts_to(MAX_CONCURRENCY),
        metavar="N,N",
        help=f"closed loop: requests at a time (16), up to {MAX_CONCURRENCY:,}",
    )
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
        type=checked(lambda text: trace.read(Path(text))),
        metavar="FILE",
        help="open loop: a trace with a request on each line, its seconds after the start or a JSON object with at_s "
        "and any of model, images, size and file; lasts as long as it does",
    )
    load.add_argument(
        "--save-arrivals", type=file_to_write, metavar="FILE", help="write the open loop's requests for --replay"
    )
    load.add_argument(
        "--max-in-flight",
        type=count_to(MAX_CONCURRENCY),
        metavar="N",
        help=f"open loop: more is dropped ({MAX_IN_FLIGHT}); up to {MAX_CONCURRENCY:,}",
    )
    load.add_argument(
        "--scenario",
        choices=tuple(SCENARIOS),
        help="modelled on MLPerf Inference; its notes list each rule that is relaxed",
    )
    load.add_argument(
        "--find-max", action="store_true", help="search the highest rate that keeps --slo, with 99%% confidence"
    )
    load.add_argument(
        "--slo",
        type=checked(Slo.parse),
        metavar="COND",
        help="such as p99<50ms; open loops report their goodput, what was answered within it",
    )
    load.add_argument("--slo-ms", type=_POSITIVE, metavar="MS", help="the same for p99")
    load.add_argument(
        "--duration",
        type=_SECONDS,
        metavar="S",
        help="measured at most, for each arm (5); of a trace what is replayed; in a search the least of a run that "
        "confirms a rate (600): slow spells that come less often are not covered",
    )
    load.add_argument(
        "--warmup", type=number_from(float, 0, "seconds"), default=1.0, metavar="S", help="before an arm is measured"
    )
    load.add_argument(
        "--block",
        type=_SECONDS,
        metavar="S",
        help="least length of one turn of an arm, whatever --duration (about 1): a queue needs time to settle",
    )
    load.add_argument("--full-duration", action="store_true", help="go on when every arm is steady, as scenarios do")
    load.add_argument("--deadline", type=_SECONDS, metavar="S", help=f"of a request ({DEADLINE_S:g})")
    load.add_argument(
        "--workers", type=_workers, metavar="N", help="processes that send (auto); with --generator, on each"
    )
    load.add_argument(
        "--generator",
        type=checked(_generator),
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="send from there, where `loadtest generate` runs, and not from here; repeatable",
    )
    generate.add_key(load)
    load.add_argument("--seed", type=_SEED, default=0, metavar="N", help="of images, arrivals and order")
    load.add_argument("--schedule-seed", type=_SEED, metavar="N", help="of arrivals alone (--seed)")
    load.add_argument("--sample-seed", type=_SEED, metavar="N", help="of the images drawn in a scenario (--seed)")


def _add_payload(parser: argparse.ArgumentParser) -> None:
    sent = parser.add_argument_group("what is sent")
    sent.add_argument("--images", type=folder, metavar="DIR", help="JPEG, PNG and WebP files; synthetic without")
    sent.add_argument("--payload", choices=payload.FORMS, help="files as they are (for --images), or raw pixels")
    sent.add_argument(
        "--distinct",
        action="store_true",
        help="no request is like another: a few bytes of each are a number of its own",
    )
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
        "--live-port",
        type=checked(_known_port),
        metavar="[HOST:]PORT",
        help="metrics for Prometheus, on 127.0.0.1 without HOST",
    )


def _rates(text: str) -> tuple[tuple[float, float | None], ...]:
    rates = []
    for part in names(text):
        match = _RATE.fullmatch(part)
        ends = [float(end) for end in match.groups() if end] if match else []
        if not ends or not all(0 < end < float("inf") for end in ends):
            raise argparse.ArgumentTypeError(f"expected rates such as 50,100 or a ramp such as 50..200, got {text!r}")
        rates.append((ends[0], ends[1] if len(ends) > 1 else None))
    return tuple(rates)


def _targets(text: str) -> tuple[str, ...]:
    found = names(text)
    check_addresses([target for target in found if target != NULL])
    return found


def _plain_address(text: str) -> str:
    if "://" in text:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return Address.parse(text).authority


def _known_port(text: str) -> tuple[str, int]:
    host, port = host_and_port(text)
    if not port:
        raise ValueError(f"expected a port from 1 on, got {text!r}")
    return host, port


def _generator(text: str) -> str:
    return Address("", *host_and_port(text)).authority


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > len(str(_MAX_WORKERS)) or not 0 < int(text) <= _MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"expected auto or a number from 1 to {_MAX_WORKERS}, got {text!r}")
    return int(text)
