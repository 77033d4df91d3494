"""The one list of questions that metrics answer, of which dashboards, rules, alerts and a page of the docs are made.

In a query `$where` stands for matchers of labels, `$window` for a range and `$by` for the labels that an answer is
grouped by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from string import Template
from typing import Final

from xlaserve.telemetry.access_log import LEVELS

WINDOW: Final = "5m"
FAILURES: Final = "|".join(sorted(LEVELS))
"""Statuses that are the server's fault, or of what it could not serve in time. Others are the clients' doing."""
STAGES: Final = {
    "decode": "decoding its images",
    "queue": "waiting in the queue",
    "gather": "copying its batch together",
    "execute": "running its batch",
    "encode": "making its response",
}
SLOW_S: Final = 0.25
"""A request that takes longer is slow to the objective of latency; one of the bounds of the histogram."""


class Unit(Enum):
    """What a number counts."""

    REQUESTS_PER_S = "requests/s"
    IMAGES_PER_S = "images/s"
    BATCHES_PER_S = "batches/s"
    SHARE = "from 0 to 1"
    SECONDS = "s"
    LANES = "lanes"
    CORES = "cores"
    BYTES = "bytes"
    WATTS = "W"
    JOULES = "J"
    COUNT = "count"


class Scope(Enum):
    """What an answer is about: the labels that narrow it."""

    MODEL = ("job", "instance", "model", "version")
    SERVER = ("job", "instance")
    GPU = ("job", "instance", "gpu")
    LOADTEST = ("arm", "load")


@dataclass(frozen=True)
class Question:
    """A plain question with the PromQL that answers it."""

    name: str
    text: str
    query: str
    unit: Unit
    scope: Scope
    by: tuple[str, ...]
    """Labels that an answer has a number for each of."""

    def promql(
        self, *, where: Mapping[str, str] | None = None, by: Sequence[str] | None = None, window: str = WINDOW
    ) -> str:
        """Returns the query. `where` maps labels to matchers such as `=~"a|b"`; those of other scopes are left out."""
        matchers = ", ".join(f"{label}{match}" for label, match in (where or {}).items() if label in self.scope.value)
        grouped = ", ".join(self.by if by is None else by)
        text = Template(" ".join(self.query.split())).substitute(where=matchers, by=grouped, window=window)
        return re.sub(r"(?<=[{(]), ", "", text).replace("{}", "")


def _total(metric: str, *matchers: str) -> str:
    """Returns the growth of a counter in each second."""
    return f"sum by ($by) (rate({metric}{{{', '.join(('$where', *matchers))}}}[$window]))"


def _quantile(quantile: float, metric: str, *matchers: str) -> str:
    labels = ", ".join(("$where", *matchers))
    return f"histogram_quantile({quantile}, sum by ($by, le) (rate({metric}_bucket{{{labels}}}[$window])))"


def _or_zero(part: str, whole: str) -> str:
    """Returns `part`, which is 0 where nothing of it was ever counted."""
    return f"({part} or 0 * {whole})"


_ALL: Final = _total("xlaserve_requests_total")
_FAILED: Final = _total("xlaserve_requests_total", f'status=~"{FAILURES}"')
_WRONG: Final = _total("xlaserve_requests_total", f'status!~"OK|{FAILURES}"')
_ANSWERED: Final = _total("xlaserve_request_seconds_count", 'status="OK"')
_IN_TIME: Final = _total("xlaserve_request_seconds_bucket", 'status="OK"', f'le="{SLOW_S:g}"')
_LIMITED: Final = _total("xlaserve_refusal_seconds_count", 'reason="limit"')
_IMAGES: Final = _total("xlaserve_images_total")
_ROWS: Final = _total("xlaserve_batch_size_sum")
_PADDING: Final = _total("xlaserve_padded_rows_total")
_EXECUTE: Final = _total("xlaserve_execute_seconds_sum")
_BUSY: Final = _total("xlaserve_lane_busy_seconds_total")
_LANES: Final = "sum by ($by) (xlaserve_lanes{$where})"
_LOADS: Final = "sum by ($by) (xlaserve_cache_loads_total{$where})"
_COMPILED: Final = "sum by ($by) (xlaserve_compilations_total{$where})"
_OURS: Final = "and on (job, instance) xlaserve_build_info"
"""Of all processes whose metrics Prometheus has, servers only."""
_WHOLE: Final = 'role=~"|supervisor"'
"""The process that lives as long as its server: the only one, or the supervisor of several."""
_DUE: Final = " + ".join(_total(f"loadtest_live_{what}_total") for what in ("answers", "errors", "dropped"))


def _model(name: str, text: str, query: str, unit: Unit, *by: str) -> Question:
    return Question(name, text, query, unit, Scope.MODEL, by or ("model",))


def _server(name: str, text: str, query: str, unit: Unit, *by: str) -> Question:
    return Question(name, text, query, unit, Scope.SERVER, by or ("instance",))


def _gpu(name: str, text: str, query: str, unit: Unit) -> Question:
    return Question(name, text, query, unit, Scope.GPU, ("instance", "gpu"))


def _loadtest(name: str, text: str, query: str, unit: Unit) -> Question:
    return Question(name, text, query, unit, Scope.LOADTEST, ("arm", "load"))


SECTIONS: Final[Mapping[str, tuple[Question, ...]]] = {
    "Traffic": (
        _model("requests", "How many requests end each second, errors too?", _ALL, Unit.REQUESTS_PER_S),
        _model("images", "How many images are answered each second?", _IMAGES, Unit.IMAGES_PER_S),
    ),
    "Errors": (
        _model(
            "failed",
            "Which share of requests fails by the server's fault, or is not served in time? What a caller's own limits"
            " refuse is left out.",
            f"({_or_zero(_FAILED, _ALL)} - {_or_zero(_LIMITED, _ALL)}) / {_ALL}",
            Unit.SHARE,
        ),
        _model(
            "wrong",
            "Which share of requests fails by the client's fault?",
            f"{_or_zero(_WRONG, _ALL)} / {_ALL}",
            Unit.SHARE,
        ),
        _model(
            "refusals",
            "How many requests are refused for overload each second, and why?",
            _total("xlaserve_refusal_seconds_count"),
            Unit.REQUESTS_PER_S,
            "reason",
        ),
        _server(
            "limited",
            "Whose limits refuse how many requests each second?",
            _total("xlaserve_requests_limited_total"),
            Unit.REQUESTS_PER_S,
            "caller",
            "limit",
        ),
        _model(
            "failed_batches",
            "How many batches raise each second?",
            _total("xlaserve_failed_batches_total"),
            Unit.BATCHES_PER_S,
        ),
    ),
    "Latency": (
        _model(
            "latency_p50",
            "How long does half of the answered requests take at most?",
            _quantile(0.5, "xlaserve_request_seconds", 'status="OK"'),
            Unit.SECONDS,
        ),
        _model(
            "latency_p99",
            "How long do 99% of the answered requests take at most?",
            _quantile(0.99, "xlaserve_request_seconds", 'status="OK"'),
            Unit.SECONDS,
        ),
        _model(
            "slow",
            f"Which share of the answered requests takes longer than {SLOW_S:g} s?",
            f"1 - {_IN_TIME} / {_ANSWERED}",
            Unit.SHARE,
        ),
        *(
            _model(
                f"{stage}_p{percent}",
                f"How long do {percent}% of the requests spend {what} at most?",
                _quantile(percent / 100, f"xlaserve_{stage}_seconds"),
                Unit.SECONDS,
            )
            for percent in (50, 99)
            for stage, what in STAGES.items()
        ),
    ),
    "Batches": (
        _model(
            "batch_size",
            "How many images does a batch hold, on average?",
            f"{_ROWS} / {_total('xlaserve_batch_size_count')}",
            Unit.COUNT,
        ),
        _model(
            "batch_fill",
            "Which share of the rows that run are images?",
            f"{_ROWS} / ({_ROWS} + {_PADDING})",
            Unit.SHARE,
        ),
        _model(
            "padding_waste",
            "How many lanes are busy with padding, if each row of a batch takes the same time?",
            f"{_EXECUTE} * {_PADDING} / ({_ROWS} + {_PADDING})",
            Unit.LANES,
        ),
        _model(
            "buckets",
            "Which buckets do batches run in?",
            _total("xlaserve_bucket_batches_total"),
            Unit.BATCHES_PER_S,
            "bucket",
        ),
    ),
    "Saturation": (
        _server("lane_use", "Which share of the lanes is busy?", f"{_BUSY} / {_LANES}", Unit.SHARE),
        _server(
            "queued_work",
            "How long will the lanes be busy with the images that wait now? The signal to scale on.",
            f"sum by ($by) (xlaserve_queued_work_seconds{{$where}}) / {_LANES}",
            Unit.SECONDS,
        ),
        _model(
            "queue_use",
            "How near is a queue to its limit of images or bytes, beyond which requests are refused?",
            "max by ($by) ((xlaserve_in_flight_images{$where} / xlaserve_in_flight_images_limit{$where}) >"
            " (xlaserve_in_flight_bytes{$where} / xlaserve_in_flight_bytes_limit{$where})"
            " or xlaserve_in_flight_bytes{$where} / xlaserve_in_flight_bytes_limit{$where})",
            Unit.SHARE,
        ),
        _server(
            "message_use",
            "How near are the messages that are held to their limit?",
            "max by ($by) (xlaserve_in_flight_message_bytes{$where} / xlaserve_in_flight_message_bytes_limit{$where})",
            Unit.SHARE,
        ),
        _server(
            "in_flight",
            "How many requests are accepted and not yet answered?",
            "sum by ($by) (xlaserve_in_flight_requests{$where})",
            Unit.COUNT,
        ),
        _server(
            "headroom",
            "How many more images could be answered each second, with batches as they are now? Fuller ones allow more.",
            f"{_IMAGES} / {_BUSY} * ({_LANES} - {_BUSY})",
            Unit.IMAGES_PER_S,
        ),
    ),
    "Compilation": (
        _server(
            "serving_compilations",
            "How many programs were compiled in traffic? Any is one too many.",
            'sum by ($by) (increase(xlaserve_xla_compilations_total{$where, phase="serving"}[$window]))',
            Unit.COUNT,
        ),
        _model(
            "compilations",
            "How many programs were compiled since the start, and when?",
            f"{_COMPILED} or on (model) 0 * {_LOADS}",
            Unit.COUNT,
            "model",
            "phase",
        ),
        _model(
            "cache_hits",
            "Which share of the programs came from the compile cache?",
            f"{_or_zero(_LOADS, _COMPILED)} / ({_or_zero(_LOADS, _COMPILED)} + {_or_zero(_COMPILED, _LOADS)})",
            Unit.SHARE,
        ),
        _model(
            "compile_seconds",
            "How long did compiling a program take, on average since the start?",
            "sum by ($by) (xlaserve_compile_seconds_sum{$where})"
            " / sum by ($by) (xlaserve_compile_seconds_count{$where})",
            Unit.SECONDS,
            "model",
            "mode",
        ),
    ),
    "Cost": (
        _model(
            "image_cost",
            "How many seconds of a lane does an image cost?",
            f"{_EXECUTE} / {_IMAGES}",
            Unit.SECONDS,
        ),
        _server(
            "image_energy",
            "What energy of the machine's GPUs does an image cost, idle time included?",
            f"{_total('xlaserve_gpu_energy_joules_total')} / {_IMAGES}",
            Unit.JOULES,
        ),
    ),
    "What serves": (
        _server("ready", "Which servers are ready?", "sum by ($by) (xlaserve_ready{$where})", Unit.COUNT),
        _server(
            "builds",
            "How many servers run which version, on what?",
            "count by ($by) (xlaserve_build_info{$where})",
            Unit.COUNT,
            "version",
            "tensorflow",
            "device_name",
        ),
        _model(
            "models",
            "Which versions of which models serve, and how?",
            "count by ($by) (xlaserve_model_info{$where})",
            Unit.COUNT,
            "model",
            "version",
            "task",
            "mode",
            "precision",
        ),
        _model(
            "model_states",
            "In how many servers is a version of a model in which state?",
            "sum by ($by) (xlaserve_model_state{$where}) > 0",
            Unit.COUNT,
            "model",
            "version",
            "state",
        ),
        _model(
            "warnings",
            "How many warnings about a model are there?",
            "max by ($by) (xlaserve_model_warnings{$where})",
            Unit.COUNT,
        ),
        _model(
            "shadow_agreement",
            "How far do a model's answers and its shadow's agree?",
            f"{_total('xlaserve_shadow_agreement_sum')} / {_total('xlaserve_shadow_agreement_count')}",
            Unit.SHARE,
            "model",
            "mode",
            "shadow_mode",
        ),
    ),
    "Process and machine": (
        _server(
            "cores",
            "How many cores does a server use? `role` says which of its processes.",
            f"sum by ($by) (rate(process_cpu_seconds_total{{$where}}[$window]) {_OURS})",
            Unit.CORES,
        ),
        _server(
            "memory",
            "How much memory does a server hold? What its processes share, such as pixels of requests, counts in each.",
            f"sum by ($by) (process_resident_memory_bytes{{$where}} {_OURS})",
            Unit.BYTES,
        ),
        _server(
            "file_use",
            "Which share of the file descriptors that a server may open are open?",
            f"max by ($by) (process_open_fds{{$where}} / process_max_fds{{$where}} {_OURS})",
            Unit.SHARE,
        ),
        _server(
            "restarts",
            "How often was a server started again within the hour?",
            f"max by ($by) (changes(process_start_time_seconds{{$where, {_WHOLE}}}[1h])"
            " and on (job, instance) last_over_time(xlaserve_build_info[1h]))",
            Unit.COUNT,
        ),
        _server(
            "process_restarts",
            "How often did a process of a server end unasked, and was replaced, within the hour?",
            "sum by ($by) (increase(xlaserve_process_restarts_total{$where}[1h]))",
            Unit.COUNT,
        ),
        _server(
            "certificate",
            "How long is the server's certificate valid?",
            "min by ($by) (xlaserve_certificate_expiry_timestamp_seconds{$where}) - time()",
            Unit.SECONDS,
        ),
        _gpu(
            "gpu_use",
            "Which share of the time does a GPU compute?",
            "avg by ($by) (avg_over_time(xlaserve_gpu_utilization_ratio{$where}[$window]))",
            Unit.SHARE,
        ),
        _gpu(
            "gpu_memory_use",
            "How full is a GPU's memory?",
            "max by ($by) (xlaserve_gpu_memory_used_bytes{$where} / xlaserve_gpu_memory_size_bytes{$where})",
            Unit.SHARE,
        ),
        _gpu(
            "gpu_power",
            "What does a GPU draw?",
            "sum by ($by) (xlaserve_gpu_power_watts{$where})",
            Unit.WATTS,
        ),
    ),
    "A load test (`--live-port`)": (
        _loadtest(
            "loadtest_requests",
            "How many requests does the load test get answered each second?",
            _total("loadtest_live_answers_total"),
            Unit.REQUESTS_PER_S,
        ),
        _loadtest("loadtest_images", "How many images?", _total("loadtest_live_images_total"), Unit.IMAGES_PER_S),
        _loadtest(
            "loadtest_failed",
            "Which share of its requests fails, or was never sent?",
            f"({_total('loadtest_live_errors_total')} + {_total('loadtest_live_dropped_total')}) / ({_DUE})",
            Unit.SHARE,
        ),
        _loadtest(
            "loadtest_latency_p50",
            "How long does half of the answers take at most, from the time a request was due?",
            _quantile(0.5, "loadtest_live_latency_seconds"),
            Unit.SECONDS,
        ),
        _loadtest(
            "loadtest_latency_p99",
            "And 99% of them?",
            _quantile(0.99, "loadtest_live_latency_seconds"),
            Unit.SECONDS,
        ),
        _loadtest(
            "loadtest_active",
            "Which arm and load are measured now?",
            "max by ($by) (loadtest_live_active{$where})",
            Unit.COUNT,
        ),
    ),
}

QUESTIONS: Final = {question.name: question for section in SECTIONS.values() for question in section}
