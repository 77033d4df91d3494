"""TensorFlow Serving: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int64Value

from xlaserve.engine.program import Images, Outputs
from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.images.decoder import Encoded
from xlaserve.images.frame import Frame
from xlaserve.models.task import Classification, Task
from xlaserve.models.version import Served
from xlaserve.pipeline import Answer, Pending, Render, Request
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.reader import Parser
from xlaserve.wire.grpc.tensor_protos import VIEWED, TensorInput, output_parts, piece_of_integers
from xlaserve.wire.grpc.wire_format import LARGE_BYTES, Wire
from xlaserve.wire.shared.inference import Wanted, check_outputs, fits_inline
from xlaserve.wire.shared.input_tensors import MAX_IMAGES, MAX_SHOWN, images_of
from xlaserve.wire.shared.objects import DEFAULT_TOP_K, task_of
from xlaserve.wire.shared.tensorflow_serving_models import SIGNATURE, check_regression
from xlaserve_proto import tensorflow_messages_pb2 as pb

MessageT = TypeVar(
    "MessageT", pb.PredictRequest, pb.ClassificationRequest, pb.RegressionRequest, pb.MultiInferenceRequest
)

FEATURES: Final = ("image", "image/encoded")
"""Names of the feature that holds an example's image."""
MAX_INLINE_INTEGERS: Final = 2**14
"""Integers of outputs that are written on the event loop, at 0.1 us each."""
BYTES_LIST: Final = "bytes_list"
INPUT: Final = "input"

_KEY, _VALUE = 1, 2
_TENSORS: Final[wire_format.Fields] = {pb.PredictRequest.INPUTS_FIELD_NUMBER: {_VALUE: VIEWED}}
_FEATURE: Final[wire_format.Fields] = {_VALUE: {pb.Feature.BYTES_LIST_FIELD_NUMBER: BYTES_LIST}}
_EXAMPLES: Final[wire_format.Fields] = {
    pb.ClassificationRequest.INPUT_FIELD_NUMBER: {
        pb.Input.EXAMPLE_LIST_FIELD_NUMBER: {
            pb.ExampleList.EXAMPLES_FIELD_NUMBER: {
                pb.Example.FEATURES_FIELD_NUMBER: {pb.Features.FEATURE_FIELD_NUMBER: _FEATURE}
            }
        }
    }
}


class ServingMessage(NamedTuple, Generic[MessageT]):
    """A request as it arrived."""

    fields: MessageT
    """All of the message but what is viewed, which is missing here."""
    views: Mapping[str, Sequence[memoryview]]
    """Fields of a large message that are views of its bytes, by name."""


def _view(
    message: type[MessageT], fields: wire_format.Fields, least: int, data: bytes
) -> ServingMessage[MessageT] | None:
    """Returns the request, None where `data` can't be parsed; takes those of `least` bytes apart."""
    try:
        if len(data) >= least:
            rest, views = wire_format.split(message, data, fields)
            return ServingMessage(message.FromString(rest), views)
        return ServingMessage(message.FromString(data), {})
    except DecodeError:
        return None


PARSERS: Final[dict[str, Parser]] = {
    "PredictRequest": partial(_view, pb.PredictRequest, _TENSORS, LARGE_BYTES),
    "ClassificationRequest": partial(_view, pb.ClassificationRequest, _EXAMPLES, 0),
    "RegressionRequest": partial(_view, pb.RegressionRequest, _EXAMPLES, 0),
    # Refused, however large its inputs are.
    "MultiInferenceRequest": partial(_view, pb.MultiInferenceRequest, {2: INPUT}, LARGE_BYTES),
}
"""By the message of each method that may be large."""


def version_of(spec: pb.ModelSpec) -> str:
    """Returns the version that a request names, by its number or its label, empty for none."""
    return str(spec.version.value) if spec.HasField("version") else spec.version_label


@lru_cache(maxsize=1024)
def _answered_by(number: int, model: str, version: str) -> bytes:
    """Returns the field `number` of a response: the model and the version that answered."""
    spec = pb.ModelSpec(name=model, version=Int64Value(value=int(version)), signature_name=SIGNATURE)
    return b"".join(wire_format.record(number, spec.SerializeToString()))


def parse_predict(
    message: ServingMessage[pb.PredictRequest], served: Served, deadline: float
) -> tuple[Request, Wanted]:
    """Returns what a request asks for. Raises InvalidArgument."""
    fields, settings = message.fields, served.settings
    wanted = check_outputs(((name, ()) for name in fields.output_filter), served.model.task, settings.output_name)
    given = islice(fields.inputs.items(), MAX_SHOWN)
    inputs = [TensorInput(name, tensor, message.views) for name, tensor in given]
    images = images_of(inputs, settings.pixel_range, input_name=settings.input_name)
    return Request("", images, deadline, _integers(wanted, served, images)), wanted


class ListedIntegers(NamedTuple):
    """Renders an image's part of each of some outputs, by their indices."""

    outputs: Sequence[int]

    def renderer(self, task: Task) -> Render:
        """Returns what gives a list of bytes."""
        return lambda outputs, frame: [piece_of_integers(outputs[index]) for index in self.outputs]


def _integers(wanted: Wanted, served: Served, images: Images | Pending | Sequence[Encoded]) -> ListedIntegers | None:
    """Returns what renders integers on a thread; None where the event loop can do it."""
    integers = Wanted([one for one in wanted.outputs if one[1].datatype != "FP32"])
    if integers.count_values(served, images) <= MAX_INLINE_INTEGERS:
        return None
    return ListedIntegers([index for index, _ in integers.outputs])


def respond_predict(wanted: Wanted, served: Served, answer: Answer) -> Wire:
    """Returns a PredictResponse."""
    settings = served.settings
    wire: Wire = [_answered_by(pb.PredictResponse.MODEL_SPEC_FIELD_NUMBER, settings.name, settings.version)]
    rendered = zip(*answer.rendered, strict=True)
    for index, spec in wanted.outputs:
        is_rendered = answer.rendered and spec.datatype != "FP32"
        wire += output_parts(spec.name, answer.outputs[index], next(rendered) if is_rendered else ())
    return wire


def parse_classify(message: ServingMessage[pb.ClassificationRequest], served: Served, deadline: float) -> Request:
    """Returns the request for an image of each example. Raises InvalidArgument or UnsupportedFeature."""
    task = task_of(served, Classification)
    images = _images(message)
    k = min(DEFAULT_TOP_K, task.classes)
    return Request("", images, deadline, None if fits_inline(images, k, task.classes) else Likeliest(k))


class Likeliest(NamedTuple):
    """Renders classifications."""

    k: int

    def renderer(self, task: Classification) -> Render:
        """Returns what gives one as it stands in a ClassificationResult."""

        def render(outputs: Outputs, frame: Frame | None) -> bytes:
            (row,) = task.top(outputs, self.k)
            classes = [pb.Class(label=one.label, score=one.score) for one in row]
            number = pb.ClassificationResult.CLASSIFICATIONS_FIELD_NUMBER
            return b"".join(wire_format.record(number, pb.Classifications(classes=classes).SerializeToString()))

        return render


def respond_classify(served: Served, answer: Answer) -> Wire:
    """Returns a ClassificationResponse."""
    settings, pieces = served.settings, answer.rendered
    if not pieces:
        render = Likeliest(DEFAULT_TOP_K).renderer(task_of(served, Classification))
        rows = [tuple(output[row : row + 1] for output in answer.outputs) for row in range(answer.images)]
        pieces = [render(row, frame) for row, frame in zip(rows, answer.frames, strict=True)]
    return [
        *wire_format.record(pb.ClassificationResponse.RESULT_FIELD_NUMBER, *pieces),
        _answered_by(pb.ClassificationResponse.MODEL_SPEC_FIELD_NUMBER, settings.name, settings.version),
    ]


def parse_regress(message: ServingMessage[pb.RegressionRequest], served: Served, deadline: float) -> Request:
    """Returns the request for an image of each example. Raises InvalidArgument or UnsupportedFeature."""
    check_regression(served.model.task)
    return Request("", _images(message), deadline)


def respond_regress(served: Served, answer: Answer) -> Wire:
    """Returns a RegressionResponse."""
    settings, (values,) = served.settings, answer.outputs
    result = pb.RegressionResult(regressions=[pb.Regression(value=value) for value in values[:, 0].tolist()])
    return [
        *wire_format.record(pb.RegressionResponse.RESULT_FIELD_NUMBER, result.SerializeToString()),
        _answered_by(pb.RegressionResponse.MODEL_SPEC_FIELD_NUMBER, settings.name, settings.version),
    ]


def _images(message: ServingMessage[pb.ClassificationRequest] | ServingMessage[pb.RegressionRequest]) -> list[Encoded]:
    """Returns the image of each example. Raises InvalidArgument or UnsupportedFeature."""
    images = [*_images_of(message.fields.input, message.views)]
    if not 1 <= len(images) <= MAX_IMAGES:
        raise InvalidArgument("input", f"at least one example and at most {MAX_IMAGES}", len(images))
    return images


def _images_of(given: pb.Input, views: Mapping[str, Sequence[memoryview]]) -> Iterator[Encoded]:
    if given.HasField("example_list_with_context"):
        raise UnsupportedFeature("example_list_with_context: images have no context; send example_list")
    # What was viewed left features without a kind behind, in the same order.
    lists = iter(views.get(BYTES_LIST, ()))
    for example in given.example_list.examples:
        found = [
            (entry.key, next(lists, memoryview(b"")))
            for entry in example.features.feature
            if entry.value.WhichOneof("kind") is None
        ]
        images = [_only_value(key, values) for key, values in found if key in FEATURES]
        if len(images) != 1:
            names = ", ".join(repr(key[:64]) for key, _ in found[:MAX_SHOWN]) or "none"
            raise InvalidArgument("examples", f"one feature of bytes, {' or '.join(map(repr, FEATURES))}", names)
        yield images[0]


def _only_value(key: str, values: memoryview) -> memoryview:
    """Returns the only element of a BytesList."""
    try:
        elements = wire_format.split(pb.BytesList, values, {pb.BytesList.VALUE_FIELD_NUMBER: "value"}).views.get(
            "value", []
        )
    except DecodeError:
        elements = []
    if len(elements) != 1:
        raise InvalidArgument(f"examples.{key}", "one value, an encoded image", len(elements))
    return elements[0]
