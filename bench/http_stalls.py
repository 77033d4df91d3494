"""The largest valid requests of the REST API, for `bench.stalls`."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

SIDE: Final = 224
DEADLINE_S: Final = 120.0
CHUNK_BYTES: Final = 2**16
NOOP: Final = "/v2/models/noop/infer"
LENGTH: Final = "Inference-Header-Content-Length"
MIB: Final = 2**20
LISTED: Final = 100
"""Images that are some 60 MB in JSON."""


class HttpCase(NamedTuple):
    """What is sent while others wait."""

    name: str
    path: str
    body: bytes
    headers: Mapping[str, str] = {}
    chunk_bytes: int = 0
    """Bytes of each chunk; 0 for a body whose length the head tells."""


def cases() -> Iterator[HttpCase]:
    """Yields the largest valid requests; one whose image is none as well."""
    levels = np.random.default_rng(0).integers(0, 256, (420, SIDE, SIDE, 3), np.uint8)
    raw, binary = _binary(levels, {})
    yield HttpCase("420 UINT8 images in binary", NOOP, raw, binary)
    yield HttpCase("420 UINT8 images in binary, chunked", NOOP, raw, binary, CHUNK_BYTES)
    yield HttpCase("64 UINT8 images in binary, in chunks of 64 bytes", NOOP, *_binary(levels[:64], {}), 64)
    coarse = levels // 64 * 64
    yield HttpCase("420 UINT8 images in binary, gzip", NOOP, *_zipped(*_binary(coarse, {})))
    yield HttpCase("64 FP32 images in binary", NOOP, *_binary(levels[:64].astype(np.float32), {}))
    top = {"outputs": [{"name": "scores", "parameters": {"classification": 1000}}]}
    yield HttpCase("classification of 400 images, 1000 classes, in JSON", NOOP, *_binary(levels[:400], top))
    top = {"outputs": [{"name": "scores", "parameters": {"classification": 1000, "binary_data": True}}]}
    yield HttpCase("classification of 400 images, 1000 classes, in binary", NOOP, *_binary(levels[:400], top))
    yield HttpCase(f"{LISTED} UINT8 images in JSON", NOOP, _listed(levels[0]))
    yield HttpCase(f"{LISTED} UINT8 images in rows", "/v1/models/noop:predict", _rows(levels[0]))
    encoded, small = jpeg(), jpeg(128)
    yield HttpCase("1,000 JPEGs in base64", NOOP, _images([encoded] * 1000))
    yield HttpCase("2,000 JPEGs in base64, scores in JSON", NOOP, _images([small] * 2000))
    yield HttpCase("one of 31 MB that is no image, in base64", NOOP, _images([bytes(31 * MIB)]))
    rows = json.dumps({"instances": [{"b64": base64.b64encode(encoded).decode()}] * 1000}).encode()
    yield HttpCase("1,000 JPEGs in rows", "/v1/models/noop:predict", rows)
    form = {"Content-Type": "multipart/form-data; boundary=B"}
    yield HttpCase(
        "classify 1,000 JPEGs in a form, top_k 1000", "/v1/models/noop:classify?top_k=1000", _form(encoded), form
    )
    yield HttpCase("detect in 1,000 JPEGs in a form", "/v1/models/detector:detect", _form(small), form)
    yield HttpCase(
        "segment 1,000 JPEGs in a form", "/v1/models/segmenter:segment?pixel_counts=true", _form(small), form
    )


def send(address: str, case: HttpCase) -> None:
    """Sends a request, and reads all of its answer. Raises RuntimeError where it failed."""
    connection = HTTPConnection(address, timeout=DEADLINE_S)
    try:
        step = case.chunk_bytes
        # Several chunks are written at a time, as by a client that has them all.
        body: Any = _in_chunks(case.body, step) if step else case.body
        headers = {**case.headers, **({"Transfer-Encoding": "chunked"} if step else {})}
        connection.request("POST", case.path, body, headers, encode_chunked=False)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status not in (200, 400):
            raise RuntimeError(f"{case.name}: {answer.status} {said[:200]!r}")
    finally:
        connection.close()


def jpeg(side: int = SIDE) -> bytes:
    """Returns a JPEG of noise."""
    file = io.BytesIO()
    Image.effect_noise((side, side), 60).convert("RGB").save(file, "JPEG", quality=40)
    return file.getvalue()


def _in_chunks(body: bytes, step: int) -> bytes:
    chunks = (
        b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (body[at : at + step] for at in range(0, len(body), step))
    )
    return b"".join((*chunks, b"0\r\n\r\n"))


def _binary(pixels: np.ndarray, more: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
    datatype = {"uint8": "UINT8", "float32": "FP32"}[pixels.dtype.name]
    tensor = {
        "name": "pixels",
        "datatype": datatype,
        "shape": [*pixels.shape],
        "parameters": {"binary_data_size": pixels.nbytes},
    }
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + pixels.tobytes(), {LENGTH: str(len(head))}


def _zipped(body: bytes, headers: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
    return gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"}


def _listed(image: np.ndarray) -> bytes:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [LISTED, SIDE, SIDE, 3], "data": []}
    text = json.dumps(image.reshape(-1).tolist(), separators=(",", ":"))[1:-1]
    return json.dumps({"inputs": [tensor]}).replace("[]", f"[{','.join([text] * LISTED)}]").encode()


def _rows(image: np.ndarray) -> bytes:
    text = json.dumps(image.tolist(), separators=(",", ":"))
    return f'{{"instances":[{",".join([text] * LISTED)}]}}'.encode()


def _images(files: list[bytes]) -> bytes:
    data = [base64.b64encode(file).decode() for file in files]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(files)], "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def _form(file: bytes, count: int = 1000) -> bytes:
    part = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n%b\r\n' % file
    return part * count + b"--B--\r\n"
