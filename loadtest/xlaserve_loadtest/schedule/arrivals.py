"""Arrival processes: the times at which requests are due, pure and seeded, so that equal arguments give equal
schedules.

A schedule is an ascending array of int64 nanoseconds after the start. Latency counts from these times, not from the
time at which the generator sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.schedule.mix import Kind

Process = Literal["poisson", "constant"]
PROCESSES: Final[tuple[Process, ...]] = get_args(Process)
Schedule = NDArray[np.int64]
Places = NDArray[np.int32]
"""Indices in a sequence of requests or of their kinds."""

MAX_CONCURRENCY: Final = 10_000
"""Requests under way at most: each takes about 35 kB of a worker, and cancelling so many takes it a second."""
MEASURED_PART: Final = 1
"""Index of the measured part in `with_margins`: a part's seed has its index in it."""

_NS: Final = 1e9
_MAX_PLACE: Final = np.iinfo(np.int32).max
"""So large that the remainder by any number of requests is drawn evenly."""
_MIN_MARGIN_S: Final = 1.0
"""Least duration in seconds that is assumed of a replay, to choose the rate before and after it: `--duration` may cut
it short."""
_LAST_SLOT_S: Final = 1.0
"""Seconds that a replay lasts after its only moment, where all its requests are due at the same time."""


class ArrivalsError(ValueError):
    """A profile or a trace that can't be read; the message says why."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A load of a fixed number of slots; a slot's next request is due when its previous one was answered."""

    slots: int
    is_offline: bool = False
    """Whether all requests are available at once, so that only throughput counts."""

    def duration_s(self) -> None:
        """Returns None: the load has no duration of its own."""

    def document(self) -> Mapping[str, Any]:
        """Returns the form in a run file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A load whose requests are due by a schedule, independent of answers; with `end_rate_per_s` its rate is a ramp."""

    rate_per_s: float
    process: Process = "poisson"
    end_rate_per_s: float | None = None
    burst: int = 1
    """Number of requests that are due at the same moment; the rate counts each of them."""

    def mean_rate_per_s(self) -> float:
        """Returns requests per second over the whole duration."""
        return (self.rate_per_s + self.last_rate_per_s()) / 2

    def last_rate_per_s(self) -> float:
        """Returns the rate at the end."""
        return self.rate_per_s if self.end_rate_per_s is None else self.end_rate_per_s

    def duration_s(self) -> None:
        """Returns None: the load has no duration of its own."""

    def margins(self) -> tuple[OpenLoop, OpenLoop]:
        """Returns the loads before and after the measured part: at the first rate, and at the last."""
        last = self.last_rate_per_s()
        return replace(self, end_rate_per_s=None), replace(self, rate_per_s=last, end_rate_per_s=None)

    def document(self) -> Mapping[str, Any]:
        """Returns the form in a run file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a profile, in which the rate changes linearly from one value to another."""

    rate_per_s: float
    end_rate_per_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """An open loop whose rate follows stages, one after the other."""

    stages: tuple[Stage, ...]
    process: Process = "poisson"
    burst: int = 1

    def __post_init__(self) -> None:
        numbers = [value for stage in self.stages for value in (stage.rate_per_s, stage.end_rate_per_s)]
        lengths_s = [stage.duration_s for stage in self.stages]
        if not all(0 <= value < math.inf for value in numbers) or not all(0 < value < math.inf for value in lengths_s):
            raise ArrivalsError("profile: expected rates from 0 on, and seconds over 0")
        if not any(numbers):
            raise ArrivalsError("profile: expected a rate over 0")

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Reads stages such as `0..100:10,100:30,100..0:10`: rates and seconds. Raises ArrivalsError."""
        stages = []
        for part in text.split(","):
            rates, colon, duration_s = part.partition(":")
            first, _, last = rates.partition("..")
            try:
                if not colon:
                    raise ValueError
                stages.append(Stage(float(first), float(last or first), float(duration_s)))
            except ValueError:
                expected = "RATE:SECONDS or FROM..TO:SECONDS with commas between"
                raise ArrivalsError(f"profile: expected {expected}, got {text!r}") from None
        return cls(tuple(stages))

    def mean_rate_per_s(self) -> float:
        """Returns requests per second over all stages."""
        due = sum((stage.rate_per_s + stage.end_rate_per_s) / 2 * stage.duration_s for stage in self.stages)
        return due / self.duration_s()

    def duration_s(self) -> float:
        """Returns the seconds of all stages."""
        return sum(stage.duration_s for stage in self.stages)

    def margins(self) -> tuple[OpenLoop, OpenLoop]:
        """Returns the loads before and after the measured part: at the first rate, and at the last."""
        first, last = self.stages[0].rate_per_s, self.stages[-1].end_rate_per_s
        return OpenLoop(first, self.process, burst=self.burst), OpenLoop(last, self.process, burst=self.burst)

    def document(self) -> Mapping[str, Any]:
        """Returns the form in a run file."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """An open loop whose requests are of recorded kinds and due at recorded times."""

    due_ns: Schedule
    """Nanoseconds after the start, ascending; at least one."""
    kinds: tuple[Kind, ...] = (Kind(),)
    """The distinct kinds of requests."""
    places: Places | None = None
    """Index in `kinds` of each request; None where all are of the first kind."""
    path: str = ""
    """The trace file."""
    sha256: str = ""
    """Hash of that file."""
    ends_s: float = math.inf
    """Seconds after the start at which it was cut; infinite where it is whole."""

    def sequence(self) -> list[Kind]:
        """Returns the kind of each request."""
        if self.places is None:
            return [self.kinds[0]] * self.due_ns.size
        return [self.kinds[place] for place in self.places.tolist()]

    def mean_rate_per_s(self) -> float:
        """Returns requests per second."""
        return self.due_ns.size / self.duration_s()

    def duration_s(self) -> float:
        """Returns its duration: until its last moment, and then as long as its moments are apart on average.

        A trace of a single moment lasts a second longer. A trace that was cut ends where it was cut.
        """
        moments = np.unique(self.due_ns)
        gap_s = float(moments[-1] - moments[0]) / (moments.size - 1) / _NS if moments.size > 1 else _LAST_SLOT_S
        return min(float(moments[-1]) / _NS + gap_s, self.ends_s)

    def margins(self) -> tuple[OpenLoop, OpenLoop]:
        """Returns the loads before and after the measured part, at the mean rate."""
        around = OpenLoop(self.due_ns.size / max(self.duration_s(), _MIN_MARGIN_S))
        return around, around

    def document(self) -> Mapping[str, Any]:
        """Returns the form in a run file, which identifies the trace but does not contain it."""
        images = [kind.images for kind in self.kinds]
        return {
            "path": self.path,
            "sha256": self.sha256,
            "requests": self.due_ns.size,
            "duration_s": self.duration_s(),
            "kinds": len(self.kinds),
            "models": len({kind.model for kind in self.kinds}),
            "images_per_request": [min(images), max(images)],
            "sizes": len({kind.size for kind in self.kinds}),
            "files": len({kind.file for kind in self.kinds if kind.file is not None}),
        }


Scheduled = OpenLoop | Profile | Replay
"""Loads with a schedule."""
Load = ClosedLoop | Scheduled


class Sends(NamedTuple):
    """The requests of a schedule, in the order in which they are due."""

    due_ns: Schedule
    requests: Places
    """Index of each in the arm's sequence of requests, modulo its length."""


def schedule(load: Scheduled, duration_s: float, seed: Sequence[int]) -> Schedule:
    """Returns the times in `duration_s` at which requests are due.

    A Poisson process of any rate is one of rate 1 whose time is stretched: the nth request is due when the integral of
    the rate reaches the nth event. For constant arrivals that is n.
    """
    if not duration_s:
        return np.empty(0, np.int64)
    if isinstance(load, Replay):
        return load.due_ns[: np.searchsorted(load.due_ns, round(duration_s * _NS))]
    stages = _stages(load, duration_s)
    # A burst is one event of a slower process.
    expected = sum((stage.rate_per_s + stage.end_rate_per_s) / 2 * stage.duration_s for stage in stages) / load.burst
    match load.process:
        case "constant":
            events = np.arange(int(np.ceil(expected)), dtype=np.float64)
        case "poisson":
            events = _unit_poisson(expected, np.random.default_rng(tuple(seed)))
        case _:
            assert_never(load.process)
    times = _inverse(stages, events[events < expected] * load.burst)
    return _nanoseconds(np.repeat(times[times < duration_s], load.burst))


def with_margins(
    load: Scheduled,
    *,
    before_s: float,
    duration_s: float,
    after_s: float,
    seed: int,
    sample_seed: int | None = None,
) -> Sends:
    """Returns a schedule with load at the first rate before the measured part, and at the last rate after it.

    The measured part sends the arm's requests in turn, from the first one on; with `sample_seed` it draws them at
    random, as the parts before and after it always do.
    """
    first, last = load.margins()
    parts = ((first, before_s, 0.0), (load, duration_s, before_s), (last, after_s, before_s + duration_s))
    due_ns = [
        schedule(part, length_s, (seed, number)) + round(start_s * _NS)
        for number, (part, length_s, start_s) in enumerate(parts)
    ]
    random = np.random.default_rng((seed if sample_seed is None else sample_seed, len(parts)))
    chosen = [random.integers(_MAX_PLACE, size=own.size, dtype=np.int32) for own in due_ns]
    if sample_seed is None:
        chosen[MEASURED_PART] = np.arange(due_ns[MEASURED_PART].size, dtype=np.int32)
    return Sends(np.concatenate(due_ns), np.concatenate(chosen))


def split(whole: Sends, workers: int) -> list[Sends]:
    """Returns the part of each worker: request i goes to worker i modulo `workers`."""
    return [Sends(whole.due_ns[worker::workers], whole.requests[worker::workers]) for worker in range(workers)]


def _unit_poisson(length: float, generator: np.random.Generator) -> NDArray[np.float64]:
    chunk = int(length + 6 * np.sqrt(length) + 16)
    events = np.cumsum(generator.exponential(size=chunk))
    while events[-1] < length:
        events = np.concatenate([events, events[-1] + np.cumsum(generator.exponential(size=chunk))])
    return events


def _stages(load: OpenLoop | Profile, duration_s: float) -> tuple[Stage, ...]:
    if isinstance(load, Profile):
        return load.stages
    return (Stage(load.rate_per_s, load.last_rate_per_s(), duration_s),)


def _inverse(stages: Sequence[Stage], events: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the seconds at which the integral of the rate over the stages reaches each of `events`."""
    start = np.array([stage.rate_per_s for stage in stages])
    length_s = np.array([stage.duration_s for stage in stages])
    growth = (np.array([stage.end_rate_per_s for stage in stages]) - start) / length_s
    due = np.cumsum([0.0, *(start * length_s + growth * length_s**2 / 2)[:-1]])
    own = np.searchsorted(due, events, side="right") - 1
    start, growth, left = start[own], growth[own], events - due[own]
    # Solves start * t + growth * t**2 / 2 = left, in the form that loses no digits where growth is small.
    root = np.sqrt(np.maximum(start * start + 2 * growth * left, 0.0))
    within = np.zeros_like(events)
    np.divide(2 * left, start + root, out=within, where=left > 0)
    times: NDArray[np.float64] = within + np.cumsum([0.0, *length_s[:-1]])[own]
    return times


def _nanoseconds(times_s: NDArray[np.float64]) -> Schedule:
    return np.round(times_s * _NS).astype(np.int64)
