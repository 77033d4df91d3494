"""Images and options of a request: of a form with files, of JSON, or an image alone with its options in the query."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, Final, TypeGuard

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from xlaserve.errors import InvalidArgument, shown
from xlaserve.images.decoder import Encoded
from xlaserve.wire.http.json_tensors import image, images
from xlaserve.wire.http.message import JSON, HttpRequest, Json
from xlaserve.wire.shared import slips
from xlaserve.wire.shared.input_tensors import MAX_IMAGES

FORM: Final = "multipart/form-data"
IMAGES: Final = ("image", "images")
"""Names of fields that hold images."""
MAX_OPTIONS: Final = 64
MAX_OPTION_BYTES: Final = 256
MAX_COUNT: Final = 2**31 - 1
MAX_BOUNDARY: Final = 70
MAX_TYPE_LENGTH: Final = 512
"""Characters of a Content-Type: `email` takes a second for one of 64 KiB that is made for it."""
_STEP_BYTES: Final = 16 * 1024
"""Bytes of a form that are taken apart at once: parts of a few bytes take microseconds each."""
_STEP_S: Final = 0.002
"""How long one form is taken apart before others get the event loop."""

_PARAMETER: Final = re.compile(r';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;]*))')
"""Of a Content-Disposition: its name, and its value in quotes or not."""

# It logs a warning for each form that it can't read, and in debugging a line for each of a form's parts.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(slots=True)
class Form:
    """Images and options of a request."""

    images: list[Encoded] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """By name; of forms and queries all are strings."""
    known: set[str] = field(default_factory=set)
    """Names of the options that were read."""

    def warn_of_slips(self) -> None:
        """Adds a warning to the answer where an option that was not read is close to one that was."""
        if unknown := self.options.keys() - self.known:
            slips.warn(slips.slip_in(unknown, frozenset(self.known)))

    def text(self, name: str) -> str:
        """Returns an option, empty where there is none. Raises InvalidArgument, as the others do."""
        self.known.add(name)
        value = self.options.get(name, "")
        if not isinstance(value, str):
            raise InvalidArgument(name, "a string", shown(value))
        return value

    def count(self, name: str) -> int:
        """Returns an integer, 0 where there is none."""
        self.known.add(name)
        value = self.options.get(name, 0)
        try:
            count = int(value) if _is_short(value) or type(value) is int else -1
        except ValueError:
            count = -1
        if not 0 <= count <= MAX_COUNT:
            raise InvalidArgument(name, f"an integer from 0 to {MAX_COUNT}", shown(value))
        return count

    def number(self, name: str, default: float) -> float:
        """Returns a number."""
        self.known.add(name)
        if name not in self.options:
            return default
        value = self.options[name]
        try:
            number = float(value) if _is_short(value) or type(value) in (int, float) else math.nan
        except (OverflowError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise InvalidArgument(name, "a number", shown(value))
        return number

    def timeout_s(self) -> float:
        """Returns how long the request may take, infinity where it does not say."""
        timeout_s = self.number("timeout_s", math.inf)
        if timeout_s <= 0:
            raise InvalidArgument("timeout_s", "seconds, more than 0", timeout_s)
        return timeout_s

    def flag(self, name: str) -> bool:
        """Returns a boolean, false where there is none."""
        self.known.add(name)
        value = self.options.get(name, False)
        known = {"true": True, "1": True, "false": False, "0": False, "": False}
        if _is_short(value) and value.lower() in known:
            return known[value.lower()]
        if not isinstance(value, bool):
            raise InvalidArgument(name, "true or false", shown(value))
        return value


def _is_short(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MAX_OPTION_BYTES


async def read_form(request: HttpRequest) -> Form:
    """Takes a request's body apart. Raises InvalidArgument."""
    content_type = request.headers.get("content-type", "")
    if len(content_type) > MAX_TYPE_LENGTH:
        raise InvalidArgument("content-type", f"at most {MAX_TYPE_LENGTH} characters", len(content_type))
    content = Message()
    content["content-type"] = content_type
    media_type = content.get_content_type()
    if media_type == FORM:
        boundary = content.get_param("boundary")
        if not isinstance(boundary, str) or not 1 <= len(boundary) <= MAX_BOUNDARY:
            raise InvalidArgument("content-type", f"{FORM} with a boundary of 1 to {MAX_BOUNDARY} characters", "none")
        form = await _read_parts(request.body, boundary)
    elif media_type == JSON or bytes(request.body[:1]) == b"{":  # `curl -d` calls it another type; no image begins so
        form = _form_of(await request.json())
    else:
        form = Form([request.body] if request.body else [])
    form.options = {**request.query, **form.options}
    return form


def _form_of(fields: Json) -> Form:
    given = [(name, fields.pop(name)) for name in IMAGES if name in fields]
    if len(given) > 1:
        raise InvalidArgument("image", "images under one name", " and ".join(IMAGES))
    form = Form(options=fields)
    for name, value in given:
        if isinstance(value, list) and len(value) > MAX_IMAGES:
            raise InvalidArgument(name, f"at most {MAX_IMAGES} images", len(value))
        form.images = images(value, name) if isinstance(value, list) else [image(value, name)]
    return form


async def _read_parts(body: memoryview, boundary: str) -> Form:
    parts, loop = _Parts(body), asyncio.get_running_loop()
    until = loop.time() + _STEP_S
    try:
        parser = MultipartParser(boundary.encode("latin-1"), parts.callbacks())  # type: ignore[arg-type]
        for start in range(0, len(body), _STEP_BYTES):
            if loop.time() >= until:
                await asyncio.sleep(0)
                until = loop.time() + _STEP_S
            parts.begin_chunk(start, chunk := bytes(body[start : start + _STEP_BYTES]))
            parser.write(chunk)
    except (FormParserError, UnicodeError) as error:
        raise InvalidArgument("body", FORM, str(error)[:100]) from None
    if not parts.is_over:
        raise InvalidArgument("body", f"{FORM} with the boundary at its end", f"{len(body)} bytes without")
    return parts.form


class _Parts:
    """Gathers the parts of a form as its parser finds them in `body`, without copying images."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._chunk, self._chunk_at = b"", 0
        self.form = Form()
        self.is_over = False
        self._header = (b"", b"")
        self._disposition = b""
        self._begin = -1
        """Where the part's data begins in the body, -1 before there is any."""
        self._size_bytes = 0
        self._parts_left = MAX_IMAGES + MAX_OPTIONS

    def begin_chunk(self, at: int, chunk: bytes) -> None:
        """Takes what the parser is given next, which stands in the body from byte `at` on."""
        self._chunk, self._chunk_at = chunk, at

    def callbacks(self) -> Mapping[str, Callable[..., None]]:
        """Returns what the parser calls."""
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}

    def on_part_begin(self) -> None:
        self._parts_left -= 1
        if self._parts_left < 0:
            raise InvalidArgument("body", f"at most {MAX_IMAGES} images and {MAX_OPTIONS} options", "more")
        self._disposition, self._begin, self._size_bytes = b"", -1, 0

    def on_header_begin(self) -> None:
        self._header = (b"", b"")

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name + data[start:end], value)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name, value + data[start:end])

    def on_header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        size_bytes = end - start
        if self._begin < 0:  # other data is what the last chunk ended with, which might have been a boundary
            self._begin = self._chunk_at + start if data is self._chunk else self._chunk_at - size_bytes
        self._size_bytes += size_bytes

    def on_part_end(self) -> None:
        text = self._disposition.decode("utf-8", "replace")
        parameters = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(text)}
        name, data = parameters.get("name", ""), self._body[self._begin : self._begin + self._size_bytes]
        if name in IMAGES:
            self.form.images.append(data)
        elif "filename" in parameters:
            raise InvalidArgument("body", f"files in fields named {' or '.join(IMAGES)}", shown(name))
        elif len(data) > MAX_OPTION_BYTES:
            raise InvalidArgument(shown(name), f"at most {MAX_OPTION_BYTES} bytes", len(data))
        elif len(self.form.options) >= MAX_OPTIONS:
            raise InvalidArgument("body", f"at most {MAX_OPTIONS} options", "more")
        else:
            self.form.options[name[:64]] = bytes(data).decode("utf-8", "replace")

    def on_end(self) -> None:
        self.is_over = True
