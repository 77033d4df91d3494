"""What /metrics shows of the models at a moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prometheus_client.core import Metric

from xlaserve.model.version import State, Version
from xlaserve.telemetry.metrics import gauge_family


def gauges(versions: Collection[Version]) -> Iterator[Metric]:
    """Yields the gauges of the models, of each model's version that serves, or else its last. On the event loop."""
    yield from _traffic(versions)
    yield from _precision(versions)
    yield from _programs(versions)


def _traffic(versions: Collection[Version]) -> Iterator[Metric]:
    waiting = gauge_family("xlaserve_queue_images", "Images that wait for a batch.", ("model",))
    admitted = gauge_family("xlaserve_in_flight_images", "Images that are decoded, wait or run.", ("model",))
    size = gauge_family("xlaserve_in_flight_bytes", "Bytes of those images, encoded and decoded.", ("model",))
    states = gauge_family("xlaserve_model_state", "1 for the state that a model is in.", ("model", "version", "state"))
    auto = gauge_family("xlaserve_auto_mode", "1 for the mode that auto runs a bucket in.", ("model", "bucket", "mode"))
    for version in versions:
        if version.served:
            batcher = version.served.batcher
            waiting.add_metric((version.name,), batcher.waiting_images)
            admitted.add_metric((version.name,), batcher.admission.images)
            size.add_metric((version.name,), batcher.admission.size_bytes)
        for state in State:
            labels = (version.name, version.settings.version, state.lower())
            states.add_metric(labels, float(version.state is state))
        for bucket, mode in version.auto.items():
            auto.add_metric((version.name, str(bucket), mode), 1.0)
    yield from (waiting, admitted, size, states, auto)


def _precision(versions: Collection[Version]) -> Iterator[Metric]:
    labels = ("model", "mode", "precision")
    differences = gauge_family(
        "xlaserve_precision_difference",
        "Largest difference of an output from float32, as a share of the largest number; measured at warm-up.",
        labels,
    )
    agreements = gauge_family("xlaserve_precision_agreement", "Share of answers that are those of float32.", labels)
    for version in versions:
        for mode, difference in version.differences.items():
            values = (version.name, mode, version.settings.precision)
            differences.add_metric(values, difference.largest)
            if difference.agreement is not None:
                agreements.add_metric(values, difference.agreement)
    yield from (differences, agreements)


def _programs(versions: Collection[Version]) -> Iterator[Metric]:
    labels = ("model", "mode", "bucket")
    differences = gauge_family(
        "xlaserve_program_difference",
        "Largest difference of a program's outputs from the reference's, as a share of the largest number.",
        labels,
    )
    not_finite = gauge_family(
        "xlaserve_program_not_finite_images", "Images that a program answered with NaN or infinity at warm-up.", labels
    )
    are_verified = gauge_family(
        "xlaserve_program_verified", "1 where a program's answers were compared with a reference, else 0.", labels
    )
    warnings = gauge_family("xlaserve_model_warnings", "Warnings about a model, as ListModels shows them.", ("model",))
    for version in versions:
        warnings.add_metric((version.name,), len(version.warnings))
        for entry in version.ledger:
            if (verified := entry.verified) is not None:
                values = (version.name, entry.mode, str(entry.bucket))
                not_finite.add_metric(values, verified.not_finite)
                are_verified.add_metric(values, float(verified.difference is not None))
                if verified.difference is not None:
                    differences.add_metric(values, verified.difference.largest)
    yield from (differences, are_verified, not_finite, warnings)
