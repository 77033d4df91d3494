"""`loadtest compare-versions`: how the shadows of a running server's models compare with what answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from xlaserve_loadtest import transport_options
from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.analysis import intervals
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.verdict import Verdict, conclude
from xlaserve_loadtest.parser import Parser, checked
from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.reports.cli import EXIT_CONDITION
from xlaserve_loadtest.targets.channel import Transport, open_channel
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc

DEFAULT_TARGET: Final = "127.0.0.1:8001"
TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one shadow."""

    model: pb.Model
    shadow: pb.Shadow
    agreement: Estimate
    time_ratio: Estimate
    verdict: Verdict
    """Of the shadow's latency."""

    @property
    def title(self) -> str:
        """The versions and modes that are compared."""
        shadow = self.shadow
        served, other = f"{self.model.version} {shadow.mode}", f"{shadow.shadow_version} {shadow.shadow_mode}"
        return f"{self.model.name}: {other} as the shadow of {served}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    0: every shadow keeps to the conditions; 1: the server has no shadow, or gives no answer; 2: a wrong command line;
    3: a shadow does not keep to the conditions.
    """
    command = parser()
    own = command.parse_args(arguments)
    transport = transport_options.transport(own, command)
    try:
        models = asyncio.run(_models(own.target, transport))
    except grpc.aio.AioRpcError as error:
        return _fail(f"{own.target}: {error.code().name}: {error.details()}")
    chosen = [model for model in models if own.model in (None, model.name)]
    if own.model is not None and not chosen:
        return _fail(f"{own.target}: no model {own.model!r}")
    comparisons = [_comparison(model, shadow) for model in chosen for shadow in model.shadows]
    if not comparisons:
        return _fail(f"{own.target}: no request had a shadow yet; set a model's `shadow`, and send requests")
    if own.json:
        sys.stdout.write(json.dumps([_as_json(one) for one in comparisons], indent=2) + "\n")
    else:
        sys.stdout.write("\n\n".join("\n".join(_lines(one)) for one in comparisons) + "\n")
    failures = [line for one in comparisons for line in _failures(one, own)]
    for line in failures:
        sys.stderr.write(f"{line}\n")
    return EXIT_CONDITION if failures else 0


def parser() -> argparse.ArgumentParser:
    """Returns the subcommand's parser."""
    found = Parser(
        prog="loadtest compare-versions",
        description="Compares the shadows of a server's models with what answers. Nothing is sent but the question.",
    )
    found.add_argument("model", metavar="MODEL", nargs="?", help="the model's name; all by default")
    found.add_argument(
        "--target", type=checked(_address), default=DEFAULT_TARGET, metavar="HOST:PORT", help="the server (%(default)s)"
    )
    found.add_argument(
        "--min-agreement",
        type=checked(_share),
        metavar="X",
        help="exit with status 3 unless the agreement's 95%% interval lies above X, from 0 to 1",
    )
    found.add_argument("--fail-if-slower", action="store_true", help="exit with status 3 where the shadow is slower")
    found.add_argument("--json", action="store_true", help="print JSON")
    transport_options.add(found)
    return found


async def _models(target: str, transport: Transport) -> Sequence[pb.Model]:
    async with open_channel(target, transport) as channel:
        stub = vision_pb2_grpc.VisionStub(channel)
        answer = await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S, metadata=transport.headers)
    return answer.models


def _fail(text: str) -> int:
    sys.stderr.write(f"loadtest compare-versions: {printable(text)}\n")
    return 1


def _address(text: str) -> str:
    address = Address.parse(text)
    if address.protocol:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return address.authority


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"expected a share from 0 to 1, got {text!r}")
    return value


def _comparison(model: pb.Model, shadow: pb.Shadow) -> Comparison:
    time_ratio = intervals.ratio([math.log(ratio) for ratio in shadow.time_ratios])
    return Comparison(
        model,
        shadow,
        intervals.share(shadow.agreement, shadow.images),
        time_ratio,
        conclude(time_ratio, more_is_faster=False),
    )


def _failures(one: Comparison, own: argparse.Namespace) -> Iterator[str]:
    """Yields a line for each condition that a shadow does not keep to."""
    low = one.agreement.low
    if own.min_agreement is not None and (low is None or low < own.min_agreement):
        known = "nothing was compared" if low is None else f"the agreement's interval begins at {low:.4f}"
        yield f"{one.title}: failed --min-agreement {own.min_agreement:g}: {known}"
    if own.fail_if_slower and one.verdict == "slower":
        yield f"{one.title}: failed --fail-if-slower: {one.time_ratio.value:.3f} times the latency"


def _lines(one: Comparison) -> Iterator[str]:
    shadow = one.shadow
    yield one.title
    if shadow.images:
        answers = f"{one.agreement.value:.4f} agree ({_interval(one.agreement)}{shadow.images} images)"
        iou = f", mean IoU {shadow.iou:.4f}" if shadow.HasField("iou") else ""
        apart = f", largest difference {shadow.largest_difference:.2g}" if shadow.HasField("largest_difference") else ""
        yield f"  answers:  {answers}{iou}{apart}"
    if shadow.time_ratios:
        pairs = f"{len(shadow.time_ratios)} pairs of batches"
        ratio = f"{one.time_ratio.value:.3f} times the latency ({_interval(one.time_ratio)}{pairs})"
        yield f"  latency:  {one.verdict}, {ratio}"
    if shadow.dropped:
        yield f"  left out: {', '.join(f'{count} {reason}' for reason, count in sorted(shadow.dropped.items()))}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"95% interval {estimate.low:.3f} to {estimate.high:.3f}, "


def _as_json(one: Comparison) -> dict[str, object]:
    shadow = one.shadow
    return {
        "model": one.model.name,
        "version": one.model.version,
        "mode": shadow.mode,
        "shadow_version": shadow.shadow_version,
        "shadow_mode": shadow.shadow_mode,
        "images": shadow.images,
        "agreement": _estimate(one.agreement),
        "iou": shadow.iou if shadow.HasField("iou") else None,
        "largest_difference": shadow.largest_difference if shadow.HasField("largest_difference") else None,
        "pairs": len(shadow.time_ratios),
        "latency_ratio": _estimate(one.time_ratio),
        "verdict": one.verdict,
        "dropped": dict(shadow.dropped),
    }


def _estimate(estimate: Estimate) -> dict[str, float | None] | None:
    """Returns an estimate for JSON, None of nothing."""
    if math.isnan(estimate.value):
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
