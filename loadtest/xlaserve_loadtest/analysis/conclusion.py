"""The verdict on a run in sentences, with which reports begin; `verdict` and `compare` decide it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.highest_rate import HighestRate
from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.overload import Overload
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.verdict import MEASURE_NAMES
from xlaserve_loadtest.record.lines import Equality, Run
from xlaserve_loadtest.record.requests import in_words

_MAX_SENTENCES = 3


def sentences(
    run: Run, curve: Sequence[Point], comparisons: Sequence[Comparison], rates: Sequence[HighestRate]
) -> tuple[str, ...]:
    """Returns the verdict on a run: what invalidates it first, then what was found. `curve` has the points of searches
    too, of which wrong answers alone are said."""
    points = [point for point in curve if point.role == "measure"]
    parts = _first((disagreement(each) for each in run.equalities if not each.is_equal), "outputs differ")
    parts += _first((_wrong(point) for point in curve if point.differing), "answers were wrong")
    if any(point.requests for point in points):
        parts += _first((_unanswered(point) for point in points if point.failed), "requests were not answered")
        overloads = [(point, point.overload) for point in points if point.overload]
        parts += _first(
            (_overloaded(*each) for each in overloads if not each[1].is_capped), "the target did not keep up"
        )
        parts += _first((_held_back(*each) for each in overloads if each[1].is_capped), "requests were dropped")
    judged = [comparison for comparison in comparisons if not comparison.is_control]
    parts += [_rate_sentence(rate) for rate in rates]
    if len(judged) > _MAX_SENTENCES:
        parts += _counted(judged)
    elif judged:
        parts += [sentence(comparison) for comparison in judged]
    elif any(point.requests for point in points):
        parts += [_alone(point) for point in points if point.requests][:_MAX_SENTENCES]
        if not rates:
            parts.append("Nothing was compared.")
    elif not rates:
        reason = run.end.reason if run.end else "the file was cut off before a block had ended"
        failure = next((f"{in_words(failed.status)}: {failed.message}" for failed in run.failures), "")
        parts.append("Nothing was measured: " + (reason or failure or "no block came out of warm-up") + ".")
    return tuple(parts)


def sentence(comparison: Comparison) -> str:
    """Returns a comparison in a sentence."""
    arms = f"{comparison.arm} is {comparison.verdict} than {comparison.baseline}"
    of = f", {comparison.holds}" * bool(comparison.holds)
    if comparison.verdict == "inconclusive":
        arms, of = f"{comparison.arm} against {comparison.baseline} is inconclusive", ""
    parts = [f"{arms} at {comparison.label}{of}: "]
    if comparison.reason:
        parts.append(f"{comparison.reason}; ")
    if (ratio := comparison.ratio) is not None:
        latency = f"{MEASURE_NAMES[comparison.decides]} latency"
        what = "images/s" if comparison.decides == "images_per_s" else latency
        # Another start of the same program may differ by more than its blocks do.
        within = " in the same processes" * (comparison.unit == "blocks")
        pairs = f"{comparison.pairs} pairs of {comparison.unit}{within}"
        parts.append(f"{ratio.value:.3f} times the {what} ({_interval(ratio)}{pairs})")
    if comparison.wrong:
        wrong = " and ".join(f"{found:.2%} of {arm}'s compared answers" for arm, found in comparison.wrong.items())
        parts.append(f", but {wrong} were wrong")
    return "".join(parts).removesuffix("; ") + "."


def _first(sentences: Iterable[str], what: str) -> list[str]:
    """Returns the first few sentences, and how many more there would be; warnings list all of them."""
    found = list(sentences)
    more = len(found) - _MAX_SENTENCES
    return [*found[:_MAX_SENTENCES], *([f"In {more} more cases {what}."] if more > 0 else [])]


def _wrong(point: Point) -> str:
    return (
        f"{point.arm} gave wrong answers at {point.label}: {point.differing_text} differ from what the same request "
        "got alone."
    )


def _unanswered(point: Point) -> str:
    return (
        f"{point.arm} did not answer {point.failed / point.due:.1%} of its requests at {point.label} "
        f"({point.failed_text})."
    )


def _overloaded(point: Point, overload: Overload) -> str:
    grows = ", and its latency grows with the length of the run" if overload.grows else ""
    return f"{point.arm} did not keep up at {point.label}: {overload.answered_per_s:,.4g}/s were answered{grows}."


def _held_back(point: Point, overload: Overload) -> str:
    answered = f"{overload.answered_per_s:,.4g}/s were answered"
    return f"{point.arm} was not sent all of {point.label}: {answered}, and {capped(overload)}."


def capped(overload: Overload) -> str:
    """Returns that it was the generator that held back."""
    limit = "" if overload.max_in_flight is None else f" {overload.max_in_flight:,}"
    return f"the generator had as many requests under way as --max-in-flight{limit} lets it"


def disagreement(equality: Equality) -> str:
    """Returns a sentence that says that two arms, or one arm twice, did not compute the same."""
    if equality.incomparable:
        return (
            f"The outputs of {equality.arm} and {equality.baseline} can't be compared: {equality.incomparable}. "
            "Whether they do the same work is not known (--equality-images 0 compares no outputs)."
        )
    top1 = "" if equality.top1_agreement is None else f", top-1 agreement {equality.top1_agreement:.1%}"
    of = f" for {equality.model}" if equality.model else ""
    size = (
        f"(largest difference {equality.largest_absolute:.2g} absolute, {equality.largest_relative:.2g} "
        f"relative{top1}, {equality.images} images)"
    )
    if equality.arm == equality.baseline:
        return (
            f"{equality.arm}{of} answers the same requests differently even alone, beyond the tolerance {size}: which "
            "answers are right can't be told."
        )
    return (
        f"The outputs of {equality.arm} and {equality.baseline}{of} differ beyond the tolerance {size}: they do not do "
        "the same work."
    )


def _interval(estimate: Estimate) -> str:
    """Returns an interval in words, followed by a comma; empty where there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"95% interval {estimate.low:.3f} to {estimate.high:.3f}, "


def _counted(comparisons: Sequence[Comparison]) -> list[str]:
    """Returns a sentence for each pair of arms, with the number of loads for each verdict."""
    pairs: dict[tuple[str, str, str], Counter[str]] = {}
    for comparison in comparisons:
        of = f", {comparison.holds}" * bool(comparison.holds)
        pairs.setdefault((comparison.arm, comparison.baseline, of), Counter())[comparison.verdict] += 1
    return [
        f"{arm} against {baseline}{of}: "
        + ", ".join(f"{verdict} under {count} of {counts.total()} loads" for verdict, count in counts.most_common())
        + "."
        for (arm, baseline, of), counts in pairs.items()
    ]


def _alone(point: Point) -> str:
    rate = f"{point.images_per_s.value:,.1f} images/s" if point.images_per_s else "no rate"
    supported = [percentile for percentile in point.percentiles if percentile.value_ms is not None]
    latency = f", {supported[-1].name} {supported[-1].text}" if supported else ""
    within = "" if point.goodput is None else f", {point.goodput.share:.1%} within {point.goodput.limit_ms:g} ms"
    limited = " (generator-limited)" if point.generator.is_limited else ""
    wrong = f", with wrong answers: {point.differing_text}" if point.differing else ""
    return f"{point.arm} does {rate}{latency}{within} at {point.label}{limited}{wrong}."


def _rate_sentence(rate: HighestRate) -> str:
    beyond = "" if rate.rejected_per_s is None else f"; {rate.rejected_per_s:.6g}/s is too much"
    if rate.rate_per_s is None:
        return f"{rate.arm}: no rate with {rate.slo} was confirmed in {rate.tried} runs{beyond}."
    limited = "; generator-limited" if rate.is_generator_limited else ""
    return (
        f"{rate.arm} keeps to {rate.slo} at {rate.rate_per_s:.6g} requests/s, with 99% confidence "
        f"({rate.over:,} of {rate.requests:,} requests over it), in spells that come at least once in "
        f"{rate.covered_s:.3g} s, too{beyond}{limited}."
    )
