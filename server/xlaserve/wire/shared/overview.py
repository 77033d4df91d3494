"""The state of the server and its models for operators, as plain data with the keys and values of its JSON.

Counts only grow while a version is loaded, so that rates are differences of two looks.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from xlaserve import __version__
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.models.version import Version
from xlaserve.telemetry.counts import Distribution
from xlaserve.telemetry.metrics import SECONDS, tensorflow_version
from xlaserve.telemetry.resources import process_usage
from xlaserve.telemetry.tally import Counted, Labels
from xlaserve.telemetry.version_metrics import Statistics
from xlaserve.wire.shared.backend import Backend
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.models import described_inputs, source_name

Json = dict[str, Any]
Series = TypeVar("Series")

OK: Final = "OK"
MAX_REASON_LENGTH: Final = 1000
"""Characters of why a model failed: it may be a trace."""


@dataclass(eq=False)
class Overview:
    """Reads the state of one server. All methods run on its event loop."""

    calls: Calls
    backend: Backend
    is_ready: Callable[[], bool]
    addresses: Callable[[], Json]
    """HOST:PORT by protocol, null where it does not listen."""
    supervisor: int | None = None
    """The process that has started this one and the other ones of the server; None for one process."""

    def __post_init__(self) -> None:
        self._started_at = time.monotonic()

    async def server(self) -> Json:
        """Returns what the server is, and its counts."""
        processes = await asyncio.to_thread(process_usage, self.supervisor)
        device = self.backend.device
        return {
            "name": "xlaserve",
            "version": __version__,
            "python": platform.python_version(),
            "tensorflow": tensorflow_version(),
            "addresses": self.addresses(),
            "is_ready": self.is_ready(),
            "clock_s": time.monotonic(),
            "up_s": time.monotonic() - self._started_at,
            "device": {"kind": device.kind, "name": device.name, "count": device.count},
            "lanes": {"count": device.lanes, "threads": device.threads_per_lane, "busy_s": self.backend.lane_busy_s},
            "cores": os.cpu_count(),
            "processes": [process._asdict() for process in processes],
            "in_flight_requests": self.calls.in_flight + self.backend.in_flight_elsewhere,
            "compiled_while_serving": len(self.backend.unexpected),
            "is_watched": self.backend.is_watched,
            "bounds_s": [*SECONDS],
        }

    async def count(self) -> None:
        """Has what follows show what all processes have counted until now."""
        await self.backend.count()

    def versions(self) -> list[Version]:
        """Returns each version of each model once."""
        return self.calls.directory.versions()

    def models(self, versions: Iterable[Version]) -> Iterator[Json]:
        """Yields what a list of models shows of each of `versions`."""
        latency = _by_version(self.backend.counted.request_s)
        for version in versions:
            yield _summary(version, self.backend.statistics(version), latency[_key(version)])

    def model(self, version: Version) -> Json:
        """Returns all that is known of a version."""
        counted = self.backend.counted
        return {
            **_summary(version, self.backend.statistics(version), _by_version(counted.request_s)[_key(version)]),
            **_description(version),
            "stages": _stages(version, counted),
            "buckets": [*_buckets(version, counted)],
            "padded_rows": sum(count.value for labels, count in _of(version, counted.padded_rows.items())),
            "ledger": [*map(_program, version.ledger)],
        }

    def failures(self) -> list[tuple[str, Json]]:
        """Returns the last requests that failed, the newest first, each after the model that it named."""
        failures = self.backend.failures(self.calls.failures)
        return [(failure.model, failure._asdict()) for failure in failures]


def _summary(version: Version, statistics: Statistics, latency: Collection[Distribution]) -> Json:
    served = version.served
    found = {
        "name": version.name,
        "version": version.settings.version,
        "state": str(version.state),
        "reason": version.reason[:MAX_REASON_LENGTH],
        "task": version.model.task.name if version.model else "",
        "mode": str(version.settings.effective_default_mode),
        "programs": len(version.ledger),
        "programs_total": version.programs_total,
        "warnings": len(version.warnings),
        "images": statistics.images,
        "requests": statistics.success.count,
        "failed": statistics.fail.count,
        "total": _histogram(latency),
    }
    if served is not None:
        live = served.engine.live()
        found |= {
            "waiting_images": live.waiting_images,
            "queued_work_s": live.queued_work_s,
            "in_flight_images": live.in_flight_images,
            "in_flight_images_limit": live.in_flight_images_limit,
        }
    return found


def _description(version: Version) -> Json:
    settings, model = version.settings, version.model
    return {
        "source": source_name(settings.source),
        "weights": model.weights if model else "",
        "pixels": model.pixels if model else "",
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [*shape], "is_image": image is not None}
            for name, datatype, shape, image in (described_inputs(version.served) if version.served else ())
        ],
        "task_reason": model.reason if model else "",
        "fit": model.fit if model else "",
        "resize": str(model.resize) if model else "",
        "precision": version.precision_text,
        "decode": version.decode_text,
        "examples": version.examples_text,
        "modes": [*settings.modes],
        "warnings": [*version.warnings],
    }


def _stages(version: Version, counted: Counted) -> Json:
    by_stage = {
        "decode": counted.decode_s,
        "queue": counted.queue_s,
        "gather": counted.gather_s,
        "execute": counted.execute_s,
        "encode": counted.encode_s,
    }
    return {
        stage: _histogram([series for _, series in _of(version, histogram.items())])
        for stage, histogram in by_stage.items()
    }


def _buckets(version: Version, counted: Counted) -> Iterator[Json]:
    """Yields the buckets that serve, with what a batch takes."""
    if version.served is None:
        return
    measured = {(entry.mode, entry.bucket): entry.cost for entry in version.ledger}
    ran = Counter({labels[2:]: count.value for labels, count in _of(version, counted.bucket_batches.items())})
    for mode, bucket, turn in version.served.engine.live().turns:
        runs_in = version.auto.get(bucket, mode) if mode not in version.settings.compiled_modes else mode
        yield {
            "mode": mode,
            "runs_in": runs_in,
            "bucket": str(bucket),
            "batch": bucket.batch,
            "run": _cost(measured.get((runs_in, bucket))),
            "turn": _cost(turn.cost),
            "batches": ran[mode, str(bucket)],
        }


def _program(entry: Entry) -> Json:
    verified = entry.verified
    return {
        "mode": entry.mode,
        "bucket": str(entry.bucket),
        "at_s": entry.at.timestamp(),
        "trace_s": entry.trace_s,
        "compile_s": entry.compile_s,
        "run": _cost(entry.cost),
        "from_cache": entry.from_cache,
        "in_background": entry.in_background,
        "difference": verified.difference.largest if verified and verified.difference else None,
        "fault": verified.fault.text if verified and verified.fault else "",
    }


def _cost(cost: Cost | None) -> Json | None:
    return None if cost is None else {"alone_s": cost.alone_s, "loaded_s": cost.loaded_s}


def _histogram(series: Collection[Distribution]) -> Json:
    """Returns their sum: observations up to each bound and above the one before, without the zeros at the end."""
    counts = [sum(column) for column in zip(*(one.counts for one in series), strict=True)]
    while counts and not counts[-1]:
        counts.pop()
    return {"counts": counts, "total_s": sum(one.total for one in series)}


def _by_version(request_s: Mapping[Labels, Distribution]) -> defaultdict[tuple[str, ...], list[Distribution]]:
    """Returns how long requests took that succeeded, by model and version."""
    found: defaultdict[tuple[str, ...], list[Distribution]] = defaultdict(list)
    for labels, series in request_s.items():
        if labels[-1] == OK:
            found[labels[:2]].append(series)
    return found


def _of(version: Version, series: Iterable[tuple[tuple[str, ...], Series]]) -> Iterator[tuple[tuple[str, ...], Series]]:
    key = _key(version)
    return (each for each in series if each[0][:2] == key)


def _key(version: Version) -> tuple[str, str]:
    return version.name, version.settings.version
