"""`xlaserve compare-versions`: how the shadows of a running server's models compare with what answers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xlaserve.commands import arguments, remote
from xlaserve.commands.command import ADDRESS, Command, Invocation
from xlaserve.errors import ModelNotFound, XlaserveError
from xlaserve.telemetry import console
from xlaserve_proto import vision_pb2 as pb

if TYPE_CHECKING:
    from xlaserve_loadtest.analysis.intervals import Estimate
    from xlaserve_loadtest.analysis.judgement import Verdict

CONDITION_MET: Final = 3
"""The exit status of loadtest's --fail-if, too."""


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


def run(invocation: Invocation) -> int:
    """Prints what each shadow shows; 3 where one does not keep to the conditions."""
    own = invocation.own
    server = own.server or remote.address(invocation.settings)
    models = [model for model in remote.list_models(server).models if own.model in (None, model.name)]
    if own.model is not None and not models:
        raise ModelNotFound(f"no model {own.model!r} on {server}")
    comparisons = [_comparison(model, shadow) for model in models for shadow in model.shadows]
    if not comparisons:
        raise XlaserveError(f"server {server}: no request had a shadow yet; set a model's `shadow`, and send requests")
    if own.json:
        console.print_json([_as_json(one) for one in comparisons])
    else:
        sys.stdout.write("\n\n".join("\n".join(_lines(one)) for one in comparisons) + "\n")
    failures = [line for one in comparisons for line in _failures(one, own)]
    for line in failures:
        sys.stderr.write(f"{line}\n")
    return CONDITION_MET if failures else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the model's name; all by default")
    remote.add_server(parser, "the server to ask; by default the one that the settings describe")
    parser.add_argument(
        "--min-agreement",
        type=arguments.share,
        metavar="X",
        help="exit with status 3 unless the agreement's 95%% interval lies above X, from 0 to 1",
    )
    parser.add_argument("--fail-if-slower", action="store_true", help="exit with status 3 where the shadow is slower")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _comparison(model: pb.Model, shadow: pb.Shadow) -> Comparison:
    try:  # what it needs is an extra
        from xlaserve_loadtest.analysis import intervals, judgement  # noqa: PLC0415
    except ImportError as error:
        raise XlaserveError(f"{error}; compare-versions takes what `pip install xlaserve[loadtest]` installs") from None
    time_ratio = intervals.ratio([math.log(ratio) for ratio in shadow.time_ratios])
    return Comparison(
        model,
        shadow,
        intervals.share(shadow.agreement, shadow.images),
        time_ratio,
        judgement.conclude(time_ratio, more_is_faster=False),
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


COMMAND = Command(
    "compare-versions", "compare the shadows of a server's models with what answers", run, add_options, ADDRESS
)
