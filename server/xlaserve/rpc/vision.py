"""The typed API: wire messages to domain requests and back."""

from __future__ import annotations

from typing import Final

from xlaserve.config import Bucket
from xlaserve.engine.ledger import Entry
from xlaserve.errors import InvalidArgument
from xlaserve.model.repository import Repository
from xlaserve.model.task import Classification
from xlaserve.model.version import Served, State, Version
from xlaserve.pipeline import Answer, Request
from xlaserve.rpc.describe import source_name
from xlaserve.rpc.inference import Context, Inference, answers_errors
from xlaserve.rpc.tensors import MAX_IMAGES
from xlaserve.telemetry.model import Timings
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

DEFAULT_TOP_K: Final = 5
STATES: Final = {
    State.LOADING: pb.Model.STATE_LOADING,
    State.COMPILING: pb.Model.STATE_COMPILING,
    State.READY: pb.Model.STATE_READY,
    State.DRAINING: pb.Model.STATE_DRAINING,
    State.UNLOADED: pb.Model.STATE_UNLOADED,
    State.FAILED: pb.Model.STATE_FAILED,
}


class Vision(pb_grpc.VisionServicer):
    """`xlaserve.v1.Vision`."""

    def __init__(self, inference: Inference, repository: Repository) -> None:
        self._inference = inference
        self._repository = repository

    @answers_errors
    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Names what is in the images."""
        deadline = self._inference.deadline(context)
        return await self._inference.run(
            "Classify",
            request,
            *(request.model, request.version, deadline),
            parse=_parse,
            respond=_respond,
            stamp=_stamp,
        )

    @answers_errors
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models."""
        return pb.ListModelsResponse(models=map(_model, self._repository.index()))


def _parse(request: pb.ClassifyRequest, served: Served, deadline: float, now: float) -> Request:
    served.task(Classification)
    if not 1 <= len(request.images) <= MAX_IMAGES:
        raise InvalidArgument("images", f"at least one encoded image and at most {MAX_IMAGES}", len(request.images))
    if request.top_k < 0:
        raise InvalidArgument("top_k", f"a number of classes, or 0 for {DEFAULT_TOP_K}", request.top_k)
    return Request(request.mode, list(request.images), deadline)


def _respond(request: pb.ClassifyRequest, answer: Answer) -> pb.ClassifyResponse:
    return pb.ClassifyResponse(
        classifications=[
            pb.Classification(
                categories=[
                    pb.Category(index=category.index, label=category.label, score=category.score) for category in row
                ]
            )
            for row in answer.served.task(Classification).top(answer.outputs, request.top_k or DEFAULT_TOP_K)
        ],
        model=answer.served.settings.name,
        version=answer.served.settings.version,
        mode=answer.mode,
    )


def _stamp(response: pb.ClassifyResponse, timings: Timings) -> None:
    response.timings.decode_s = timings.decode_s
    response.timings.queue_s = timings.queue_s
    response.timings.gather_s = timings.gather_s
    response.timings.execute_s = timings.execute_s
    response.timings.encode_s = timings.encode_s
    response.timings.total_s = timings.total_s


def _model(version: Version) -> pb.Model:
    settings, model = version.settings, version.model
    entries = list(version.ledger)
    return pb.Model(
        name=settings.name,
        version=settings.version,
        state=STATES[version.state],
        reason=version.reason,
        source=source_name(settings.source),
        weights=model.weights if model else "",
        task=model.task.name if model else "",
        modes=settings.modes,
        default_mode=settings.effective_default_mode,
        buckets=map(_bucket, model.buckets) if model else (),
        programs=map(_program, entries),
        programs_total=version.programs_total,
        auto_modes={str(bucket): mode for bucket, mode in version.auto.items()},
        compile_s=sum(entry.trace_s + entry.compile_s for entry in entries),
    )


def _bucket(bucket: Bucket) -> pb.Bucket:
    return pb.Bucket(batch=bucket.batch, height=bucket.height, width=bucket.width)


def _program(entry: Entry) -> pb.Program:
    return pb.Program(
        mode=entry.mode,
        bucket=_bucket(entry.bucket),
        trace_s=entry.trace_s,
        compile_s=entry.compile_s,
        run_s=entry.cost.alone_s,
        run_loaded_s=entry.cost.loaded_s,
    )
