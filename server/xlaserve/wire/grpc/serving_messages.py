"""TensorFlow Serving: wire messages to `pipeline.Request` and `pipeline.Answer` to wire messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int64Value

from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Category
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.wire.grpc import wire_format
from xlaserve.wire.grpc.reader import Parser
from xlaserve.wire.grpc.tensor_protos import VIEWED, TensorInput, output_parts
from xlaserve.wire.grpc.wire_format import LARGE_BYTES, Wire
from xlaserve.wire.shared.inference import InferRequest, RequestedOutput
from xlaserve.wire.shared.input_tensors import MAX_IMAGES, MAX_INPUTS
from xlaserve.wire.shared.output_tensors import OutputTensor
from xlaserve.wire.shared.tensorflow_serving_models import SIGNATURE, classified, classify, regressed
from xlaserve_proto import tensorflow_messages_pb2 as pb

MessageT = TypeVar(
    "MessageT", pb.PredictRequest, pb.ClassificationRequest, pb.RegressionRequest, pb.MultiInferenceRequest
)

FEATURES: Final = ("image", "image/encoded")
"""Names of the feature that holds an example's image."""
BYTES_LIST: Final = "bytes_list"
INPUT: Final = "input"

_KEY, _VALUE = 1, 2
_INPUTS: Final[wire_format.Fields] = {pb.PredictRequest.INPUTS_FIELD_NUMBER: "inputs"}
_TENSOR: Final[wire_format.Fields] = {_VALUE: VIEWED}
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


Views = Mapping[str, Sequence[memoryview]]
"""Fields of a large message that are views of its bytes, by name."""


class ServingMessage(NamedTuple, Generic[MessageT]):
    """A request as it arrived."""

    fields: MessageT
    """All of the message but what is viewed, which is missing here."""
    views: Views
    """Views of the message, apart from its inputs."""
    input_views: Mapping[str, Views] = MappingProxyType({})
    """Views of each of a PredictRequest's inputs, by their names."""


def _view(
    message: type[MessageT], fields: wire_format.Fields, least: int, data: bytes
) -> ServingMessage[MessageT] | None:
    """Returns the request, None where `data` can't be parsed; takes those of `least` bytes apart.

    Raises InvalidArgument beyond a bound of `wire_format`.
    """
    try:
        if len(data) < least:
            return ServingMessage(message.FromString(data), {})
        rest, views = wire_format.split(message, data, fields)
        return ServingMessage(message.FromString(rest), views)
    except DecodeError:
        return None


def _view_inputs(least: int, data: bytes) -> ServingMessage[pb.PredictRequest] | None:
    """Returns a request to predict as `_view` does, with the views of each input."""
    entry = pb.PredictRequest.InputsEntry
    viewed = _view(pb.PredictRequest, _INPUTS, least, data)
    if viewed is None or not (entries := viewed.views.get("inputs")):
        return viewed
    input_views = {}
    try:
        for rest, views in wire_format.split_each(entry, entries, _TENSOR):
            given = entry.FromString(rest)
            viewed.fields.inputs[given.key].CopyFrom(given.value)
            input_views[given.key] = views
    except DecodeError:
        return None
    return ServingMessage(viewed.fields, {}, input_views)


PARSERS: Final[dict[str, Parser]] = {
    "PredictRequest": partial(_view_inputs, LARGE_BYTES),
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


def infer_request(message: ServingMessage[pb.PredictRequest]) -> InferRequest:
    """Returns a request to predict as plain data, views of the message."""
    given = islice(message.fields.inputs.items(), MAX_INPUTS)
    inputs = [TensorInput(name, tensor, message.input_views.get(name, {})) for name, tensor in given]
    return InferRequest(inputs, [*map(RequestedOutput, message.fields.output_filter)])


def respond_predict(tensors: Iterable[OutputTensor], served: Served) -> Wire:
    """Returns a PredictResponse."""
    settings = served.settings
    wire: Wire = [_answered_by(pb.PredictResponse.MODEL_SPEC_FIELD_NUMBER, settings.name, settings.version)]
    for tensor in tensors:
        wire += output_parts(tensor)
    return wire


def parse_classify(message: ServingMessage[pb.ClassificationRequest], served: Served, deadline: float) -> Request:
    """Returns the request for an image of each example. Raises InvalidArgument or UnsupportedFeature."""
    return classify(_images(message), served, deadline, _classifications)


def _classifications(row: Sequence[Category]) -> bytes:
    """Returns an image's likeliest classes as they stand in a ClassificationResult."""
    classes = [pb.Class(label=one.label, score=one.score) for one in row]
    number = pb.ClassificationResult.CLASSIFICATIONS_FIELD_NUMBER
    return b"".join(wire_format.record(number, pb.Classifications(classes=classes).SerializeToString()))


def respond_classify(served: Served, answer: Answer) -> Wire:
    """Returns a ClassificationResponse."""
    settings, pieces = served.settings, classified(served, answer, _classifications)
    return [
        *wire_format.record(pb.ClassificationResponse.RESULT_FIELD_NUMBER, *pieces),
        _answered_by(pb.ClassificationResponse.MODEL_SPEC_FIELD_NUMBER, settings.name, settings.version),
    ]


def parse_regress(message: ServingMessage[pb.RegressionRequest], served: Served, deadline: float) -> Request:
    """Returns the request for an image of each example. Raises InvalidArgument or UnsupportedFeature."""
    regressed(served.model.task)
    return Request("", _images(message), deadline)


def respond_regress(served: Served, answer: Answer) -> Wire:
    """Returns a RegressionResponse."""
    settings, values = served.settings, answer.outputs[regressed(served.model.task)]
    result = pb.RegressionResult(regressions=[pb.Regression(value=value) for value in values.reshape(-1).tolist()])
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
            names = ", ".join(repr(key[:64]) for key, _ in found[:MAX_INPUTS]) or "none"
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
