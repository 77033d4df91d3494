"""TensorFlow Serving's REST: rows or columns of JSON to `pipeline.Request`, answers to JSON of the same form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs, Value
from xlaserve.images.frame import Frame
from xlaserve.models.task import Classification, Task
from xlaserve.pipeline import Answer, Render, Request
from xlaserve.wire.http import serving_body
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, Part, json_answer, separated, to_json
from xlaserve.wire.shared import tensorflow_serving_models
from xlaserve.wire.shared.call import Calls
from xlaserve.wire.shared.inference import Wanted, all_outputs
from xlaserve.wire.shared.input_tensors import images_of
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.objects import DEFAULT_TOP_K, task_of

MAX_INLINE_VALUES: Final = 2**12
"""Values that are listed in JSON on the event loop, at some 0.3 us each."""


@dataclass(eq=False)
class TensorflowServing:
    """Its methods, as `routes` names them."""

    calls: Calls
    models: Models

    async def predict(self, request: HttpRequest) -> HttpAnswer:
        """Runs a model and returns its outputs, as TensorFlow Serving does."""
        name, version = _model(request)
        with self.calls.enter("predict", name, version, math.inf) as call:
            served, settings = call.served, call.served.settings
            body = serving_body.parse(await request.json(), settings.input_name)
            images = images_of(body.inputs, settings.pixel_range)
            wanted = all_outputs(served.model.task, settings.output_name)
            is_small = wanted.count_values(served, images) <= MAX_INLINE_VALUES
            listing = ListedOutputs()
            answer = await call.run(Request("", images, call.deadline, None if is_small else listing))
            rows = answer.rendered or [*map(listing.row, _rows(answer))]
            found = HttpAnswer(_respond(rows, wanted, is_rows=body.is_rows))
            call.end(answer)
            return found

    async def classify(self, request: HttpRequest) -> HttpAnswer:
        """Classifies the images of `examples`."""
        name, version = _model(request)
        with self.calls.enter("classify", name, version, math.inf) as call:
            images = serving_body.examples(await request.json())
            task = task_of(call.served, Classification)
            listing = ListedClasses(min(DEFAULT_TOP_K, task.classes))
            answer = await call.run(Request("", images, call.deadline, listing))
            call.end(answer)
            return HttpAnswer([b'{"results":[', *separated(answer.rendered), b"]}"])

    async def regress(self, request: HttpRequest) -> HttpAnswer:
        """Answers the images of `examples` with one number each."""
        name, version = _model(request)
        with self.calls.enter("regress", name, version, math.inf) as call:
            tensorflow_serving_models.check_regression(call.served.model.task)
            images = serving_body.examples(await request.json())
            answer = await call.run(Request("", images, call.deadline))
            call.end(answer)
            (values,) = answer.outputs
            return json_answer(
                {"results": [value if math.isfinite(value) else None for value in values[:, 0].tolist()]}
            )

    async def model_status(self, request: HttpRequest) -> HttpAnswer:
        """Returns the state of each version of a model, as TensorFlow Serving does."""
        return json_answer(tensorflow_serving_models.status(self.models, *_model(request)))

    async def signature(self, request: HttpRequest) -> HttpAnswer:
        """Returns the signature of a model, as TensorFlow Serving does."""
        return json_answer(tensorflow_serving_models.metadata(self.models, *_model(request)))


def _model(request: HttpRequest) -> tuple[str, str]:
    label = request.path.get("label", "")
    tensorflow_serving_models.check_label(label)
    return request.path["model"], label or request.path.get("version", "")


class ListedOutputs(NamedTuple):
    """Renders an image's part of each output."""

    def renderer(self, task: Task) -> Render:
        """Returns what gives a list of JSON, nested as the output is."""
        return lambda outputs, frame: self.row(outputs)

    def row(self, outputs: Outputs) -> list[bytes]:
        """Returns the only row of each output in JSON."""
        return [_nested(output[0]) for output in outputs]


class ListedClasses(NamedTuple):
    """Renders an image's likeliest classes."""

    k: int

    def renderer(self, task: Classification) -> Render:
        """Returns what gives pairs of a label and a score in JSON."""

        def render(outputs: Outputs, frame: Frame) -> bytes:
            (categories,) = task.top(outputs, self.k)
            return to_json([[one.label, one.score if math.isfinite(one.score) else None] for one in categories])

        return render


def _rows(answer: Answer) -> Iterable[Outputs]:
    return (tuple(output[row : row + 1] for output in answer.outputs) for row in range(answer.images))


def _respond(rows: Sequence[Sequence[bytes]], wanted: Wanted, *, is_rows: bool) -> Sequence[Part]:
    """Returns the body of an answer: a value for each image, or a list for each output."""
    names = [to_json(spec.name) for _, spec in wanted.outputs]
    is_only = len(names) == 1
    if is_rows:
        found = [row[0] if is_only else _object(names, row) for row in rows]
        return [b'{"predictions":[', *separated(found), b"]}"]
    columns = [[b"[", *separated(column), b"]"] for column in zip(*rows, strict=True)]
    if is_only:
        return [b'{"outputs":', *columns[0], b"}"]
    named = [part for name, column in zip(names, columns, strict=True) for part in (b",", name, b":", *column)]
    return [b'{"outputs":{', *named[1:], b"}}"]


def _object(names: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % pair for pair in zip(names, values, strict=True))


def _nested(values: NDArray[Value]) -> bytes:
    """Returns values as nested lists; what is no number is null."""
    try:
        return to_json(values.tolist())
    except ValueError:
        numbers = values.astype(object)
        numbers[~np.isfinite(values)] = None
        return to_json(numbers.tolist())
