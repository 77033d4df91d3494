"""The calls of the Open Inference Protocol: pure functions that build a request and the function that reads its
response.

The synchronous and the asyncio client share them, and differ only in how they wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.message import Message

from xlaserve_client import images as image_arguments
from xlaserve_client import inputs as named_inputs
from xlaserve_client import tensors, vision_calls
from xlaserve_client.call import STAGES, Call, Method
from xlaserve_client.images import Images
from xlaserve_client.inputs import Declared, Inputs, InputTensor, ModelInputs
from xlaserve_client.results import InferResult, Timings
from xlaserve_proto import open_inference_pb2 as oip

_OIP: Final = "inference.GRPCInferenceService"
_MODEL_METADATA: Final = Method(_OIP, "ModelMetadata", oip.ModelMetadataResponse)
_MODEL_INFER: Final = Method(_OIP, "ModelInfer", oip.ModelInferResponse)
# Not retried: readiness is a question about this moment, and loading and unloading are not idempotent.
_SERVER_READY: Final = Method(_OIP, "ServerReady", oip.ServerReadyResponse)
_MODEL_READY: Final = Method(_OIP, "ModelReady", oip.ModelReadyResponse)
_LOAD: Final = Method(_OIP, "RepositoryModelLoad", oip.RepositoryModelLoadResponse)
_UNLOAD: Final = Method(_OIP, "RepositoryModelUnload", oip.RepositoryModelUnloadResponse)

IDEMPOTENT: Final = (*vision_calls.METHODS.values(), _MODEL_INFER, _MODEL_METADATA)
"""The methods that are retried and hedged."""
OF_ONE_SERVER: Final = (_LOAD, _UNLOAD)
"""The methods that change one server, and are therefore not allowed for a fleet."""


def infer(images: Images, *, model: str, mode: str | None) -> Call[InferResult]:
    """Runs the model on `images` and returns its output tensors."""
    loaded = image_arguments.load(images)
    if isinstance(loaded, list):
        sent = InputTensor("image", tensors.BYTES, (len(loaded),), tensors.bytes_to_raw(loaded))
    else:
        sent = InputTensor("pixels", tensors.datatype(loaded), loaded.shape, tensors.to_raw(loaded))
    return Call(_MODEL_INFER, _infer_request([sent], model=model, mode=mode), _read_infer)


def infer_inputs(inputs: Inputs, declared: ModelInputs, *, model: str, mode: str | None) -> Call[InferResult]:
    """Runs the model on its inputs by their names, and returns its output tensors."""
    request = _infer_request(named_inputs.load(inputs, declared), model=model, mode=mode)
    return Call(_MODEL_INFER, request, _read_infer)


def inputs_of(model: str) -> Call[ModelInputs]:
    """Asks for the inputs of a model."""
    return Call(_MODEL_METADATA, oip.ModelMetadataRequest(name=model), _read_inputs)


def ready(model: str | None) -> Call[bool]:
    """Asks whether the server, or one model, is ready."""
    if model is None:
        return Call(_SERVER_READY, oip.ServerReadyRequest(), lambda response: bool(response.ready))
    return Call(_MODEL_READY, oip.ModelReadyRequest(name=model), lambda response: bool(response.ready))


def load(model: str) -> Call[None]:
    """Loads a configured model, or reloads it."""
    return Call(_LOAD, oip.RepositoryModelLoadRequest(model_name=model), lambda _: None)


def unload(model: str) -> Call[None]:
    """Drains a model and frees it."""
    return Call(_UNLOAD, oip.RepositoryModelUnloadRequest(model_name=model), lambda _: None)


def set_priority(request: Message, priority: int) -> None:
    """Writes a priority into the request of an inference; other requests have no field for it."""
    if isinstance(request, oip.ModelInferRequest):
        request.parameters["priority"].int64_param = priority
    elif "priority" in request.DESCRIPTOR.fields_by_name:
        request.priority = priority  # type: ignore[attr-defined]


def _infer_request(inputs: Iterable[InputTensor], *, model: str, mode: str | None) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=model)
    if mode:
        request.parameters["mode"].string_param = mode
    for name, datatype, shape, raw in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(raw)
    return request


def _read_inputs(response: oip.ModelMetadataResponse) -> ModelInputs:
    declared = {one.name: Declared(one.datatype, tuple(one.shape)) for one in response.inputs}
    others = response.properties["inputs"].split(",") if "inputs" in response.properties else ()
    return ModelInputs(declared, tuple(dict.fromkeys((*declared, *others))))


def _read_infer(response: oip.ModelInferResponse) -> InferResult:
    return InferResult(
        outputs=tensors.outputs(response),
        model=response.model_name,
        version=response.model_version,
        mode=_mode(response),
        timings=_timings(response),
    )


def _mode(response: oip.ModelInferResponse) -> str:
    # Reading a missing key of a protobuf map inserts it, hence the test.
    return response.parameters["mode"].string_param if "mode" in response.parameters else ""


def _timings(response: oip.ModelInferResponse) -> Timings | None:
    parameters = response.parameters
    if "total_s" not in parameters:
        return None
    return Timings(**{stage: parameters[stage].double_param if stage in parameters else 0.0 for stage in STAGES})
