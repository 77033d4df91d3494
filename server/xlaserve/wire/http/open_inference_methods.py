"""The Open Inference Protocol's REST, with Triton's extensions: requests to `pipeline.Request`, answers to JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from xlaserve.engine.program import Images
from xlaserve.engine.timings import STAGES, Timings
from xlaserve.errors import InvalidArgument
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Classification, Task
from xlaserve.models.version import Served
from xlaserve.pipeline import Answer, Pending, Render, Rendering, Request
from xlaserve.wire.http import fields
from xlaserve.wire.http.json_tensors import (
    BINARY_SIZE,
    DATATYPES,
    JSON_LENGTH,
    OCTETS,
    InferBody,
    as_bytes,
    json_bytes,
    listed,
    parse,
)
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, Json, Part, json_answer, separated, to_json
from xlaserve.wire.shared.call import Call, Calls
from xlaserve.wire.shared.inference import Wanted, categories, check_outputs, check_parameters, fits_inline
from xlaserve.wire.shared.input_tensors import images_of, raw_bytes
from xlaserve.wire.shared.models import Models, server_metadata

MAX_INLINE_VALUES: Final = 2**12
"""Values that are listed in JSON on the event loop, at some 0.3 us each."""


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
            body = await _read(request)
            if body.id and not version:
                call.route(body.id)
            parsed, wanted = _parse(body, call)
            answer = await call.run(parsed)
            outputs = _outputs(body, wanted, call.served, answer)
            return _respond(body.id, outputs, call.served, answer, call.end(answer))

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


async def _read(request: HttpRequest) -> InferBody:
    size = json_bytes(request)
    return parse(await request.json(size), request.body[size:])


def _parse(body: InferBody, call: Call) -> tuple[Request, Wanted]:
    """Raises InvalidArgument or UnsupportedFeature."""
    served = call.served
    settings = served.settings
    is_strict = settings.strict_parameters
    parameters = check_parameters(body.parameters.items())
    parameters.check_unknown(is_strict=is_strict)
    outputs = ((output.name, output.parameters.items()) for output in body.outputs)
    wanted = check_outputs(outputs, served.model.task, settings.output_name, is_strict=is_strict)
    ranges = settings.pixel_range, parameters.pixel_range
    images = images_of(body.inputs, *ranges, input_name=settings.input_name, is_strict=is_strict)
    until = min(call.deadline, call.began + parameters.timeout_s)
    rendering = _rendering(body, wanted, served, images)
    return Request(parameters.mode, images, until, rendering, parameters.priority), wanted


class ListedClasses(NamedTuple):
    """Renders an image's likeliest classes as the `classification` extension has them."""

    k: int
    is_binary: bool

    def renderer(self, task: Classification) -> Render:
        """Returns what gives them as they are sent."""
        return lambda outputs, frame: self.write(categories(task, outputs, self.k)[0])

    def write(self, elements: Sequence[bytes]) -> bytes:
        """Returns them as they are sent."""
        return raw_bytes(elements) if self.is_binary else to_json([one.decode() for one in elements])[1:-1]


class ListedValues(NamedTuple):
    """Renders an image's part of each of some outputs, by their indices."""

    outputs: Sequence[int]

    def renderer(self, task: Task) -> Render:
        """Returns what gives a list of JSON."""
        return lambda outputs, frame: [listed(outputs[index]) for index in self.outputs]


def _rendering(
    body: InferBody, wanted: Wanted, served: Served, images: Images | Pending | Sequence[Encoded]
) -> Rendering | None:
    """Returns what renders each image's part of the response on a thread; None where the event loop can do it."""
    if wanted.classes:
        ((_, scores),) = wanted.outputs
        listing = ListedClasses(wanted.classes, body.has_binary(scores.name))
        return None if fits_inline(images, wanted.classes, scores.shape[1]) else listing
    in_json = [index for index, output in wanted.outputs if not body.has_binary(output.name)]
    if not in_json or wanted.count_values(served, images) <= MAX_INLINE_VALUES:
        return None
    return ListedValues(in_json)


class Output(NamedTuple):
    """An output as it is sent."""

    fields: Json
    values: Sequence[Part]
    is_binary: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return sum(map(len, self.values))


def _outputs(body: InferBody, wanted: Wanted, served: Served, answer: Answer) -> list[Output]:
    if wanted.classes:
        return [_classes(body, wanted, served.model.task, answer)]
    outputs = []
    rendered = zip(*answer.rendered, strict=True)
    for index, spec in wanted.outputs:
        values = answer.outputs[index]
        fields = {"name": spec.name, "datatype": DATATYPES[values.dtype], "shape": [*values.shape]}
        if body.has_binary(spec.name):
            outputs.append(Output(fields, [as_bytes(values)], is_binary=True))
        else:
            pieces = next(rendered) if answer.rendered else [listed(values)]
            outputs.append(Output(fields, separated(pieces), is_binary=False))
    return outputs


def _classes(body: InferBody, wanted: Wanted, task: Task, answer: Answer) -> Output:
    assert isinstance(task, Classification)
    ((_, spec),) = wanted.outputs
    listing = ListedClasses(wanted.classes, body.has_binary(spec.name))
    rows = answer.rendered or [*map(listing.write, categories(task, answer.outputs, wanted.classes))]
    fields = {"name": spec.name, "datatype": "BYTES", "shape": [answer.images, wanted.classes]}
    return Output(fields, rows if listing.is_binary else separated(rows), listing.is_binary)


def _respond(id_: str, outputs: Sequence[Output], served: Served, answer: Answer, timings: Timings) -> HttpAnswer:
    settings = served.settings
    stamp = {"mode": answer.mode, **{stage: getattr(timings, stage) for stage in STAGES}}
    if answer.warning:
        stamp["warning"] = answer.warning
    head = {"model_name": settings.name, "model_version": settings.version, **({"id": id_} if id_ else {})}
    parts: list[Part] = [to_json(head)[:-1], b',"outputs":[']
    for number, output in enumerate(outputs):
        size = {"parameters": {BINARY_SIZE: output.size_bytes}} if output.is_binary else {}
        parts += [b"," if number else b"", to_json({**output.fields, **size})[:-1]]
        parts += [b"}"] if output.is_binary else [b',"data":[', *output.values, b"]}"]
    parts += [b'],"parameters":', to_json(stamp), b"}"]
    binary = [part for output in outputs if output.is_binary for part in output.values]
    if not binary:
        return HttpAnswer(parts)
    return HttpAnswer([*parts, *binary], media_type=OCTETS, headers=[(JSON_LENGTH, str(sum(map(len, parts))))])
