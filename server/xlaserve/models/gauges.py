"""The gauges of models on /metrics: each is a function of a version, registered with its name, help and labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.core import Metric

from xlaserve.config import Mode
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.engine.warmup.verify import Verified
from xlaserve.models.version import State, Version
from xlaserve.telemetry.metrics import gauge_family

Series = Iterable[tuple[tuple[str, ...], float]]
"""Numbers, each after the values of the labels that follow `model` and `version`."""

Read = Callable[[Version], Series]


class _Gauge(NamedTuple):
    name: str
    help_text: str
    labels: tuple[str, ...]
    read: Read
    of_unloaded: bool
    """Whether it has a series for versions that were unloaded and stay listed."""


_GAUGES: Final[list[_Gauge]] = []
_OF_PRECISION: Final = ("mode", "precision")
_OF_PROGRAM: Final = ("mode", "bucket")


def gauges(versions: Collection[Version]) -> Iterator[Metric]:
    """Yields the gauges of `versions`, each of another number. On the event loop."""
    for gauge in _GAUGES:
        family = gauge_family(gauge.name, gauge.help_text, gauge.labels)
        for version in versions:
            if version.state is State.UNLOADED and not gauge.of_unloaded:
                continue
            for values, number in gauge.read(version):
                family.add_metric((version.name, version.settings.version, *values), float(number))
        yield family


def _gauge(
    name: str, help_text: str, labels: tuple[str, ...] = (), *, of_unloaded: bool = False
) -> Callable[[Read], Read]:
    """Registers a gauge with `labels` after `model` and `version`."""

    def register(read: Read) -> Read:
        _GAUGES.append(_Gauge(name, help_text, ("model", "version", *labels), read, of_unloaded))
        return read

    return register


@_gauge("xlaserve_queue_images", "Images that wait for a batch.")
def _queue_images(version: Version) -> Series:
    if batcher := version.batcher:
        yield (), batcher.waiting_images


@_gauge("xlaserve_queued_work_seconds", "What the images that wait should take the device, by its measured costs.")
def _queued_work_seconds(version: Version) -> Series:
    if batcher := version.batcher:
        yield (), batcher.forecast.work_s()


@_gauge("xlaserve_in_flight_images", "Images that are decoded, wait or run.")
def _in_flight_images(version: Version) -> Series:
    if batcher := version.batcher:
        yield (), batcher.admission.images


@_gauge("xlaserve_in_flight_images_limit", "`max_queue_images`: as many of those images there may be.")
def _in_flight_images_limit(version: Version) -> Series:
    if batcher := version.batcher:
        yield (), batcher.admission.max_images


@_gauge("xlaserve_in_flight_bytes", "Bytes of those images, encoded and decoded.")
def _in_flight_bytes(version: Version) -> Series:
    if batcher := version.batcher:
        yield (), batcher.admission.size_bytes


@_gauge("xlaserve_in_flight_bytes_limit", "`max_queue_bytes`: as many of those bytes there may be.")
def _in_flight_bytes_limit(version: Version) -> Series:
    if batcher := version.batcher:
        yield (), batcher.admission.max_bytes


@_gauge("xlaserve_model_info", "1, and what a version is.", ("task", "mode", "precision"))
def _model_info(version: Version) -> Series:
    if version.served:
        settings = version.served.settings
        mode = settings.effective_default_mode
        runs = set(version.auto.values()) if mode is Mode.AUTO else {mode}
        precision = ", ".join(sorted({settings.precision_in(one) for one in runs}))
        yield (version.served.model.task.name, mode, precision), 1


@_gauge("xlaserve_model_state", "1 for the state that a version is in.", ("state",), of_unloaded=True)
def _model_state(version: Version) -> Series:
    for state in State:
        yield (state.lower(),), version.state is state


@_gauge("xlaserve_auto_mode", "1 for the mode that auto runs a bucket in.", ("bucket", "mode"))
def _auto_mode(version: Version) -> Series:
    for bucket, mode in version.auto.items():
        yield (str(bucket), mode), 1


@_gauge(
    "xlaserve_precision_difference",
    "Largest difference of an output from float32, as a share of the largest number; measured at warm-up.",
    _OF_PRECISION,
)
def _precision_difference(version: Version) -> Series:
    for mode, difference in version.differences.items():
        yield (mode, version.settings.precision_in(mode)), difference.largest


@_gauge("xlaserve_precision_agreement", "Share of answers that are those of float32.", _OF_PRECISION)
def _precision_agreement(version: Version) -> Series:
    for mode, difference in version.differences.items():
        if difference.agreement is not None:
            yield (mode, version.settings.precision_in(mode)), difference.agreement


@_gauge(
    "xlaserve_decode_difference",
    "Largest difference of an output from that for the same image decoded exactly, as a share of the largest number;"
    " measured at warm-up.",
)
def _decode_difference(version: Version) -> Series:
    if version.decode_difference is not None:
        yield (), version.decode_difference.largest


@_gauge("xlaserve_decode_agreement", "Share of answers that are those to the same images decoded exactly.")
def _decode_agreement(version: Version) -> Series:
    if version.decode_difference is not None and version.decode_difference.agreement is not None:
        yield (), version.decode_difference.agreement


@_gauge(
    "xlaserve_model_examples_difference",
    "Largest difference of an output for the model's examples from the expected one, as a share of the largest number;"
    " measured at warm-up.",
    ("mode",),
)
def _model_examples_difference(version: Version) -> Series:
    for mode, difference in version.examples.items():
        yield (mode,), difference.largest


@_gauge("xlaserve_model_examples_agreement", "Share of answers to the model's examples that are expected.", ("mode",))
def _model_examples_agreement(version: Version) -> Series:
    for mode, difference in version.examples.items():
        if difference.agreement is not None:
            yield (mode,), difference.agreement


@_gauge(
    "xlaserve_program_difference",
    "Largest difference of a program's outputs from the reference's, as a share of the largest number.",
    _OF_PROGRAM,
)
def _program_difference(version: Version) -> Series:
    for entry, verified in _verified(version):
        if verified.difference is not None:
            yield (entry.mode, str(entry.bucket)), verified.difference.largest


@_gauge("xlaserve_program_verified", "1 where a program's answers were compared with a reference, else 0.", _OF_PROGRAM)
def _program_verified(version: Version) -> Series:
    for entry, verified in _verified(version):
        yield (entry.mode, str(entry.bucket)), verified.difference is not None


@_gauge(
    "xlaserve_program_not_finite_images",
    "Images that a program answered with NaN or infinity at warm-up.",
    _OF_PROGRAM,
)
def _program_not_finite_images(version: Version) -> Series:
    for entry, verified in _verified(version):
        yield (entry.mode, str(entry.bucket)), verified.not_finite


@_gauge("xlaserve_model_warnings", "Warnings about a model, as ListModels shows them.")
def _model_warnings(version: Version) -> Series:
    yield (), len(version.warnings)


def _verified(version: Version) -> Iterator[tuple[Entry, Verified]]:
    return ((entry, entry.verified) for entry in version.ledger if entry.verified is not None)
