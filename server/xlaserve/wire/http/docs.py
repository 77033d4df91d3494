"""The REST API on a page for people, which loads nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from inspect import getdoc
from typing import Final

from xlaserve import __version__
from xlaserve.wire.http.openapi import OF_TASKS
from xlaserve.wire.http.operation import Operation

MODELS: Final = {
    "detect": "shapes-detector",
    "segment": "shapes-segmenter",
    "embed": "features",
    "transform": "denoiser",
}
"""The models of examples, by method; `digits` for the others."""
_STYLE: Final = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid color-mix(in srgb, currentcolor 20%, transparent); padding: .75rem 0 }
h2 { font: 600 1rem/1.5 ui-monospace, monospace; margin: 0 }
section { overflow-wrap: anywhere }
pre { padding: .75rem; white-space: pre-wrap; background: color-mix(in srgb, currentcolor 8%, transparent) }
p { margin: .25rem 0 }
"""


def page(operations: Iterable[Operation]) -> str:
    """Returns a page that lists these operations with examples; it loads nothing from elsewhere."""
    sections = "".join(map(_section, operations))
    about = (
        "<p>Replace the address and the model's name in the examples with yours. Errors are <code>"
        '{"error": ...}</code> with an HTTP status. Schemas of requests and answers are in the '
        '<a href="/openapi.json">OpenAPI document</a>.</p>'
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>xlaserve</title><style>{_STYLE}</style>"
    )
    body = f"<h1>xlaserve {__version__}</h1>{about}{sections}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _section(operation: Operation) -> str:
    paths = "<br>".join(f"{operation.verb} {_breakable(path)}" for path in operation.paths)
    example = f"<pre>{escape(_example(operation))}</pre>"
    return f"<section><h2>{paths}</h2><p>{escape(getdoc(operation.method) or '')}</p>{example}</section>"


def _breakable(path: str) -> str:
    return re.sub("([/:])", r"<wbr>\1", escape(path))


def _example(operation: Operation) -> str:
    url = f"localhost:8000{operation.paths[0]}".replace("{model}", MODELS.get(operation.name, "digits"))
    if operation.name in OF_TASKS:
        option = next(iter(OF_TASKS[operation.name][1]), "mode")
        example = {"top_k": "3", "min_score": "0.5", "pixel_counts": "true"}.get(option, "xla")
        return f"curl -F image=@cat.jpg -F {option}={example} {url}"
    if operation.name == "infer":
        body = (
            '{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["\'$(base64 -w0 cat.jpg)\'"]}]}'
        )
        return f"curl {url} -d '{body}'"
    if operation.name == "predict":
        return f'curl {url} -d \'{{"instances": [{{"b64": "\'$(base64 -w0 cat.jpg)\'"}}]}}\''
    return f"curl {url}" if operation.verb == "GET" else f"curl -X {operation.verb} {url}"
