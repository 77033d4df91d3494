"""The Open Inference Protocol's REST, with Triton's extensions: its methods, from `/v2/models/NAME/infer` on.

`json_tensors` parses a request, `wire.shared` checks it and gives the output tensors, `_respond` writes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from xlaserve.engine.timings import STAGES, Timings
from xlaserve.errors import InvalidArgument
from xlaserve.models.version import Served
from xlaserve.pipeline.pipeline import Answer
from xlaserve.wire.http import fields, json_tensors
from xlaserve.wire.http.json_tensors import BINARY_SIZE, JSON_LENGTH, OCTETS, JsonListing
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, Json, json_answer, separated, to_json
from xlaserve.wire.shared import inference
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.models import Models, server_metadata
from xlaserve.wire.shared.output_tensors import OutputTensor, output_tensors
from xlaserve.wire.shared.parts import Part

LISTING: Final = JsonListing()


@dataclass(eq=False)
class OpenInference:
    """Its methods, as `routes` names them."""

    calls: Calls
    models: Models
    origins: Collection[str] = ()
    """Of web pages that may change models."""
    is_live: Callable[[], bool] = lambda: True
    """Whether no process that this one depends on hangs."""

    async def infer(self, request: HttpRequest) -> HttpAnswer:
        """Runs a model and returns its outputs."""
        name, version = _model(request)
        with self.calls.enter("infer", name, version, math.inf) as call:
            size = json_tensors.json_bytes(request)
            sent = json_tensors.parse(await request.json(size), request.body[size:])
            if sent.id and not version:
                call.route(sent.id)
            parsed, wanted = inference.parse(sent, call, LISTING)
            answer = await call.run(parsed)
            outputs = output_tensors(wanted, call.served, answer, LISTING)
            return _respond(sent.id, outputs, call.served, answer, call.end(answer))

    async def live(self, request: HttpRequest) -> HttpAnswer:
        """Returns 200 while the server works, else 503, as `liveness` of the health service over gRPC."""
        return _status({"live": self.is_live()}, "live")

    async def ready(self, request: HttpRequest) -> HttpAnswer:
        """Returns 200 once start-up has finished and at least one model serves, else 503."""
        return _status({"ready": self.models.directory.is_ready}, "ready")

    async def model_ready(self, request: HttpRequest) -> HttpAnswer:
        """Returns 200 if a model is ready, else 503."""
        name, version = _model(request)
        return _status({"name": name, "ready": self.models.is_ready(name, version)}, "ready")

    async def server_metadata(self, request: HttpRequest) -> HttpAnswer:
        """Returns the server's name, version and protocol extensions."""
        return json_answer(server_metadata())

    async def model_metadata(self, request: HttpRequest) -> HttpAnswer:
        """Returns the metadata of a model: its versions, inputs and outputs."""
        return json_answer(self.models.metadata(*_model(request)))

    async def model_config(self, request: HttpRequest) -> HttpAnswer:
        """Returns the configuration of a model, as Triton does."""
        return json_answer(self.models.config(*_model(request)))

    async def model_statistics(self, request: HttpRequest) -> HttpAnswer:
        """Returns statistics of one model or of all."""
        return json_answer(await self.models.statistics(*_model(request)))

    async def index(self, request: HttpRequest) -> HttpAnswer:
        """Lists the models and their states."""
        only_ready = fields.flag(await request.json(), "ready")
        return json_answer(self.models.index("", only_ready=only_ready))

    async def load(self, request: HttpRequest) -> HttpAnswer:
        """Loads or reloads a model."""
        self._check_origin(request)
        await self.models.load("", request.path["model"], fields.object_of(await request.json(), "parameters"))
        return json_answer({})

    async def unload(self, request: HttpRequest) -> HttpAnswer:
        """Unloads a model once its accepted requests are answered."""
        self._check_origin(request)
        await self.models.unload("", request.path["model"], fields.object_of(await request.json(), "parameters"))
        return json_answer({})

    def _check_origin(self, request: HttpRequest) -> None:
        """Raises InvalidArgument for what a web page sends: any page can send it to the machine of who opens it."""
        if "origin" in request.headers and request.headers["origin"] not in self.origins:
            raise InvalidArgument(
                "origin", "none, or one that cors_origins names: pages may not change models", "another"
            )


def _model(request: HttpRequest) -> tuple[str, str]:
    return request.path.get("model", ""), request.path.get("version", "")


def _status(value: Json, field: str) -> HttpAnswer:
    return json_answer(value, 200 if value[field] else 503)


def _respond(id_: str, outputs: Iterable[OutputTensor], served: Served, answer: Answer, timings: Timings) -> HttpAnswer:
    settings = served.settings
    stamp = {"mode": answer.mode, **{stage: getattr(timings, stage) for stage in STAGES}}
    if answer.warning:
        stamp["warning"] = answer.warning
    head = {"model_name": settings.name, "model_version": settings.version, **({"id": id_} if id_ else {})}
    tensors: list[Part] = []
    binary: list[Part] = []
    for output in outputs:
        fields: Json = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.is_raw:
            tensors += [b",", to_json({**fields, "parameters": {BINARY_SIZE: sum(map(len, output.values))}})]
            binary += output.values
        else:
            tensors += [b",", to_json(fields)[:-1], b',"data":[', *separated(output.values), b"]}"]
    parts = [to_json(head)[:-1], b',"outputs":[', *tensors[1:], b'],"parameters":', to_json(stamp), b"}"]
    if not binary:
        return HttpAnswer(parts)
    return HttpAnswer([*parts, *binary], media_type=OCTETS, headers=[(JSON_LENGTH, str(sum(map(len, parts))))])
