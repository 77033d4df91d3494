"""TensorFlow Serving's methods: models are found, run and described as those of every other protocol are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, TypeVar

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.json_format import ParseDict

from xlaserve.admission.audit import audited
from xlaserve.config import ModelSettings
from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.wire.grpc import serving_messages as messages
from xlaserve.wire.grpc.context import Context, deadline
from xlaserve.wire.grpc.serving_messages import ServingMessage, version_of
from xlaserve.wire.grpc.tensor_protos import LISTING
from xlaserve.wire.grpc.wire_format import Wire
from xlaserve.wire.shared import inference, tensorflow_serving_models
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.input_tensors import MAX_SHOWN
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.output_tensors import output_tensors
from xlaserve.wire.shared.tensorflow_serving_models import SIGNATURE_DEF, check_label, check_signature
from xlaserve_proto import tensorflow_messages_pb2 as pb

SIGNATURE_DEF_MAP: Final = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
PLATFORM: Final = "tensorflow"
SPOKEN: Final = ("name", "base_path", "model_platform", "model_version_policy", "version_labels")
"""The fields of a model's configuration that may be sent."""

ExamplesT = TypeVar("ExamplesT", pb.ClassificationRequest, pb.RegressionRequest)


@dataclass(eq=False)
class PredictionService:
    """`tensorflow.serving.PredictionService`, whose large requests arrive as `serving_messages.PARSERS` give them."""

    calls: Calls
    models: Models

    async def Predict(self, request: ServingMessage[pb.PredictRequest], context: Context) -> Wire:
        """Answers a request with the outputs of a model."""
        spec = request.fields.model_spec
        until = deadline(context, self.calls.clock)
        with self.calls.enter("Predict", spec.name, version_of(spec), until) as call:
            check_label(spec.version_label)
            check_signature(spec.signature_name)
            parsed, wanted = inference.parse(messages.infer_request(request), call, LISTING)
            answer = await call.run(parsed)
            wire = messages.respond_predict(output_tensors(wanted, call.served, answer, LISTING), call.served)
            call.end(answer)
            return wire

    async def Classify(self, request: ServingMessage[pb.ClassificationRequest], context: Context) -> Wire:
        """Names what is in the images."""
        return await self._answer("Classify", request, context, messages.parse_classify, messages.respond_classify)

    async def Regress(self, request: ServingMessage[pb.RegressionRequest], context: Context) -> Wire:
        """Answers images with one number each."""
        return await self._answer("Regress", request, context, messages.parse_regress, messages.respond_regress)

    async def MultiInference(self, request: ServingMessage[pb.MultiInferenceRequest], context: Context) -> Wire:
        """Refuses."""
        raise UnsupportedFeature("MultiInference: a model has one signature; use Predict or Classify")

    async def GetModelMetadata(
        self, request: pb.GetModelMetadataRequest, context: Context
    ) -> pb.GetModelMetadataResponse:
        """Describes a model's signature."""
        spec = request.model_spec
        check_label(spec.version_label)
        if not request.metadata_field:
            raise InvalidArgument("metadata_field", SIGNATURE_DEF, "none")
        for name in request.metadata_field:
            if name != SIGNATURE_DEF:
                raise InvalidArgument("metadata_field", SIGNATURE_DEF, repr(name[:64]))
        described = tensorflow_serving_models.metadata(self.models, spec.name, version_of(spec))
        signatures = ParseDict(described["metadata"][SIGNATURE_DEF], pb.SignatureDefMap())
        # The name of the original message, which clients check.
        held = AnyMessage(type_url=SIGNATURE_DEF_MAP, value=signatures.SerializeToString())
        response = pb.GetModelMetadataResponse(model_spec=ParseDict(described["model_spec"], pb.ModelSpec()))
        response.metadata[SIGNATURE_DEF].CopyFrom(held)
        return response

    async def _answer(
        self,
        method: str,
        request: ServingMessage[ExamplesT],
        context: Context,
        parse: Callable[[ServingMessage[ExamplesT], Served, float], Request],
        respond: Callable[[Served, Answer], Wire],
    ) -> Wire:
        """Answers a request of examples."""
        spec = request.fields.model_spec
        until = deadline(context, self.calls.clock)
        with self.calls.enter(method, spec.name, version_of(spec), until) as call:
            check_label(spec.version_label)
            check_signature(spec.signature_name)
            answer = await call.run(parse(request, call.served, until))
            wire = respond(call.served, answer)
            call.end(answer)
            return wire


@dataclass(eq=False)
class ModelService:
    """`tensorflow.serving.ModelService`."""

    models: Models

    async def GetModelStatus(self, request: pb.GetModelStatusRequest, context: Context) -> pb.GetModelStatusResponse:
        """Says how far each version of a model is."""
        spec = request.model_spec
        check_label(spec.version_label)
        return ParseDict(
            tensorflow_serving_models.status(self.models, spec.name, version_of(spec)), pb.GetModelStatusResponse()
        )

    async def HandleReloadConfigRequest(
        self, request: pb.ReloadConfigRequest, context: Context
    ) -> pb.ReloadConfigResponse:
        """Loads what changed of models as they are configured now, and moves labels."""
        wanted = request.config.model_config_list.config
        with audited("reload", ",".join(config.name for config in wanted[:MAX_SHOWN])):
            if request.config.WhichOneof("config") != "model_config_list":
                raise InvalidArgument("config", "model_config_list", request.config.WhichOneof("config") or "nothing")
            for config in wanted:
                found = [one.settings for one in self.models.versions(config.name, "")]
                _check_config(config, found[0])
        for config in wanted:
            labels = {label: str(version) for label, version in config.version_labels.items()}
            versions = [*map(str, config.model_version_policy.specific.versions)]
            await self.models.update(config.name, labels, versions)
        return pb.ReloadConfigResponse(status=pb.StatusProto(error_code=pb.OK))


def _check_config(config: pb.ModelConfig, settings: ModelSettings) -> None:
    """Raises InvalidArgument or UnsupportedFeature for what is not as the server's file configures a model."""
    where = f"config.{config.name[:64]}"
    for field, value in config.ListFields():
        if field.name not in SPOKEN:
            raise UnsupportedFeature(f"{where}.{field.name}: models are configured in the server's file")
        if field.name == "model_version_policy" and (choice := value.WhichOneof("policy_choice")) != "specific":
            raise UnsupportedFeature(f"{where}.{field.name}.{choice or ''}: set `versions` in the server's file")
        if field.name == "model_platform" and value != PLATFORM:
            raise UnsupportedFeature(f"{where}.model_platform: expected {PLATFORM!r} or nothing, got {value[:64]!r}")
    source = PurePath(settings.source)
    if config.base_path and PurePath(config.base_path) not in (source, *source.parents[:2]):
        expected = "nothing, or the model's source as the server's file has it"
        raise InvalidArgument(f"{where}.base_path", expected, repr(config.base_path[:64]))
