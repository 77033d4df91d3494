"""The calls: pure functions that build a request and know how to read its response.

The synchronous and the asyncio client share them; only the way to wait differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from google.protobuf.message import Message

from xlaserve_client import images as image_arguments
from xlaserve_client import tensors
from xlaserve_client.errors import InvalidReply
from xlaserve_client.images import Images
from xlaserve_client.results import (
    Bucket,
    Category,
    Classification,
    ClassifyResult,
    InferResult,
    Model,
    Program,
    Timings,
)
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import vision_pb2 as vision

Result = TypeVar("Result")

STAGES: Final = ("decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s")
"""Response parameters that carry a stage's seconds."""


@dataclass(frozen=True, slots=True)
class Method:
    """A unary gRPC method."""

    service: str
    name: str
    response: type[Message]

    @property
    def path(self) -> str:
        """As gRPC addresses it."""
        return f"/{self.service}/{self.name}"


_OIP: Final = "inference.GRPCInferenceService"
_VISION: Final = "xlaserve.v1.Vision"
_CLASSIFY: Final = Method(_VISION, "Classify", vision.ClassifyResponse)
_LIST_MODELS: Final = Method(_VISION, "ListModels", vision.ListModelsResponse)
_MODEL_INFER: Final = Method(_OIP, "ModelInfer", oip.ModelInferResponse)
# Readiness is a question about now, and loading or unloading twice is not the same as once.
_SERVER_READY: Final = Method(_OIP, "ServerReady", oip.ServerReadyResponse)
_MODEL_READY: Final = Method(_OIP, "ModelReady", oip.ModelReadyResponse)
_LOAD: Final = Method(_OIP, "RepositoryModelLoad", oip.RepositoryModelLoadResponse)
_UNLOAD: Final = Method(_OIP, "RepositoryModelUnload", oip.RepositoryModelUnloadResponse)

IDEMPOTENT: Final = (_CLASSIFY, _LIST_MODELS, _MODEL_INFER)
"""The methods that are retried."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A request, where it goes, and how its response is read."""

    method: Method
    request: Message
    parse: Callable[[Any], Result]
    """From the method's response message. Raises InvalidReply."""


def classify(images: Images, *, model: str, top_k: int, mode: str | None) -> Call[ClassifyResult]:
    """Names what is in `images`: encoded ones by Vision.Classify, pixels by ModelInfer."""
    if top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    loaded = image_arguments.load(images)
    if isinstance(loaded, list):
        request = vision.ClassifyRequest(model=model, images=loaded, top_k=top_k, mode=mode or "")
        return Call(_CLASSIFY, request, _read_classify)
    infer_request = _infer_request(loaded, model=model, mode=mode)
    infer_request.outputs.add(name="scores").parameters["classification"].int64_param = top_k
    return Call(_MODEL_INFER, infer_request, _read_classification)


def infer(images: Images, *, model: str, mode: str | None) -> Call[InferResult]:
    """Runs the model on `images` and gives its outputs as they are."""
    return Call(_MODEL_INFER, _infer_request(image_arguments.load(images), model=model, mode=mode), _read_infer)


def models() -> Call[tuple[Model, ...]]:
    """Lists the configured models."""
    return Call(_LIST_MODELS, vision.ListModelsRequest(), _read_models)


def ready(model: str | None) -> Call[bool]:
    """Asks whether every model, or the one named, is ready."""
    if model is None:
        return Call(_SERVER_READY, oip.ServerReadyRequest(), lambda response: bool(response.ready))
    return Call(_MODEL_READY, oip.ModelReadyRequest(name=model), lambda response: bool(response.ready))


def load(model: str) -> Call[None]:
    """Loads a configured model, or loads it anew."""
    return Call(_LOAD, oip.RepositoryModelLoadRequest(model_name=model), lambda _: None)


def unload(model: str) -> Call[None]:
    """Drains a model and frees it."""
    return Call(_UNLOAD, oip.RepositoryModelUnloadRequest(model_name=model), lambda _: None)


def _infer_request(
    images: list[bytes] | np.ndarray[Any, Any], *, model: str, mode: str | None
) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model)
    if mode:
        request.parameters["mode"].string_param = mode
    if isinstance(images, list):
        request.inputs.add(name="image", datatype="BYTES", shape=[len(images)])
        request.raw_input_contents.append(tensors.bytes_to_raw(images))
    else:
        request.inputs.add(name="pixels", datatype=tensors.datatype(images), shape=images.shape)
        request.raw_input_contents.append(tensors.to_raw(images))
    return request


def _read_infer(response: oip.ModelInferResponse) -> InferResult:
    return InferResult(
        outputs=tensors.outputs(response),
        model=response.model_name,
        version=response.model_version,
        mode=_mode(response),
        timings=_timings(response),
    )


def _read_classification(response: oip.ModelInferResponse) -> ClassifyResult:
    rows = tensors.outputs(response).get("scores")
    if rows is None or rows.dtype != object or rows.ndim != 2:
        raise InvalidReply("expected an output scores, BYTES [n, k], with the classes")
    return ClassifyResult(
        classifications=tuple(Classification(tuple(map(_category, row))) for row in rows),
        model=response.model_name,
        version=response.model_version,
        mode=_mode(response),
        timings=_timings(response),
    )


def _category(element: bytes) -> Category:
    try:
        score, index, label = element.decode().split(":", 2)
        return Category(int(index), label, float(score))
    except ValueError:
        raise InvalidReply(f"expected score:index:label, got {element!r}") from None


def _mode(response: oip.ModelInferResponse) -> str:
    # A map field of protobuf makes the entry that it is asked for, hence the test.
    return response.parameters["mode"].string_param if "mode" in response.parameters else ""


def _timings(response: oip.ModelInferResponse) -> Timings | None:
    parameters = response.parameters
    if "total_s" not in parameters:
        return None
    return Timings(**{stage: parameters[stage].double_param if stage in parameters else 0.0 for stage in STAGES})


def _read_classify(response: vision.ClassifyResponse) -> ClassifyResult:
    return ClassifyResult(
        classifications=tuple(
            Classification(tuple(Category(entry.index, entry.label, entry.score) for entry in item.categories))
            for item in response.classifications
        ),
        model=response.model,
        version=response.version,
        mode=response.mode,
        timings=(
            Timings(**{stage: getattr(response.timings, stage) for stage in STAGES})
            if response.HasField("timings")
            else None
        ),
    )


def _read_models(response: vision.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            name=model.name,
            version=model.version,
            state=_state(model.state),
            reason=model.reason,
            source=model.source,
            weights=model.weights,
            task=model.task,
            modes=tuple(model.modes),
            default_mode=model.default_mode,
            buckets=tuple(map(_bucket, model.buckets)),
            programs=tuple(
                Program(
                    mode=program.mode,
                    bucket=_bucket(program.bucket),
                    trace_s=program.trace_s,
                    compile_s=program.compile_s,
                    run_s=program.run_s,
                    run_loaded_s=program.run_loaded_s,
                )
                for program in model.programs
            ),
            programs_total=model.programs_total,
            compile_s=model.compile_s,
        )
        for model in response.models
    )


def _state(state: int) -> str:
    known = vision.Model.State.values()
    return vision.Model.State.Name(state).removeprefix("STATE_").lower() if state in known else str(state)  # type: ignore[arg-type]


def _bucket(bucket: vision.Bucket) -> Bucket:
    return Bucket(bucket.batch, bucket.height, bucket.width)
