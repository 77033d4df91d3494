"""The typed API's methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xlaserve.admission.caller import CURRENT
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.programs.watch.xla_log import XlaCompilation
from xlaserve.wire.grpc import keypoint_messages, sequence_messages, vision_models
from xlaserve.wire.grpc import vision_messages as messages
from xlaserve.wire.grpc.context import Context, deadline
from xlaserve.wire.grpc.vision_messages import VisionMessage
from xlaserve.wire.grpc.wire_format import Wire
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.models import Models
from xlaserve_proto import vision_pb2 as pb


@dataclass(eq=False)
class Vision:
    """`xlaserve.v1.Vision`, whose requests arrive as `vision_messages.PARSERS` give them."""

    calls: Calls
    models: Models
    max_message_bytes: int
    count_fronts: Callable[[], int] = lambda: 0
    """Returns how many processes speak to clients; 0 where this one does all."""

    async def Classify(self, request: VisionMessage[pb.ClassifyRequest], context: Context) -> Wire:
        """Names what is in the images."""
        return await self._run("Classify", request, context, messages.parse_classify, messages.classifications)

    async def Detect(self, request: VisionMessage[pb.DetectRequest], context: Context) -> Wire:
        """Finds the objects in the images."""
        return await self._run("Detect", request, context, messages.parse_detect, messages.detections)

    async def Segment(self, request: VisionMessage[pb.SegmentRequest], context: Context) -> Wire:
        """Names the pixels of the images."""
        return await self._run("Segment", request, context, self._parse_segment, messages.class_maps)

    async def Embed(self, request: VisionMessage[pb.EmbedRequest], context: Context) -> Wire:
        """Makes vectors of the images."""
        return await self._run("Embed", request, context, messages.parse_embed, messages.embeddings)

    async def Transcribe(self, request: VisionMessage[pb.TranscribeRequest], context: Context) -> Wire:
        """Reads the sequences of classes in the images."""
        parse, respond = sequence_messages.parse_transcribe, sequence_messages.transcriptions
        return await self._run("Transcribe", request, context, parse, respond)

    async def Locate(self, request: VisionMessage[pb.LocateRequest], context: Context) -> Wire:
        """Finds the keypoints in the images."""
        parse, respond = keypoint_messages.parse_locate, keypoint_messages.located
        return await self._run("Locate", request, context, parse, respond)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models."""
        backend = self.models.backend
        await backend.count()
        return pb.ListModelsResponse(
            models=[vision_models.model(one, backend.shadows(one)) for one in self.models.visible()],
            unexpected_compilations=map(vision_models.unexpected, self._unexpected()),
            lanes=backend.device.lanes,
            fronts=self.count_fronts(),
            front_s=self.calls.loop_time.of_a_request_s(),
        )

    def _unexpected(self) -> tuple[XlaCompilation, ...]:
        # Their functions' names tell of models.
        return (*self.models.backend.unexpected,) if CURRENT.get().may_use_all else ()

    def _parse_segment(self, request: VisionMessage[pb.SegmentRequest], served: Served, until: float) -> Request:
        return messages.parse_segment(request, served, until, self.max_message_bytes)

    async def _run(
        self,
        method: str,
        message: VisionMessage[Any],
        context: Context,
        parse: Callable[[VisionMessage[Any], Served, float], Request],
        respond: Callable[[Any, Served, Answer], messages.Response],
    ) -> Wire:
        fields = message.fields
        with self.calls.enter(method, fields.model, fields.version, deadline(context, self.calls.clock)) as call:
            answer = await call.run(parse(message, call.served, call.deadline))
            response = respond(fields, call.served, answer)
            messages.stamp(response.fields, call.served, answer, call.end(answer))
            return [*response.pieces, response.fields.SerializeToString()]
