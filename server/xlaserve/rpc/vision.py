"""The typed API's methods."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from xlaserve.engine.xla_log import XlaCompilation
from xlaserve.model.repository import Repository
from xlaserve.model.version import Served
from xlaserve.pipeline import Answer, Request
from xlaserve.rpc import vision_messages, vision_models
from xlaserve.rpc.inference import Context, Inference, answers_errors
from xlaserve.rpc.parts import Parts, head_of
from xlaserve.rpc.vision_messages import VisionMessage
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

RequestT = TypeVar("RequestT", pb.ClassifyRequest, pb.DetectRequest, pb.SegmentRequest, pb.EmbedRequest)
ResponseT = TypeVar("ResponseT", bound=vision_messages.InferenceResponse)


class Vision(pb_grpc.VisionServicer):
    """`xlaserve.v1.Vision`."""

    def __init__(
        self,
        inference: Inference,
        repository: Repository,
        max_message_bytes: int,
        unexpected: Collection[XlaCompilation] = (),
    ) -> None:
        self._inference = inference
        self._repository = repository
        self._max_message_bytes = max_message_bytes
        self._unexpected = unexpected

    @answers_errors
    async def Classify(  # type: ignore[override] # what rpc.server parses for it
        self, request: VisionMessage[pb.ClassifyRequest], context: Context
    ) -> pb.ClassifyResponse | Parts[pb.ClassifyResponse]:
        """Names what is in the images."""
        return await self._run(request, context, vision_messages.parse_classify, vision_messages.classifications)

    @answers_errors
    async def Detect(  # type: ignore[override] # what rpc.server parses for it
        self, request: VisionMessage[pb.DetectRequest], context: Context
    ) -> pb.DetectResponse | Parts[pb.DetectResponse]:
        """Finds the objects in the images."""
        return await self._run(request, context, vision_messages.parse_detect, vision_messages.detections)

    @answers_errors
    async def Segment(  # type: ignore[override] # what rpc.server parses for it
        self, request: VisionMessage[pb.SegmentRequest], context: Context
    ) -> pb.SegmentResponse | Parts[pb.SegmentResponse]:
        """Names the pixels of the images."""

        def parse(request: VisionMessage[pb.SegmentRequest], served: Served, deadline: float, now: float) -> Request:
            return vision_messages.parse_segment(request, served, deadline, self._max_message_bytes)

        return await self._run(request, context, parse, vision_messages.class_maps)

    @answers_errors
    async def Embed(  # type: ignore[override] # what rpc.server parses for it
        self, request: VisionMessage[pb.EmbedRequest], context: Context
    ) -> pb.EmbedResponse | Parts[pb.EmbedResponse]:
        """Makes vectors of the images."""
        return await self._run(request, context, vision_messages.parse_embed, vision_messages.embeddings)

    @answers_errors
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models."""
        return pb.ListModelsResponse(
            models=map(vision_models.model, self._repository.index()),
            unexpected_compilations=map(vision_models.unexpected, tuple(self._unexpected)),
        )

    async def _run(
        self,
        request: VisionMessage[RequestT],
        context: Context,
        parse: Callable[[VisionMessage[RequestT], Served, float, float], Request],
        respond: Callable[[RequestT, Answer], ResponseT | Parts[ResponseT]],
    ) -> ResponseT | Parts[ResponseT]:
        def respond_from(request: VisionMessage[RequestT], answer: Answer) -> ResponseT | Parts[ResponseT]:
            response = respond(request.fields, answer)
            head = head_of(response)
            settings = answer.served.settings
            head.model, head.version, head.mode = settings.name, settings.version, answer.mode
            return response

        method = request.fields.DESCRIPTOR.name.removesuffix("Request")
        return await self._inference.run(
            method,
            request,
            *(request.fields.model, request.fields.version, self._inference.deadline(context)),
            parse=parse,
            respond=respond_from,
            stamp=vision_messages.stamp,
        )
