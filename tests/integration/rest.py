"""JSON over HTTP, asked of a server under test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from typing import Any

import numpy as np
from tests.integration.conftest import Server

TIMEOUT_S = 300
"""A load compiles at low priority, which takes minutes while other tests use all processors."""


def ask(server: Server, path: str, body: Any = None) -> tuple[int, Any]:
    """Returns the status and the JSON of the answer: to a POST with `body`, else to a GET."""
    connection = HTTPConnection(server.http, timeout=TIMEOUT_S)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def infer(server: Server, model: str, tensors: Sequence[Mapping[str, Any]], **parameters: str) -> Any:
    """Returns the only output of a model over the Open Inference Protocol, as an array."""
    status, answer = ask(server, f"/v2/models/{model}/infer", {"inputs": tensors, "parameters": parameters})
    assert status == 200, answer
    (output,) = answer["outputs"]
    return np.reshape(output["data"], output["shape"])
