"""Tallies: counts of requests and batches of several processes, added up for the page at `/` and the model statistics.

A tally is plain data of JSON: numbers in mappings and lists. Two tallies are added number by number, each number to the
one in the same place of the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from xlaserve.config import Mode
from xlaserve.telemetry.counts import Count, Distribution
from xlaserve.telemetry.failures import KEPT, Failure, Failures
from xlaserve.telemetry.findings import KEPT_PAIRS, Findings, Mean, Pair, TimeRatio
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.version_metrics import Duration, Statistics

Json = Any
Labels = tuple[str, ...]

NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
FAILURES: Final = ("of_server", "of_clients")
GREATEST: Final = ("last_at_ms", "largest_difference")
"""Numbers that are not added: the sum has the greatest."""
TIME_RATIOS: Final = "time_ratios"
NEWEST: Final = {**dict.fromkeys(FAILURES, KEPT), TIME_RATIOS: KEPT_PAIRS}
"""Lists whose items begin with their time in seconds, and how many of the newest items a sum keeps, the newest last."""
HISTOGRAMS: Final = ("request_s", "decode_s", "queue_s", "gather_s", "execute_s", "encode_s")
COUNTERS: Final = ("bucket_batches", "padded_rows")
_DURATIONS: Final = ("success", "fail", "queue", "input", "infer", "output")
_NUMBERS: Final = ("images", "batches", "last_at_ms")
_BY_SIZE: Final = ("gather_by_size", "infer_by_size")
_SEPARATOR: Final = "\0"
"""The character between the labels in the key of a series."""

NOTHING: Final[Json] = {name: {} for name in (*HISTOGRAMS, *COUNTERS, "statistics", "shadows", "failures")} | {
    "in_flight": 0
}
"""The tally of a process that has counted nothing."""


class Counted(NamedTuple):
    """Series of all versions, named as the attributes of `Metrics` are, each by its label values."""

    request_s: Mapping[Labels, Distribution]
    decode_s: Mapping[Labels, Distribution]
    queue_s: Mapping[Labels, Distribution]
    gather_s: Mapping[Labels, Distribution]
    execute_s: Mapping[Labels, Distribution]
    encode_s: Mapping[Labels, Distribution]
    bucket_batches: Mapping[Labels, Count]
    padded_rows: Mapping[Labels, Count]

    @classmethod
    def here(cls, metrics: Metrics) -> Counted:
        """Returns the series of this process, which go on counting."""
        return cls(*(getattr(metrics, name).series for name in (*HISTOGRAMS, *COUNTERS)))

    @classmethod
    def read(cls, tally: Json) -> Counted:
        """Returns the series in a tally."""
        histograms = (
            {_labels(key): _distribution(*series) for key, series in tally[name].items()} for name in HISTOGRAMS
        )
        counters = ({_labels(key): _count(value) for key, value in tally[name].items()} for name in COUNTERS)
        return cls(*histograms, *counters)  # type: ignore[arg-type]


class ShadowKey(NamedTuple):
    """The shadow that a loading's answers in one mode are compared with."""

    mode: Mode
    """The mode that answered."""
    number: int
    """Number of the shadow's loading, which may be the loading that answered."""
    shadow_mode: Mode


def tally(
    counted: Counted,
    statistics: Mapping[int, Statistics],
    in_flight: int,
    failures: Failures | None = None,
    shadows: Mapping[int, Mapping[ShadowKey, Findings]] = NONE,
) -> Json:
    """Returns the tally of this process; `statistics` and `shadows` are by the numbers of the loadings of versions."""
    made: dict[str, Json] = {
        name: {_SEPARATOR.join(labels): [one.counts, one.total] for labels, one in getattr(counted, name).items()}
        for name in HISTOGRAMS
    }
    for name in COUNTERS:
        made[name] = {_SEPARATOR.join(labels): one.value for labels, one in getattr(counted, name).items()}
    made["statistics"] = {str(number): _statistics_to_json(one) for number, one in statistics.items()}
    made["shadows"] = {str(number): _shadows_to_json(found) for number, found in shadows.items() if found}
    made["in_flight"] = in_flight
    made["failures"] = {} if failures is None else dict(zip(FAILURES, failures.kept, strict=True))
    return made


def added(first: Json, second: Json) -> Json:
    """Returns the sum of two tallies, or of two parts of tallies at the same place."""
    if isinstance(first, dict):
        return {
            key: first.get(key, second.get(key))
            if key not in first or key not in second
            else max(first[key], second[key])
            if key in GREATEST
            else sorted(first[key] + second[key], key=_at_s)[-NEWEST[key] :]
            if key in NEWEST
            else added(first[key], second[key])
            for key in first | second
        }
    if isinstance(first, list):
        return [added(*each) for each in zip(first, second, strict=True)]
    return first + second


def lasting(tally: Json) -> Json:
    """Returns a tally without the numbers that end with its process: requests in flight."""
    return tally | {"in_flight": 0}


def select(tally: Json, loadings: Collection[int], versions: Collection[tuple[str, ...]]) -> Json:
    """Returns a tally with only these loadings, and with the series of only these names and versions of models."""
    kept = {
        name: {key: one for key, one in tally[name].items() if _labels(key)[:2] in versions}
        for name in (*HISTOGRAMS, *COUNTERS)
    }
    return renumbered(tally | kept, {number: number for number in loadings})


def renumbered(tally: Json, numbers: Mapping[int, int]) -> Json:
    """Returns a tally with new `numbers` for its loadings, by the old ones; loadings without a new number are left
    out."""
    statistics, shadows = tally["statistics"], tally["shadows"]
    return tally | {
        "statistics": {str(new): statistics[str(old)] for old, new in numbers.items() if str(old) in statistics},
        "shadows": {
            str(new): {
                _key(shadow._replace(number=numbers[shadow.number])): found
                for shadow, found in _shadows_from_json(shadows[str(old)])
                if shadow.number in numbers
            }
            for old, new in numbers.items()
            if str(old) in shadows
        },
    }


def failures_of(tally: Json) -> Iterator[Failure]:
    """Yields the last requests that failed, in no order."""
    return (Failure(*one) for name in FAILURES for one in tally["failures"].get(name, []))


def statistics_of(tally: Json, number: int) -> Statistics:
    """Returns the statistics of the loading `number`; zeros where the tally has none."""
    found = Statistics()
    numbers = tally["statistics"].get(str(number))
    if numbers is None:
        return found
    for name in _DURATIONS:
        setattr(found, name, Duration(*numbers[name]))
    for name in _NUMBERS:
        setattr(found, name, numbers[name])
    for name in _BY_SIZE:
        getattr(found, name).update({int(size): Duration(*each) for size, each in numbers[name].items()})
    return found


def findings_of(tally: Json, number: int, versions: Mapping[int, str]) -> dict[Pair, Findings]:
    """Returns the findings about shadows of the loading `number`. `versions` are the versions of loadings by their
    numbers; shadows of other loadings are left out."""
    return {
        Pair(shadow.mode, versions[shadow.number], shadow.shadow_mode): Findings(
            agreement=Mean(*found["agreement"]),
            iou=Mean(*found["iou"]),
            largest_difference=found.get("largest_difference"),
            time_ratios=deque((TimeRatio(*one) for one in found[TIME_RATIOS]), KEPT_PAIRS),
            dropped=Counter(found["dropped"]),
        )
        for shadow, found in _shadows_from_json(tally["shadows"].get(str(number), {}))
        if shadow.number in versions
    }


def _shadows_to_json(shadows: Mapping[ShadowKey, Findings]) -> Json:
    return {
        _key(shadow): {
            "agreement": [found.agreement.count, found.agreement.total],
            "iou": [found.iou.count, found.iou.total],
            **({} if found.largest_difference is None else {"largest_difference": found.largest_difference}),
            TIME_RATIOS: [[round(at_s, 3), round(ratio, 6)] for at_s, ratio in found.time_ratios],
            "dropped": dict(found.dropped),
        }
        for shadow, found in shadows.items()
    }


def _shadows_from_json(shadows: Json) -> Iterator[tuple[ShadowKey, Json]]:
    for key, found in shadows.items():
        mode, number, shadow_mode = _labels(key)
        yield ShadowKey(Mode(mode), int(number), Mode(shadow_mode)), found


def _key(shadow: ShadowKey) -> str:
    return _SEPARATOR.join(map(str, shadow))


def _statistics_to_json(statistics: Statistics) -> Json:
    durations = {name: _pair(getattr(statistics, name)) for name in _DURATIONS}
    by_size = {name: {str(size): _pair(each) for size, each in getattr(statistics, name).items()} for name in _BY_SIZE}
    return durations | by_size | {name: getattr(statistics, name) for name in _NUMBERS}


def _at_s(item: Sequence[Any]) -> float:
    return float(item[0])


def _pair(duration: Duration) -> list[float]:
    return [duration.count, duration.seconds]


def _labels(key: str) -> Labels:
    return tuple(key.split(_SEPARATOR))


def _distribution(counts: list[int], total: float) -> Distribution:
    made = Distribution(())
    made.counts, made.total = counts, total
    return made


def _count(value: int) -> Count:
    made = Count()
    made.inc(value)
    return made
