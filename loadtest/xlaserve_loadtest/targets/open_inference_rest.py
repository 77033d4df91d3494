"""The Open Inference Protocol over REST, with binary tensors where the server has that extension."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import BYTES, Tensor
from xlaserve_loadtest.targets.answers import Answer, NoAnswer, Output, stages_of
from xlaserve_loadtest.targets.channel import PLAIN, Transport
from xlaserve_loadtest.targets.http_client import HttpAnswer
from xlaserve_loadtest.targets.http_target import Asked, HttpTarget, encoded, model_path, said_by
from xlaserve_loadtest.targets.open_inference import size_of
from xlaserve_loadtest.targets.requests import Input, inputs_of
from xlaserve_loadtest.targets.target import ModelInfo, TargetError

BINARY: Final = "binary_tensor_data"
JSON_LENGTH: Final = "inference-header-content-length"
_BINARY_SIZE: Final = "binary_data_size"
_MODELS: Final = "/v2/models/"


def target(deadline_s: float) -> HttpTarget:
    """Returns the target. `deadline_s` bounds every inference."""
    return HttpTarget(lambda model: model_path(_MODELS, model, "/infer"), read, deadline_s)


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server for its metadata and that of a model. Raises TargetError."""
    async with Asked(address, transport) as server:
        about = await server.get("/v2")
        metadata = await server.get(model_path(_MODELS, model))
        try:
            config = await server.get(model_path(_MODELS, model, "/config"))
        except TargetError:  # an extension that not every server has
            config = {}
    try:
        inputs = _tensors(metadata["inputs"])
        properties = {str(name): str(value) for name, value in metadata.get("properties", {}).items()}
        return ModelInfo(
            name=model,
            size=size_of(inputs, properties),
            outputs=_tensors(metadata["outputs"]),
            properties=properties,
            server=f"{about.get('name')} {about.get('version')}",
            inputs=inputs,
            optional=tuple(own["name"] for own in config.get("input", ()) if own.get("optional")),
            transport=transport,
            own_name=str(metadata.get("name", "")),
            extensions=tuple(about.get("extensions", ())),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TargetError(f"{address}: the metadata of {model} are not as the protocol has them: {error!r}") from None


def encode(request: Request, model: ModelInfo) -> Request:
    """Returns a request as it is sent. Raises PayloadError."""
    inputs = inputs_of(request)
    is_binary = BINARY in model.extensions
    parameters: dict[str, Any] = {"mode": request.mode} if request.mode else {}
    if not is_binary:
        body = _json({"inputs": [*map(_listed, inputs)], "parameters": parameters})
        return encoded(request, [body], model.transport, {"content-type": "application/json"})
    parameters["binary_data_output"] = True
    head = _json({"inputs": [*map(_sized, inputs)], "parameters": parameters})
    headers = {"content-type": "application/octet-stream", JSON_LENGTH: str(len(head))}
    return encoded(request, [head, *(one.raw for one in inputs)], model.transport, headers, ends_with_image=True)


def read(answer: HttpAnswer, model: ModelInfo) -> Answer:
    """Reads an answer in JSON, with binary tensors or without. Raises NoAnswer."""
    length = answer.headers.get(JSON_LENGTH)
    try:
        size = len(answer.body) if length is None else int(length)
        said = said_by(answer.body[:size])
        outputs = _outputs(said["outputs"], answer.body, size)
        parameters = said.get("parameters") or {}
        return Answer(outputs, said.get("model_name", ""), parameters.get("mode", ""), stages_of(parameters))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"not an answer of the protocol: {error!r}") from None


def _outputs(declared: Iterable[Mapping[str, Any]], body: bytes, place: int) -> list[Output]:
    """Returns the outputs; those in binary stand in `body` from `place` on. Raises NoAnswer."""
    outputs = []
    for one in declared:
        name, datatype, shape = one["name"], one["datatype"], tuple(map(int, one["shape"]))
        size = one.get("parameters", {}).get(_BINARY_SIZE)
        if size is None:
            outputs.append(Output(name, datatype, shape, listed=_flat(one["data"])))
            continue
        if not 0 <= size <= len(body) - place:
            raise NoAnswer(f"output {name} has {size} bytes, and {len(body) - place} follow")
        outputs.append(Output(name, datatype, shape, body[place : place + size]))
        place += size
    if place != len(body):
        raise NoAnswer(f"{len(body) - place} bytes follow the outputs")
    return outputs


def _flat(values: Sequence[Any]) -> Sequence[Any]:
    """Returns elements that are listed flat or nested."""
    while values and isinstance(values[0], list):
        values = [*chain.from_iterable(values)]
    return values


def _tensors(declared: Iterable[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(one["name"], one["datatype"], tuple(map(int, one["shape"]))) for one in declared)


def _described(one: Input) -> dict[str, Any]:
    return {"name": one.name, "datatype": one.datatype, "shape": one.shape}


def _sized(one: Input) -> dict[str, Any]:
    return {**_described(one), "parameters": {_BINARY_SIZE: len(one.raw)}}


def _listed(one: Input) -> dict[str, Any]:
    # JSON has no bytes: what servers agree on is base64.
    data = [base64.b64encode(own).decode() for own in one.elements()] if one.datatype == BYTES else one.numbers()
    return {**_described(one), "data": data}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
