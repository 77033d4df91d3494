"""Requests as HTTP methods get them, and their responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from xlaserve.engine.gil import on_thread
from xlaserve.errors import InvalidArgument, MessageTooLarge, shown
from xlaserve.wire.http import json_numbers
from xlaserve.wire.shared.parts import Part, wire_bytes

JSON: Final = "application/json"
MAX_INLINE_BYTES: Final = 2**16
"""JSON that is parsed on the event loop, which takes a millisecond."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request whose body has arrived."""

    path: Mapping[str, str]
    """The parameters in its path."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By name in lower case."""
    body: memoryview
    take: Callable[[int], None] = lambda size_bytes: None
    """Counts bytes that are held for it in addition to `body`. Raises QueueFull."""

    async def json(self, size_bytes: int | None = None) -> Json:
        """Returns the body, or its first `size_bytes`: an object in JSON, an empty one where there is no body.

        Long lists of numbers in it are `NumberArray`, long strings in base64 are bytes. Raises InvalidArgument, and
        what `take` does.
        """
        data = self.body[:size_bytes]
        if not self.body:
            return {}
        value = _loads(data) if len(data) <= MAX_INLINE_BYTES else await self._read(data)
        if not isinstance(value, dict):
            raise InvalidArgument("body", "a JSON object", shown(value))
        return value

    async def _read(self, data: memoryview) -> Any:
        text = await on_thread(partial(json_numbers.find_long, data))
        self.take(text.decoded_bytes)
        return await on_thread(text.read)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response."""

    parts: Sequence[Part]
    """The body."""
    status: int = 200
    media_type: str = JSON
    headers: Sequence[tuple[str, str]] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the body."""
        return wire_bytes(self.parts)


def _loads(data: memoryview) -> Any:
    try:
        return json_numbers.read_strictly(bytes(data))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("body", "JSON", f"other text ({str(error)[:100]})") from None


def separated(parts: Sequence[Part]) -> Sequence[Part]:
    """Returns parts with a comma between each two. To join them may take long."""
    return [one for part in parts for one in (b",", part)][1:]


def json_answer(value: object, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> HttpAnswer:
    """Returns an answer in JSON."""
    return HttpAnswer([to_json(value)], status, headers=headers)


def to_json(value: object) -> bytes:
    """Returns JSON as it is sent: compact, without what is not JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def too_large(max_bytes: int, got_bytes: int) -> MessageTooLarge:
    """Returns the error for a body that has more bytes than the server accepts."""
    return MessageTooLarge(f"body: expected at most {max_bytes} bytes (max_message_bytes), got {got_bytes}")
