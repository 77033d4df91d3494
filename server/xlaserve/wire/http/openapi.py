"""The REST API as an OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from inspect import getdoc
from typing import Any, Final

from xlaserve import __version__
from xlaserve.engine.timings import STAGES
from xlaserve.errors import STATUS
from xlaserve.wire.http.forms import FORM
from xlaserve.wire.http.json_tensors import JSON_LENGTH, OCTETS
from xlaserve.wire.http.message import JSON
from xlaserve.wire.http.operation import Operation
from xlaserve.wire.shared.input_tensors import TENSOR_DATATYPES

Json = dict[str, Any]

VERSION: Final = "3.1.0"
NUMBER: Final[Json] = {"type": ["number", "null"]}
STRING: Final[Json] = {"type": "string"}
INTEGER: Final[Json] = {"type": "integer"}


def _object(required: Sequence[str] = (), /, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": [*required]} if required else {})}


def _list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _answered(field: str, one: Json) -> Json:
    return _object(
        ["model", "version", "mode", field, "timings"],
        model=STRING,
        version=STRING,
        mode=STRING,
        **{field: _list(one)},
        timings=_ref("Timings"),
    )


_BASE64: Final[Json] = {"type": "string", "contentEncoding": "base64"}
_CATEGORY: Final = _object(["index", "label", "score"], index=INTEGER, label=STRING, score=NUMBER)
_BOX: Final = _object(**{side: {"type": "number"} for side in ("x_min", "y_min", "x_max", "y_max")})
_DETECTION: Final = _object(["index", "label", "score", "box"], index=INTEGER, label=STRING, score=NUMBER, box=_BOX)
_KEYPOINT: Final = _object(
    ["index", "label", "score", "x", "y"], index=INTEGER, label=STRING, score=NUMBER, x=NUMBER, y=NUMBER
)
_PARAMETERS: Final = _object()
_INPUT: Final = _object(
    ["name", "shape", "datatype"],
    name=STRING,
    shape=_list(INTEGER),
    datatype={"enum": [*TENSOR_DATATYPES.values(), "BYTES"]},
    parameters=_object(binary_data_size=INTEGER),
    data=_list({}),
)
_OUTPUT: Final = _object(
    ["name", "shape", "datatype"],
    name=STRING,
    shape=_list(INTEGER),
    datatype=STRING,
    parameters=_object(binary_data_size=INTEGER),
    data=_list({}),
)
_WANTED: Final = _object(
    ["name"], name=STRING, parameters=_object(binary_data={"type": "boolean"}, classification=INTEGER)
)
_PIXELS: Final = _object(["index", "label", "pixels"], index=INTEGER, label=STRING, pixels=INTEGER)
_COUNTS: Final = {
    "description": "A histogram: observations up to each of `bounds_s` and above the one before, without the zeros at"
    " the end.",
    **_object(["counts", "total_s"], counts=_list(INTEGER), total_s={"type": "number"}),
}
_SUMMARY: Final = _object(
    ["name", "version", "state", "reason", "programs", "programs_total", "images", "requests", "failed", "total"],
    name=STRING,
    version=STRING,
    state=STRING,
    reason=STRING,
    task=STRING,
    mode=STRING,
    programs=INTEGER,
    programs_total=INTEGER,
    warnings={},
    images=INTEGER,
    requests=INTEGER,
    failed=INTEGER,
    total=_COUNTS,
    waiting_images=INTEGER,
    queued_work_s={"type": "number"},
    in_flight_images=INTEGER,
    in_flight_images_limit=INTEGER,
)
_DETAILS: Final = _object(
    ["stages", "buckets", "padded_rows", "ledger"],
    stages=_object(),
    buckets=_list(_object()),
    padded_rows=INTEGER,
    ledger=_list(_object()),
)
_FAILURE: Final = _object(
    ["at_s", "method", "status", "reason", "model", "caller", "request_id", "total_s"],
    at_s={"type": "number", "description": "Seconds since the epoch."},
    total_s=NUMBER,
    **dict.fromkeys(("method", "status", "reason", "model", "caller", "request_id"), STRING),
)
_PROCESS: Final = _object(
    ["role", "pid", "cpu_s", "resident_bytes"],
    role={"type": "string", "description": "Empty for a server that is one process."},
    pid=INTEGER,
    cpu_s={"type": "number", "description": "Processor time since the start of the process."},
    resident_bytes={"type": "integer", "description": "Memory, with all that it shares with others."},
)
_STATUS: Final = _object(
    ["version", "is_ready", "clock_s", "device", "lanes", "bounds_s", "gpus", "models", "failures"],
    name=STRING,
    version=STRING,
    is_ready={"type": "boolean"},
    clock_s={"type": "number", "description": "When it was read: counts grew by as much in the seconds between two."},
    up_s={"type": "number"},
    device=_object(),
    lanes=_object(),
    cores=INTEGER,
    processes=_list(_PROCESS),
    in_flight_requests=INTEGER,
    compiled_while_serving=INTEGER,
    bounds_s=_list({"type": "number"}),
    gpus=_list(_object()),
    models=_list(_SUMMARY),
    failures=_list(_FAILURE),
)

SCHEMAS: Final[dict[str, Json]] = {
    "Error": _object(["error"], error=STRING),
    "Timings": _object(STAGES, **{stage: {"type": "number", "description": "Seconds."} for stage in STAGES}),
    "InferRequest": _object(
        ["inputs"],
        id=STRING,
        parameters=_object(
            mode=STRING,
            pixel_range={"enum": ["0..255", "0..1"]},
            timeout={"type": "integer", "minimum": 1, "description": "Microseconds."},
            binary_data_output={"type": "boolean"},
        ),
        inputs=_list(_INPUT, minItems=1, maxItems=1),
        outputs=_list(_WANTED),
    ),
    "InferAnswer": _object(
        ["model_name", "model_version", "outputs"],
        id=STRING,
        model_name=STRING,
        model_version=STRING,
        parameters=_PARAMETERS,
        outputs=_list(_OUTPUT),
    ),
    "Images": _object(
        ["image"],
        image={"anyOf": [_BASE64, _list(_BASE64)]},
        mode=STRING,
        timeout_s={"type": "number", "exclusiveMinimum": 0},
        priority={"type": "integer", "minimum": 0, "maximum": 3},
    ),
    "Classifications": _answered("classifications", _object(["categories"], categories=_list(_CATEGORY))),
    "Detections": _answered(
        "results", _object(["detections"], detections=_list(_DETECTION), height=INTEGER, width=INTEGER)
    ),
    "ClassMaps": _answered("maps", _object(["png"], png=_BASE64, counts=_list(_PIXELS), height=INTEGER, width=INTEGER)),
    "Embeddings": _answered("embeddings", _object(["values"], values=_list(NUMBER))),
    "Transcriptions": _answered(
        "transcriptions",
        _object(["text", "score", "categories"], text=STRING, score=NUMBER, categories=_list(_CATEGORY)),
    ),
    "Keypoints": _answered(
        "results", _object(["keypoints"], keypoints=_list(_KEYPOINT), height=INTEGER, width=INTEGER)
    ),
    "MadeImages": _answered("images", _object(["png"], png=_BASE64, height=INTEGER, width=INTEGER)),
    "PredictRequest": _object(
        signature_name={"const": "serving_default"},
        instances=_list({}, description='Rows: pixels as nested lists, or {"b64": ...}.'),
        inputs={"description": "Columns: all pixels, or all images, or an object with either."},
    )
    | {"oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}]},
    "Predictions": _object(predictions=_list({}), outputs={}),
    "Status": _STATUS,
    "ModelStatus": {"allOf": [_SUMMARY, _DETAILS]},
    "Object": _object(),
    "List": _list(_object()),
}
OF_TASKS: Final[dict[str, tuple[str, dict[str, Json]]]] = {
    "classify": ("Classifications", {"top_k": {"type": "integer", "minimum": 0}}),
    "detect": (
        "Detections",
        {"min_score": {"type": "number"}, "max_detections": {"type": "integer", "minimum": 0}},
    ),
    "segment": ("ClassMaps", {"pixel_counts": {"type": "boolean"}}),
    "embed": ("Embeddings", {}),
    "transcribe": ("Transcriptions", {}),
    "locate": ("Keypoints", {"min_score": {"type": "number"}}),
    "transform": ("MadeImages", {}),
}
"""The answer of each method for images, and its own options."""
IMAGE_TYPES: Final = ("image/jpeg", "image/png", "image/webp")
DRAWN: Final = ("classify", "detect", "segment", "transcribe", "locate", "transform")
"""Methods that answer with a picture, for who accepts that."""
OTHER_ANSWERS: Final = {"predict": "Predictions", "status": "Status", "status_of_model": "ModelStatus"}

TEXTS: Final = {"metrics": "text/plain", "docs": "text/html"}
"""Methods whose answers are no JSON."""


def document(operations: Iterable[Operation]) -> Json:
    """Returns the OpenAPI document of these operations."""
    paths: dict[str, Json] = {}
    for operation in operations:
        for number, path in enumerate(operation.paths):
            paths.setdefault(path, {})[operation.verb.lower()] = _operation(operation, path, number)
    return {
        "openapi": VERSION,
        "info": {"title": "xlaserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }


def _operation(operation: Operation, path: str, number: int) -> Json:
    return {
        "operationId": f"{operation.name}{number or ''}",
        "summary": getdoc(operation.method) or operation.name,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": STRING} for name in re.findall(r"{(\w+)}", path)
        ],
        **_body(operation),
        "responses": {"200": _answer(operation), **_errors(operation)},
    }


def _body(operation: Operation) -> Json:
    if operation.verb != "POST":
        return {}
    if operation.name == "infer":
        content = {JSON: {"schema": _ref("InferRequest")}, OCTETS: {"schema": {"type": "string", "format": "binary"}}}
        return {"requestBody": {"required": True, "content": content}}
    if operation.name == "predict":
        return {"requestBody": {"required": True, "content": {JSON: {"schema": _ref("PredictRequest")}}}}
    if operation.name in OF_TASKS:
        options = {"allOf": [_ref("Images"), _object(**OF_TASKS[operation.name][1])]}
        files = _object(image=_list({"type": "string", "contentMediaType": "image/jpeg"}))
        content = {
            FORM: {"schema": {"allOf": [files, _object(**OF_TASKS[operation.name][1])]}},
            JSON: {"schema": options},
            **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES},
        }
        return {"requestBody": {"required": True, "content": content}}
    return {"requestBody": {"content": {JSON: {"schema": _ref("Object")}}}}


def _answer(operation: Operation) -> Json:
    text = {"description": "The answer."}
    if operation.name in TEXTS:
        return {**text, "content": {TEXTS[operation.name]: {"schema": STRING}}}
    if operation.name == "infer":
        header = {JSON_LENGTH: {"description": "Bytes of JSON before the tensors.", "schema": INTEGER}}
        content = {JSON: {"schema": _ref("InferAnswer")}, OCTETS: {"schema": {"type": "string", "format": "binary"}}}
        return {**text, "headers": header, "content": content}
    more = {"image/png": {"schema": {"type": "string", "format": "binary"}}} if operation.name in DRAWN else {}
    schema = OF_TASKS[operation.name][0] if operation.name in OF_TASKS else OTHER_ANSWERS.get(operation.name, "Object")
    return {**text, "content": {JSON: {"schema": _ref("List" if operation.name == "index" else schema)}, **more}}


def _errors(operation: Operation) -> Json:
    statuses = sorted({status.http for status in STATUS.values()})
    content = {JSON: {"schema": _ref("Object" if operation.name.endswith("ready") else "Error")}}
    return {str(code): {"description": HTTPStatus(code).phrase, "content": content} for code in statuses}
