"""The messages of Transcribe."""

from __future__ import annotations

from typing import Final, NamedTuple

from xlaserve.engine.program import Outputs
from xlaserve.images.frame import Frame
from xlaserve.models.sequences import Transcript
from xlaserve.models.task import ClassSequence, Task, reading_of
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Render, Request
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.vision_messages import Response, VisionMessage, pipeline_request
from xlaserve.wire.shared.objects import task_of
from xlaserve.wire.shared.output_tensors import MAX_INLINE_US
from xlaserve_proto import vision_pb2 as pb

IMAGE_US: Final = 50.0
STEP_US: Final = 1.0
SCORE_US: Final = 0.002

_TRANSCRIPTIONS: Final = pb.TranscribeResponse.TRANSCRIPTIONS_FIELD_NUMBER


def parse_transcribe(request: VisionMessage[pb.TranscribeRequest], served: Served, deadline: float) -> Request:
    """Returns the `pipeline.Request`. Raises InvalidArgument."""
    task = task_of(served, ClassSequence)
    parsed = pipeline_request(request, served, deadline)
    steps = max(task.steps, 1)
    cost_us = IMAGE_US + steps * (STEP_US + task.classes * SCORE_US)
    is_inline = task.steps > 0 and len(parsed.images) * cost_us <= MAX_INLINE_US
    return parsed if is_inline else parsed._replace(rendering=Transcripts())


class Transcripts(NamedTuple):
    """Renders sequences."""

    def renderer(self, task: Task) -> Render:
        """Returns what gives that of one image as it stands in a response."""
        sequence = reading_of(task, ClassSequence)

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (transcript,) = sequence.transcripts(outputs)
            return b"".join(wire_format.record(_TRANSCRIPTIONS, _message(transcript).SerializeToString()))

        return render


def transcriptions(request: pb.TranscribeRequest, served: Served, answer: Answer) -> Response:
    """Returns the sequence in each image."""
    if answer.rendered:
        return Response(pb.TranscribeResponse(), answer.rendered)
    found = task_of(served, ClassSequence).transcripts(answer.outputs)
    return Response(pb.TranscribeResponse(transcriptions=map(_message, found)), ())


def _message(transcript: Transcript) -> pb.Transcription:
    categories = [pb.Category(index=one.index, label=one.label, score=one.score) for one in transcript.categories]
    return pb.Transcription(text=transcript.text, score=transcript.score, categories=categories)
