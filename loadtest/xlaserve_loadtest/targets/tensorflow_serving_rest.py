"""TensorFlow Serving over REST: predict in rows of JSON."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import numpy as np
from google.protobuf.json_format import ParseDict, ParseError

from xlaserve_loadtest.schedule.payload import PayloadError, Request
from xlaserve_loadtest.schedule.tensors import BYTES, Tensor
from xlaserve_loadtest.targets.answers import Answer, NoAnswer, Output
from xlaserve_loadtest.targets.channel import PLAIN, Transport
from xlaserve_loadtest.targets.http_client import HttpAnswer
from xlaserve_loadtest.targets.http_target import Asked, HttpTarget, encoded, model_path, said_by
from xlaserve_loadtest.targets.requests import Input, check_modeless, inputs_of
from xlaserve_loadtest.targets.target import ModelInfo, TargetError
from xlaserve_loadtest.targets.tensorflow_serving import SIGNATURE, SIGNATURE_DEF, model_info
from xlaserve_proto import tensorflow_messages_pb2 as pb

_MODELS: Final = "/v1/models/"


def target(deadline_s: float) -> HttpTarget:
    """Returns the target. `deadline_s` bounds every inference."""
    return HttpTarget(lambda model: model_path(_MODELS, model, ":predict"), read, deadline_s)


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server for the signature of a model. Raises TargetError."""
    async with Asked(address, transport) as server:
        said = await server.get(model_path(_MODELS, model, "/metadata"))
    try:
        signatures = ParseDict(said["metadata"][SIGNATURE_DEF], pb.SignatureDefMap(), ignore_unknown_fields=True)
        version = int(said["model_spec"]["version"])
    except (KeyError, TypeError, ValueError, ParseError) as error:
        raise TargetError(f"{address}: the metadata of {model} are not as the protocol has them: {error!r}") from None
    return model_info(address, model, signatures, version, transport)


def encode(request: Request, model: ModelInfo) -> Request:
    """Returns a request as it is sent. Raises PayloadError."""
    check_modeless(request, "TensorFlow Serving")
    declared = {own.name: own for own in model.inputs}
    columns = {one.name: _column(one, declared.get(one.name), model) for one in inputs_of(request)}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    # A signature of one input needs no names.
    is_only = len(columns) == 1 and [*columns] == [*declared]
    instances = next(iter(columns.values())) if is_only else rows
    body = json.dumps({"signature_name": model.properties[SIGNATURE], "instances": instances}, separators=(",", ":"))
    return encoded(request, [body.encode()], model.transport, {"content-type": "application/json"})


def read(answer: HttpAnswer, model: ModelInfo) -> Answer:
    """Reads an answer in rows: values of the only output, or objects that name them. Raises NoAnswer."""
    rows = said_by(answer.body).get("predictions")
    if not isinstance(rows, list):
        raise NoAnswer("expected a list of predictions")
    if not rows or not model.outputs:
        return Answer([])
    if not isinstance(rows[0], dict):
        return Answer([_output(model.outputs[0], rows)])
    try:
        return Answer([_output(one, [row[one.name] for row in rows]) for one in model.outputs])
    except (KeyError, TypeError) as error:
        raise NoAnswer(f"expected the outputs of the signature in each prediction: {error!r}") from None


def _output(declared: Tensor, rows: list[Any]) -> Output:
    """Returns an output, whose type JSON does not say."""
    try:
        values = np.array(rows, dtype=object)
    except ValueError as error:
        raise NoAnswer(f"output {declared.name}: {error}") from None
    return Output(declared.name, declared.datatype, values.shape, listed=values.ravel().tolist())


def _column(one: Input, declared: Tensor | None, model: ModelInfo) -> list[Any]:
    """Returns what each row has of an input, which need not be declared: a model of images takes files as well."""
    if declared and not declared.has_batch:
        raise PayloadError(f"input {one.name} has no batch: {model.name} can't be asked for predictions in rows")
    return [_coded(value) for value in one.rows()] if one.datatype == BYTES else one.rows()


def _coded(value: Any) -> Any:
    return [*map(_coded, value)] if isinstance(value, list) else {"b64": base64.b64encode(value).decode()}
