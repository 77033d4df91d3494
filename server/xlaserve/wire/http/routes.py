"""The methods of HTTP: the path, the verb and the roles of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from xlaserve.admission.caller import ADMIN, ANYONE, INFER, OBSERVE, READ, Role
from xlaserve.admission.hosts import ANY_HOST, Hosts
from xlaserve.errors import NotFound, shown
from xlaserve.wire.http import docs as docs_page
from xlaserve.wire.http import page_files
from xlaserve.wire.http.http_calls import CallsIn
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, json_answer
from xlaserve.wire.http.open_inference_methods import OpenInference
from xlaserve.wire.http.openapi import document
from xlaserve.wire.http.operation import Method, Operation
from xlaserve.wire.http.serving_body import has_examples
from xlaserve.wire.http.status_pages import Status
from xlaserve.wire.http.tensorflow_serving_methods import TensorflowServing
from xlaserve.wire.http.vision_methods import Vision

MODEL: Final = "/v2/models/{model}"
MODELS: Final = (MODEL, f"{MODEL}/versions/{{version}}")
MODEL_VERSION: Final = "/models/{model}/versions/{version}"
TASKS: Final = (
    "/v1/models/{model}",
    "/v1/models/{model}/versions/{version}",
    "/v1/models/{model}/labels/{label}",
)


def operations(
    open_inference: OpenInference, vision: Vision, serving: TensorflowServing, status: Status, metrics: Method
) -> list[Operation]:
    """Returns all operations, the most frequent first: they are tried in turn."""
    one = open_inference

    def of_model(verb: str, path: str, name: str, method: Method, roles: Sequence[Role]) -> Operation:
        return Operation(verb, [f"{model}{path}" for model in MODELS], name, method, roles)

    def of_task(name: str, method: Method) -> Operation:
        return Operation("POST", [f"{model}:{name}" for model in TASKS], name, method, INFER)

    async def classify(request: HttpRequest) -> HttpAnswer:
        """Classifies images. JSON with examples is TensorFlow Serving's Classify."""
        return await (serving.classify if has_examples(request) else vision.classify)(request)

    found = [
        of_model("POST", "/infer", "infer", one.infer, INFER),
        of_task("predict", serving.predict),
        of_task("classify", classify),
        of_task("detect", vision.detect),
        of_task("segment", vision.segment),
        of_task("embed", vision.embed),
        of_task("transcribe", vision.transcribe),
        of_task("locate", vision.locate),
        of_task("transform", vision.transform),
        of_task("regress", serving.regress),
        Operation("GET", ["/v2/health/live"], "live", one.live, ANYONE, is_probe=True),
        Operation("GET", ["/v2/health/ready"], "ready", one.ready, ANYONE, is_probe=True),
        Operation("GET", ["/v2"], "server_metadata", one.server_metadata, READ),
        Operation("GET", ["/metrics"], "metrics", metrics, OBSERVE),
        Operation("GET", ["/v1/status"], "status", status.status, OBSERVE),
        Operation("GET", [f"/v1/status{MODEL_VERSION}"], "status_of_model", status.model, OBSERVE),
        Operation("GET", ["/v2/models/stats"], "model_statistics", one.model_statistics, OBSERVE),
        of_model("GET", "/ready", "model_ready", one.model_ready, READ),
        of_model("GET", "", "model_metadata", one.model_metadata, READ),
        of_model("GET", "/config", "model_config", one.model_config, READ),
        of_model("GET", "/stats", "model_statistics", one.model_statistics, OBSERVE),
        Operation("GET", [f"{model}/metadata" for model in TASKS], "signature", serving.signature, READ),
        Operation("GET", [*TASKS], "model_status", serving.model_status, READ),
        Operation("POST", ["/v2/repository/index"], "index", one.index, READ),
        Operation("POST", ["/v2/repository/models/{model}/load"], "load", one.load, ADMIN),
        Operation("POST", ["/v2/repository/models/{model}/unload"], "unload", one.unload, ADMIN),
    ]
    return [*found, *_descriptions(found), *page_files.operations()]


def _descriptions(found: Sequence[Operation]) -> list[Operation]:
    """Returns what answers with the description of all operations, itself included."""

    async def openapi(request: HttpRequest) -> HttpAnswer:
        """Returns the OpenAPI document of this API."""
        return described

    async def docs(request: HttpRequest) -> HttpAnswer:
        """Returns this page."""
        return shown

    own = [
        Operation("GET", ["/openapi.json"], "openapi", openapi, READ),
        Operation("GET", ["/docs"], "docs", docs, READ),
    ]
    everything = [*found, *own]
    described = json_answer(document(everything))  # once: it takes milliseconds
    shown = HttpAnswer([docs_page.page(everything).encode()], media_type="text/html; charset=utf-8")
    return own


def application(calls: CallsIn, found: Sequence[Operation], hosts: Hosts = ANY_HOST) -> ASGIApp:
    """Returns the ASGI application that answers all operations, to requests for these hosts."""
    by_path: dict[str, dict[str, ASGIApp]] = {}
    for verb, paths, name, method, roles, is_probe in found:
        for path in paths:
            answering = calls.application(name, method, roles, route=f"{verb} {path}", is_probe=is_probe)
            by_path.setdefault(path, {})[verb] = answering
    routes = [Route(path, _Verbs(verbs, calls)) for path, verbs in by_path.items()]
    no_method = calls.application("unknown", _no_method(by_path), ANYONE)
    # Before those of models, whose names would take the method's in.
    at = [*by_path].index(TASKS[0])
    routes[at:at] = [Route(f"{path}:{{method}}", no_method) for path in TASKS]
    not_found = calls.application("unknown", _not_found(by_path), ANYONE)
    router = Router(routes, redirect_slashes=False, default=not_found)

    refused = calls.application("unknown", _refused(hosts), ANYONE)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if not hosts.passes(_host(scope)):
            await refused(scope, receive, send)
        elif _is_disguised(scope):
            await not_found(scope, receive, send)
        else:
            await router(scope, receive, send)

    return answer


def _host(scope: Scope) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)


def _is_disguised(scope: Scope) -> bool:
    """Whether a path is written so that a proxy may take it for another one than the routes do."""
    return b"%" in scope["raw_path"] and (b"%2f" in scope["raw_path"].lower() or not scope["path"].isprintable())


class _Verbs:
    """Chooses among what answers one path by the request's verb."""

    def __init__(self, verbs: Mapping[str, ASGIApp], calls: CallsIn) -> None:
        self._verbs = {**verbs, **({"HEAD": verbs["GET"]} if "GET" in verbs else {})}
        self._otherwise = calls.application("unknown", self._not_allowed, ANYONE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._verbs.get(scope["method"], self._otherwise)(scope, receive, send)

    async def _not_allowed(self, request: HttpRequest) -> HttpAnswer:
        allowed = ", ".join(self._verbs)
        return json_answer({"error": f"method: expected {allowed} for this path"}, 405, [("allow", allowed)])


def _refused(hosts: Hosts) -> Method:
    """Returns what answers a request for another host."""

    async def answer(request: HttpRequest) -> HttpAnswer:
        raise hosts.refusal(request.headers["host"])

    return answer


def _not_found(paths: Iterable[str]) -> Method:
    """Returns what answers a path that there is not, naming those of the server and of a model."""
    known = ", ".join(sorted({TASKS[0], MODEL, *(path for path in paths if "{" not in path and "." not in path)}))

    async def answer(request: HttpRequest) -> HttpAnswer:
        raise NotFound(f"path: expected one that /docs lists, such as {known}")

    return answer


def _no_method(paths: Iterable[str]) -> Method:
    """Returns what answers `NAME:METHOD` where there is no such method."""
    task = f"{TASKS[0]}:"
    known = ", ".join(path.removeprefix(task) for path in paths if path.startswith(task))

    async def answer(request: HttpRequest) -> HttpAnswer:
        raise NotFound(f"path: expected one of {known} after the colon, got {shown(request.path['method'])}")

    return answer
