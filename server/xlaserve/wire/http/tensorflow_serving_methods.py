"""TensorFlow Serving's REST: rows or columns of JSON to `pipeline.Request`, answers to JSON of the same form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve.engine.program import Outputs
from xlaserve.models.task import Category
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.wire.http import serving_body
from xlaserve.wire.http.json_tensors import JsonListing
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, json_answer, separated, to_json
from xlaserve.wire.shared import inference, named_inputs
from xlaserve.wire.shared import tensorflow_serving_models as serving
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.inference import InferRequest
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.output_tensors import RenderedOutputs, WantedOutput
from xlaserve.wire.shared.parts import Part

LISTING: Final = JsonListing(is_nested=True)


@dataclass(eq=False)
class TensorflowServing:
    """Its methods, as `routes` names them."""

    calls: Calls
    models: Models

    async def predict(self, request: HttpRequest) -> HttpAnswer:
        """Runs a model and returns its outputs, as TensorFlow Serving does."""
        name, version = _model(request)
        with self.calls.enter("predict", name, version, math.inf) as call:
            task, settings = call.served.model.task, call.served.settings
            model = call.served.model
            inputs = {} if model.is_of_one_image else named_inputs.flags_of(model, settings.input_name)
            body = serving_body.parse(await request.json(), settings.input_name, inputs)
            parsed, wanted = inference.parse(InferRequest(body.inputs), call, LISTING)
            answer = await call.run(parsed)
            render = RenderedOutputs(wanted, LISTING).renderer(task)
            rows = answer.rendered or [*map(render, _rows(answer), answer.frames)]
            found = HttpAnswer(_respond(rows, wanted, is_rows=body.is_rows))
            call.end(answer)
            return found

    async def classify(self, request: HttpRequest) -> HttpAnswer:
        """Classifies the images of `examples`."""
        name, version = _model(request)
        with self.calls.enter("classify", name, version, math.inf) as call:
            images = serving_body.examples(await request.json())
            answer = await call.run(serving.classify(images, call.served, call.deadline, _labels))
            rows = serving.classified(call.served, answer, _labels)
            call.end(answer)
            return HttpAnswer([b'{"results":[', *separated(rows), b"]}"])

    async def regress(self, request: HttpRequest) -> HttpAnswer:
        """Answers the images of `examples` with one number each."""
        name, version = _model(request)
        with self.calls.enter("regress", name, version, math.inf) as call:
            place = serving.regressed(call.served.model.task)
            images = serving_body.examples(await request.json())
            answer = await call.run(Request("", images, call.deadline))
            call.end(answer)
            return HttpAnswer([b'{"results":[', *LISTING.numbers(answer.outputs[place].reshape(-1)), b"]}"])

    async def model_status(self, request: HttpRequest) -> HttpAnswer:
        """Returns the state of each version of a model, as TensorFlow Serving does."""
        return json_answer(serving.status(self.models, *_model(request)))

    async def signature(self, request: HttpRequest) -> HttpAnswer:
        """Returns the signature of a model, as TensorFlow Serving does."""
        return json_answer(serving.metadata(self.models, *_model(request)))


def _model(request: HttpRequest) -> tuple[str, str]:
    label = request.path.get("label", "")
    serving.check_label(label)
    return request.path["model"], label or request.path.get("version", "")


def _labels(row: Sequence[Category]) -> bytes:
    """Returns an image's likeliest classes in JSON: pairs of a label and a score."""
    return to_json([[one.label, one.score if math.isfinite(one.score) else None] for one in row])


def _rows(answer: Answer) -> Iterable[Outputs]:
    return (tuple(output[row : row + 1] for output in answer.outputs) for row in range(answer.images))


def _respond(
    written: Sequence[Sequence[Sequence[Part]]], wanted: Sequence[WantedOutput], *, is_rows: bool
) -> Sequence[Part]:
    """Returns the body of an answer: a value for each image, or a list for each output."""
    names = [to_json(one.spec.name) for one in wanted]
    rows = [[value for (value,) in row] for row in written]
    is_only = len(names) == 1
    if is_rows:
        found = ([row[0]] if is_only else _object(names, row) for row in rows)
        between = [part for row in found for part in (b",", *row)][1:]
        return [b'{"predictions":[', *between, b"]}"]
    columns = [[b"[", *separated(column), b"]"] for column in zip(*rows, strict=True)]
    if is_only:
        return [b'{"outputs":', *columns[0], b"}"]
    named = [part for name, column in zip(names, columns, strict=True) for part in (b",", name, b":", *column)]
    return [b'{"outputs":{', *named[1:], b"}}"]


def _object(names: Sequence[bytes], values: Sequence[Part]) -> Sequence[Part]:
    """Returns an object in parts, which are not joined: they may be large, and this is the event loop."""
    fields = [part for name, value in zip(names, values, strict=True) for part in (b",", name, b":", value)]
    return [b"{", *fields[1:], b"}"]
