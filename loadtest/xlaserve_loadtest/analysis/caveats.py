"""Warnings about a run's figures, and notes on how to read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np

from xlaserve_loadtest.analysis.compare import Comparison
from xlaserve_loadtest.analysis.completeness import missing
from xlaserve_loadtest.analysis.conclusion import capped, disagreement
from xlaserve_loadtest.analysis.generator import two_digits
from xlaserve_loadtest.analysis.mlperf import ScenarioResult
from xlaserve_loadtest.analysis.parts import Column, odd_parts, part_names
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.samples import Sample, label
from xlaserve_loadtest.analysis.verdict import MEASURE_NAMES, Measure
from xlaserve_loadtest.record.lines import Header, Run
from xlaserve_loadtest.record.requests import Status, in_words
from xlaserve_loadtest.schedule.trace import described

CLOCK_SHARE: Final = 0.01
"""Share of a block's length by which times may be off."""
_MIN_STALL_S: Final = 0.25
_STALL_FACTOR: Final = 5.0
"""A closed loop in which nothing is answered for so many median latencies has stalled."""

_UNANSWERED: Final = "Requests that were not answered as they should be, and count as at least their deadline"
_DIFFERING: Final = "Answers under load that differ from what the same request got alone"
_GROWING: Final = "The target did not keep up, so that latency grows with the length of the run"
_OVERLOADED: Final = "The target did not keep up"
_CAPPED: Final = "Requests were dropped at the generator's limit, and the target may do better with a higher one"
_UNSETTLED: Final = "Blocks are short for these latencies, so that a queue has no time to settle"
_LIMITED: Final = "The load was generator-limited, and the target may do better"
_DISTURBED: Final = "Other processes used the machine's processors, and a quiet machine may do better"
_WAITED: Final = "Programs that XLA compiled while requests waited"
_COMPILED: Final = "Programs that the server compiled beside traffic while it was measured"
_UNSTEADY: Final = "Not every block became steady"
_ODD_GENERATOR: Final = "A generator measured what the others did not, so that some of the figures are its own"
_ODD_TARGET: Final = "A target does not do as the others, whose figures hide it"
_CLOCKS: Final = "Clocks of generators are not known well enough for so short blocks"
_JUMPED: Final = "A generator's clock jumped during a block, as when a machine is suspended, and so did latencies"
_KINDS: Final = (
    _UNANSWERED,
    _DIFFERING,
    _GROWING,
    _OVERLOADED,
    _CAPPED,
    _UNSETTLED,
    _LIMITED,
    _DISTURBED,
    _WAITED,
    _COMPILED,
    _UNSTEADY,
)
"""Most serious first."""
_FAR_OFF: Final = "Images/s are of the whole time, and a typical block did otherwise, since some were far off"
_STALLED: Final = (
    "Nothing was answered for long. A closed loop hides such a stall, as its percentiles count it once for each slot; "
    "measure with --rate"
)


def warnings(
    run: Run, samples: Sequence[Sample], points: Sequence[Point], comparisons: Sequence[Comparison]
) -> Iterator[str]:
    """Yields what the reader must know before the figures, most serious first."""
    yield from (disagreement(equality) for equality in run.equalities if not equality.is_equal)
    yield from missing(run, samples)
    yield from _grouped(
        (f"{in_words(failure.status)}: {failure.message or 'no message'}", f"{failure.arm} {failure.count:,} times")
        for failure in run.failures
    )
    # Of one kind, all arms' on one line.
    yield from _grouped(sorted(chain.from_iterable(map(_about_point, points)), key=lambda kind: _KINDS.index(kind[0])))
    yield from _grouped(_odd_parts(run.header, samples))
    yield from _grouped(_clock_errors(samples))
    yield from _grouped(chain.from_iterable(map(_doubts, comparisons)))
    yield from _grouped(_stalls(samples))
    yield from _grouped(_far_off(points))
    yield from (f"{event.what}: {event.text}" for event in run.events if event.what == "error")


def notes(
    run: Run,
    samples: Sequence[Sample],
    points: Sequence[Point],
    comparisons: Sequence[Comparison],
    results: Sequence[ScenarioResult],
) -> Iterator[str]:
    """Yields notes on how to read the figures."""
    for names, relaxed in _alike(results):
        yield f"{names}, not an MLPerf result: {'; '.join(relaxed)}."
    if any(point.load.type == "closed" for point in points):
        yield (
            "Closed loop: a waiting slot sends nothing, so a stall is counted once for each slot and hides its queue. "
            "An open loop (--rate) shows what users would have seen."
        )
    yield from _compared_under_load(points)
    own: dict[str, dict[str, None]] = {}
    for point in points:
        if point.generator.own_ms is not None:
            own.setdefault(f"{two_digits(point.generator.own_ms)} ms", {})[point.arm] = None
    if own:
        # Protocols differ, and with them arms.
        about = ", ".join(f"{own_ms} ({', '.join(arms)})" if len(own) > 1 else own_ms for own_ms, arms in own.items())
        yield (
            f"Of every latency, about {about} is not the target's: what a request took, one at a time, to a "
            "server on the generator's machine that does nothing (both ends of the protocol included). It is not "
            "subtracted."
        )
    unsupported = sorted(
        {percentile.percentile for point in points for percentile in point.percentiles if percentile.value_ms is None}
    )
    if unsupported and points:
        names = ", ".join(f"p{percentile:g}" for percentile in unsupported)
        yield f"{names}: left out where there were too few answers to support them."
    if comparisons and not any(comparison.is_control for comparison in comparisons):
        yield "No A/A control was run: nothing shows that two equal arms come out equal on this machine."
    within = [one.arm for one in comparisons if one.unit == "blocks" and not one.is_control]
    if within:
        has_control = any(one.is_control for one in comparisons)
        unseen = ", which an A/A control in the process of its baseline can't show" * has_control
        yield (
            f"{', '.join(dict.fromkeys(within))}: measured in one process for each arm, or one for all. The intervals "
            f"hold within those processes: another start may differ by more{unseen}."
        )
    random = sorted(
        {name for server in run.servers for name, model in server.models.items() if model.get("weights") == "random"}
    )
    if random:
        yield f"{', '.join(random)}: random weights. Speed does not depend on them; the answers mean nothing."
    for load in run.header.configuration.get("loops") or ():
        if isinstance(load, dict) and load.get("sha256"):
            yield f"Replayed: {described(load)}."
    yield from (event.text for event in run.events if event.what == "note")
    yield from _unseen_machines(run)
    yield from _sent_from(run)


def _compared_under_load(points: Sequence[Point]) -> Iterator[str]:
    compared = sum(point.compared for point in points)
    if compared:
        yield (
            f"Answers under load that were compared with what the same request got alone: {compared:,} of about "
            f"{sum(point.requests for point in points):,}. A wrong share that is smaller may be missed."
        )
    elif any(point.requests for point in points):
        yield "Answers under load were not compared with what the same request got alone."


def _unseen_machines(run: Run) -> Iterator[str]:
    known = [block for block in run.blocks if block.generator.others is not None]
    away = {server.id for server in run.servers if server.pid is None}
    if len(known) < len(run.blocks):
        yield "What other processes used of the machine's processors is not known of every block."
    elif any(block.server in away for block in known):
        yield "What other processes used of the processors is known of the machine that sends, and not of the server's."


def _alike(results: Sequence[ScenarioResult]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields arms and scenario in words with the rules that all these arms relaxed."""
    arms: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for result in results:
        arms.setdefault((result.name, result.relaxed), []).append(result.arm)
    for (name, relaxed), own in arms.items():
        yield f"{', '.join(own)}: {name}", relaxed


def _grouped(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields a line for each kind of warning, with all that it is about."""
    groups: dict[str, list[str]] = {}
    for kind, about in found:
        groups.setdefault(kind, []).append(about)
    yield from (f"{kind}: {'; '.join(about)}." for kind, about in groups.items())


def _about_point(point: Point) -> Iterator[tuple[str, str]]:
    """Yields kinds of warnings, with what each is about."""
    where = f"{point.arm}, {point.label}"
    if point.unanswered:
        yield _UNANSWERED, f"{where} ({point.unanswered_text})"
    if point.differing:
        yield _DIFFERING, f"{where} ({point.differing_text})"
    if (found := point.overload) is not None:
        rates = f"{found.due_per_s:,.4g}/s were due, {found.answered_per_s:,.4g}/s answered"
        if found.is_capped:
            yield _CAPPED, f"{where} ({rates}; {capped(found)})"
        elif found.grows:
            grew = f"median latency from {found.first_ms:,.0f} to {found.last_ms:,.0f} ms"
            yield _GROWING, f"{where} ({rates}, {grew})"
        else:
            yield _OVERLOADED, f"{where} ({rates})"
    if (short := point.unsettled) is not None:
        why = f"half of its requests waited {short.median_ms:,.0f} ms or more"
        if short.ends_ms is not None:
            why = "mean latency grows in them from {:,.3g} to {:,.3g} ms".format(*short.ends_ms)
        yield _UNSETTLED, f"{where} ({why}; try --block {short.needs_s:.2g}, or one arm alone)"
    yield from _about_machine(point, where)
    if compiled := point.server.serving_compilations:
        yield _WAITED, f"{where} ({compiled})"
    if compiled := point.server.compilations:
        yield _COMPILED, f"{where} ({compiled})"
    if point.steady is False:
        yield _UNSTEADY, where


def _about_machine(point: Point, where: str) -> Iterator[tuple[str, str]]:
    if point.generator.is_limited:
        yield _LIMITED, f"{where} ({'; '.join(point.generator.limits)})"
    if point.generator.is_disturbed:
        yield _DISTURBED, f"{where} ({point.generator.others:.0%})"


def _odd_parts(header: Header, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Finds targets and generators that don't fare as the others of the same arm and load."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.block.role == "measure":
            groups.setdefault((sample.block.arm, label(sample.block.load)), []).append(sample)
    kinds: tuple[tuple[str, Column], ...] = ((_ODD_GENERATOR, "generator"), (_ODD_TARGET, "target"))
    for kind, column in kinds:
        for (arm, load), own in groups.items():
            for odd in odd_parts(own, column, part_names(column, header, own)):
                yield kind, f"{arm}, {load} ({odd})"


def _clock_errors(samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    for sample in samples:
        machines, allowed_ms = sample.block.generator.machines, CLOCK_SHARE * sample.seconds * 1000
        where = f"{sample.block.arm}, block {sample.block.index}"
        error_ms = max((machine.clock_error_ms for machine in machines), default=0.0)
        if error_ms > allowed_ms:
            yield _CLOCKS, f"{where} (known to {error_ms:.3g} ms, and {sample.seconds:.3g} s long)"
        # No clock drifts by a hundredth. Either comparison of clocks may be off by its error.
        drift_ms = max((abs(own.clock_drift_ms) - 2 * own.clock_error_ms for own in machines), default=0.0)
        if drift_ms > allowed_ms:
            yield _JUMPED, f"{where} (by {drift_ms:.3g} ms at least)"


def _sent_from(run: Run) -> Iterator[str]:
    machines = [machine for block in run.blocks for machine in block.generator.machines]
    if not machines:
        return
    where = ", ".join(f"{line.address} ({line.machine}, processes: {line.workers})" for line in run.generators)
    error_ms = max(machine.clock_error_ms for machine in machines)
    drift_ms = max(abs(machine.clock_drift_ms) for machine in machines)
    yield (
        f"Sent from {where}. Times are of the coordinator's clock, to within {two_digits(error_ms)} ms; in one block a "
        f"generator's clock drifted by up to {two_digits(drift_ms)} ms. Each latency is of one clock."
    )


def _doubts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    if comparison.failed:
        yield (
            "The A/A control failed: the machine was not quiet enough for small differences",
            f"{comparison.arm} repeats {comparison.baseline} and came out different in {_names(comparison.failed)} "
            f"at {comparison.label}",
        )
    for reason in dict.fromkeys(comparison.doubts.values()):
        measures = [measure for measure, doubt in comparison.doubts.items() if doubt == reason]
        what = f"Nothing is concluded from {_names(measures)}, as {reason}"
        yield what, f"{comparison.arm}, {comparison.label}"


def _names(measures: Iterable[Measure]) -> str:
    return ", ".join(MEASURE_NAMES[measure] for measure in measures)


def _far_off(points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    """Finds points whose images/s over the whole time are not what a typical block did."""
    for point in points:
        rates, typical = [rate for rate in point.block_images_per_s if rate is not None], point.typical_images_per_s
        mean = point.images_per_s
        if not rates or mean is None or typical is None or typical.low is None or typical.high is None:
            continue
        if not typical.low * (1 - 1e-9) <= mean.value <= typical.high * (1 + 1e-9):
            yield (
                _FAR_OFF,
                (
                    f"{point.arm}, {point.label} ({mean.value:,.4g} images/s, in a typical block {typical.value:,.4g}, "
                    f"least {min(rates):,.4g}, most {max(rates):,.4g})"
                ),
            )


def _stalls(samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Finds closed-loop blocks in which nothing was answered for a long time, which percentiles hardly show."""
    for sample in samples:
        window, answered = sample.block.window_ns, sample.answered
        if sample.block.load.type != "closed" or window is None or not answered.size:
            continue
        ended = np.sort(sample.rows["end_ns"][sample.rows["status"] == Status.OK])
        inside = ended[ended >= window[0]]
        longest_s = float(np.diff(inside, prepend=window[0]).max()) / 1e9 if inside.size else 0.0
        if longest_s > max(_MIN_STALL_S, _STALL_FACTOR * float(np.median(sample.latencies_ns)) / 1e9):
            yield _STALLED, f"{sample.block.arm}, block {sample.block.index} ({longest_s:.2g} s)"
