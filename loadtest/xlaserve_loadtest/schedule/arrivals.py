"""When requests are due: pure and seeded, so that the same arguments give the same schedule.

A schedule is an array of int64 nanoseconds after the start, ascending. Latency counts from these moments, not from when
the generator sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

Process = Literal["poisson", "constant"]
PROCESSES: Final[tuple[Process, ...]] = get_args(Process)
Schedule = NDArray[np.int64]

MEASURED_PART: Final = 1
"""Index of the measured part in `with_margins`: a part's seed has its index in it."""

_NS: Final = 1e9


class ArrivalsError(ValueError):
    """A replay that can't be read; the message says why."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of slots; a slot's next request is due at the moment when its last one was answered."""

    slots: int
    is_offline: bool = False
    """As many requests as the target can take: only throughput counts."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come on a schedule, independent of answers; `end_rate_per_s` makes it a ramp."""

    rate_per_s: float
    process: Process = "poisson"
    end_rate_per_s: float | None = None
    burst: int = 1
    """Requests that are due at the same moment; the rate counts each of them."""

    def mean_rate_per_s(self) -> float:
        """Returns requests per second over the whole duration."""
        return (self.rate_per_s + self.last_rate_per_s()) / 2

    def last_rate_per_s(self) -> float:
        """Returns the rate at the end."""
        return self.rate_per_s if self.end_rate_per_s is None else self.end_rate_per_s


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a profile, in which the rate goes evenly from one value to another."""

    rate_per_s: float
    end_rate_per_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """An open loop whose rate goes through stages."""

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


@dataclass(frozen=True, slots=True)
class Replay:
    """Requests come at recorded times: seconds after the start, ascending."""

    offsets_s: tuple[float, ...]

    def __post_init__(self) -> None:
        times = np.asarray(self.offsets_s, np.float64)
        if not times.size or not np.isfinite(times).all() or times[0] < 0 or (np.diff(times) < 0).any():
            raise ArrivalsError("replay: expected seconds from 0 on, ascending, at least one")

    def mean_rate_per_s(self) -> float:
        """Returns requests per second from the start to the last one."""
        return len(self.offsets_s) / self.duration_s()

    def duration_s(self) -> float:
        """Returns the seconds that hold all requests."""
        return self.offsets_s[-1] + 1e-9


Scheduled = OpenLoop | Profile | Replay
"""Loads whose requests are due at times of their own."""
Load = ClosedLoop | Scheduled


def schedule(load: Scheduled, duration_s: float, seed: Sequence[int]) -> Schedule:
    """Returns when requests are due in `duration_s`.

    A Poisson process of any rate is one of rate 1 whose time is stretched: the nth request is due when the integral of
    the rate reaches the nth event. For constant arrivals that is n.
    """
    if not duration_s:
        return np.empty(0, np.int64)
    if isinstance(load, Replay):
        times = np.asarray(load.offsets_s)
        return _nanoseconds(times[times < duration_s])
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


def with_margins(load: Scheduled, *, before_s: float, duration_s: float, after_s: float, seed: int) -> Schedule:
    """Returns a schedule with load at the first rate before the measured part, and at the last rate after it."""
    match load:
        case Replay():
            rate_per_s = load.mean_rate_per_s()
            before, after = OpenLoop(rate_per_s), OpenLoop(rate_per_s)
        case OpenLoop():
            before = OpenLoop(load.rate_per_s, load.process, burst=load.burst)
            after = OpenLoop(load.last_rate_per_s(), load.process, burst=load.burst)
        case Profile():
            before = OpenLoop(load.stages[0].rate_per_s, load.process, burst=load.burst)
            after = OpenLoop(load.stages[-1].end_rate_per_s, load.process, burst=load.burst)
    parts = ((before, before_s, 0.0), (load, duration_s, before_s), (after, after_s, before_s + duration_s))
    return np.concatenate(
        [
            schedule(part, length_s, (seed, number)) + round(start_s * _NS)
            for number, (part, length_s, start_s) in enumerate(parts)
        ]
    )


def split(whole: Schedule, workers: int) -> list[Schedule]:
    """Returns each worker's share: the requests dealt out in turn, none lost, none twice."""
    return [whole[worker::workers] for worker in range(workers)]


def read(path: Path) -> Replay:
    """Reads seconds, one a line, or JSON objects with `at_s`. Raises ArrivalsError."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        times = []
        for line in lines:
            if line and not line.startswith("#"):
                value = json.loads(line)
                times.append(float(value["at_s"] if isinstance(value, dict) else value))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArrivalsError(f"{path}: expected seconds, one a line: {error}") from None
    return Replay(tuple(times))


def write(path: Path, times: Schedule) -> None:
    """Writes a schedule that `read` reads back to the nanosecond."""
    path.write_text("# seconds after the start, one request a line\n" + "".join(f"{t / _NS:.9f}\n" for t in times))


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
    """Returns when the integral of the rate over the stages reaches each of `events`."""
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
