"""Models as the typed API lists them: pure functions from a version to messages."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.costs import Turn
from xlaserve.engine.warmup.difference import Difference
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.models.version import Version
from xlaserve.programs.watch.xla_log import XlaCompilation
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.wire.shared.models import described_inputs, source_name
from xlaserve_proto import vision_pb2 as pb


def model(version: Version, shadows: Mapping[Pair, Findings]) -> pb.Model:
    """Returns a model as ListModels shows it, with what all processes have found of its `shadows`."""
    settings, loaded = version.settings, version.model
    entries = list(version.ledger)
    live = version.served.engine.live() if version.served else None
    return pb.Model(
        name=settings.name,
        version=settings.version,
        state=pb.Model.State.Value(f"STATE_{version.state}"),
        reason=version.reason,
        source=source_name(settings.source),
        weights=loaded.weights if loaded else "",
        task=loaded.task.name if loaded else "",
        pixels=loaded.pixels if loaded else "",
        fit=loaded.fit if loaded else "",
        resize=str(loaded.resize) if loaded else "",
        resize_reason=loaded.resize_reason if loaded else "",
        precision=settings.precision,
        differences=[_difference(mode, found) for mode, found in version.differences.items()],
        modes=settings.modes,
        default_mode=settings.effective_default_mode,
        buckets=map(_bucket, loaded.buckets) if loaded else (),
        programs=map(_program, entries),
        programs_total=version.programs_total,
        turns=[_turn(*one) for one in live.turns] if live else (),
        warnings=version.warnings,
        shadows=[_shadow(pair, findings) for pair, findings in shadows.items()],
        auto_modes={str(bucket): mode for bucket, mode in version.auto.items()},
        demands=[
            pb.Demand(height=height, width=width, images=demand)
            for (height, width), demand in (live.demand.items() if live else ())
        ],
        decode=loaded.decode if loaded else "",
        decode_difference=None
        if version.decode_difference is None
        else _difference(settings.effective_default_mode, version.decode_difference),
        examples=[_difference(mode, found) for mode, found in version.examples.items()],
        inputs=[
            pb.ModelInput(name=name, datatype=datatype, shape=shape, is_image=image is not None)
            for name, datatype, shape, image in (described_inputs(version.served) if version.served else ())
        ],
        compile_s=sum(entry.trace_s + entry.compile_s for entry in entries),
    )


def unexpected(compilation: XlaCompilation) -> pb.UnexpectedCompilation:
    """Returns a compilation that nothing asked for as ListModels shows it."""
    return pb.UnexpectedCompilation(
        function=compilation.function,
        arguments=compilation.arguments,
        result=compilation.result,
        constants=compilation.constants,
        compile_s=compilation.seconds,
        ended_at=_timestamp(compilation.at_s),
    )


def _timestamp(at_s: float) -> Timestamp:
    """Returns seconds since the epoch, to the microsecond."""
    timestamp = Timestamp()
    timestamp.FromMicroseconds(round(at_s * 1e6))
    return timestamp


def _bucket(bucket: Bucket) -> pb.Bucket:
    return pb.Bucket(batch=bucket.batch, height=bucket.height, width=bucket.width)


def _turn(mode: Mode, bucket: Bucket, turn: Turn) -> pb.Turn:
    observed = turn.observed
    return pb.Turn(
        mode=mode,
        bucket=_bucket(bucket),
        alone_s=observed.own.alone_s,
        loaded_s=observed.own.loaded_s,
        batches=observed.batches,
        deviations=observed.deviations,
        started_s=observed.started_s,
        returned_s=observed.returned_s,
    )


def _difference(mode: Mode, found: Difference) -> pb.Difference:
    return pb.Difference(mode=mode, largest=found.largest, agreement=found.agreement, images=found.images)


def _shadow(pair: Pair, findings: Findings) -> pb.Shadow:
    return pb.Shadow(
        mode=pair.mode,
        shadow_version=pair.shadow_version,
        shadow_mode=pair.shadow_mode,
        images=findings.agreement.count,
        agreement=findings.agreement.value or 0.0,
        iou=findings.iou.value,
        largest_difference=findings.largest_difference,
        time_ratios=[one.ratio for one in findings.time_ratios],
        dropped=findings.dropped,
    )


def _program(entry: Entry) -> pb.Program:
    verified = entry.verified
    if verified is None:
        verification = None
    else:
        found = verified.difference
        verification = pb.Verification(
            difference=None if found is None else _difference(entry.mode, found),
            batch_dependence=verified.dependence,
            is_batch_dependent=verified.is_dependent,
            not_finite_images=verified.not_finite,
            fault=verified.fault.text if verified.fault else "",
        )
    return pb.Program(
        mode=entry.mode,
        bucket=_bucket(entry.bucket),
        trace_s=entry.trace_s,
        compile_s=entry.compile_s,
        run_s=entry.cost.alone_s,
        run_loaded_s=entry.cost.loaded_s,
        ready_at=_timestamp(entry.at.timestamp()),
        from_cache=entry.from_cache,
        in_background=entry.in_background,
        verification=verification,
    )
