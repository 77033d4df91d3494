"""Every error that xlaserve raises on purpose.

A message is written for the client: it names the field, what was expected and what came, and never a path or a trace.
The status that each protocol's clients get is in `xlaserve.status`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NO_CAUSE: Final = re.compile(
    r"Graph execution error|Detected at node|<stack traces unavailable>|The op is created at|File \"|Traceback \("
    r"|in user code|Exception encountered when calling|Arguments received by|\[\[|[•^~]"
)
"""How lines of TensorFlow's and Keras's messages begin that say where, and not what."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_FOLDERS: Final = re.compile(r"(?<=['\"])/(?:[^/'\"]+/)+|(?<![\w.:/~])/(?:[^\s/'\"]+/)+")
"""Folders of absolute paths; `~/.keras/models` tells nothing of this machine."""
_INNER: Final = "Exception encountered: "
"""The text that Keras writes before each error that it has met within another, all in one text."""
_CONFIG: Final = re.compile(r"\.?\s*Full object config: .*")
"""The configuration that Keras adds to some errors: pages of it."""
_LONGEST: Final = 500
_SHOWN: Final = 48
"""Characters of a value that a refusal shows."""


class XlaserveError(Exception):
    """Root of the tree. `str(error)` is safe to send to a client."""


class ConfigError(XlaserveError):
    """The configuration can't be used: names the field, the value and what was expected. Never reaches a client."""


class RequestError(XlaserveError):
    """The client sent something wrong."""

    def name_image(self, index: int) -> None:
        """Has the message say which of a request's images is meant, counted from 0: `images[2]` in place of `image`."""
        message = str(self)
        if message.startswith("image:"):
            self.args = (f"images[{index}]{message.removeprefix('image')}",)


class InvalidArgument(RequestError):
    """A field of the request is not what was expected."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field


class InvalidImage(RequestError):
    """Bytes that are not a readable JPEG, PNG or WebP image."""


class ImageTooLarge(RequestError):
    """An image has more encoded bytes or decoded pixels than the server accepts."""


class MessageTooLarge(RequestError):
    """A message has more bytes than the server accepts."""


class UnsupportedFeature(RequestError):
    """The request names a protocol extension that this server does not speak."""


class ModelNotFound(RequestError):
    """No model of that name and version is in the repository."""


class NotFound(RequestError):
    """What the request names is not there: a service, say, or a socket."""


class Unauthenticated(RequestError):
    """Nobody knows who calls."""


class PermissionDenied(RequestError):
    """Whoever calls may not do that."""


class ModelError(XlaserveError):
    """The request is fine but the model can't answer it."""


class ModelNotReady(ModelError):
    """The model is loading, compiling, draining or unloaded."""


class ModelFailed(ModelError):
    """The model failed to load or to warm up; the reason is in the repository's index."""

    lacks_mode: bool = False
    """Whether this installation or device can't run a mode, whatever the model. Not sent to others."""

    def __init__(self, message: str, *, lacks_mode: bool = False) -> None:
        super().__init__(message)
        if lacks_mode:
            self.lacks_mode = True


@contextmanager
def failing_on_exit() -> Iterator[None]:
    """A block in which a model's own code may run: where that calls `sys.exit()`, the model fails and not the server.

    Raises ModelFailed.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:  # SystemExit and its like, which an event loop takes for the end of the process
        raise ModelFailed(f"the model's own code raised {type(error).__name__}: {cause(error)}") from error


class ExecutionFailed(ModelError):
    """Running a batch raised; the details are in the log only."""


class OutOfDeviceMemory(ModelError):
    """The device's memory did not hold a batch; a smaller one may do."""


class OverloadError(XlaserveError):
    """Nothing is wrong with the request, but it can't be served now."""

    reason = "overload"
    """What metrics call it."""

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds until the same request is likely to be served, where that can be said."""


class DeadlineUnreachable(OverloadError):
    """Too much waits for the request to be answered before its deadline: it was refused on arrival."""

    reason = "deadline"


class QueueFull(OverloadError):
    """A queue is at its bound: of images, bytes or changes of a model."""

    reason = "queue_full"


class LimitExceeded(OverloadError):
    """The caller asks for more than its limits allow."""

    reason = "limit"


class ProfilerBusy(OverloadError):
    """Another profile is being recorded."""

    reason = "profiler_busy"


class DeadlineExceeded(OverloadError):
    """The job could not be run before its deadline."""

    reason = "late"


class EngineLost(OverloadError):
    """The process that ran the model has ended, and with it what it was doing."""

    reason = "engine_lost"


class ShuttingDown(OverloadError):
    """The server is draining and takes no new work."""

    reason = "shutting_down"


def clear_tracebacks(error: BaseException) -> None:
    """Clears the traceback of an error and those of its causes, which hold a request's images.

    Some of their frames are in cycles with the error, and a hundred failed requests must not keep their images until
    the next garbage collection.
    """
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        one.__traceback__ = None
        left += [link for link in (one.__cause__, one.__context__) if link is not None and link.__traceback__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def shown(value: object) -> str:
    """Returns what a refusal shows of a value that a client sent, however large it is."""
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    if isinstance(value, (bool, int, float)):
        return repr(value)[:_SHOWN]
    if isinstance(value, (list, dict)):
        kind = "list" if isinstance(value, list) else "object"
        return f"{'a' if kind == 'list' else 'an'} {kind}" if value else f"an empty {kind}"
    return "nothing" if value is None else "another value"


def cause(error: BaseException) -> str:
    """Returns the line of an error of any library that says what is wrong, or its type where it says nothing.

    Like `telling_line`, it may be sent to clients.
    """
    if line := telling_line(str(error)):
        return line
    origin = error.__cause__ or error.__context__
    return cause(origin) if origin is not None else type(error).__name__


def telling_line(text: str) -> str:
    """Returns the line of an error's text that says what is wrong: no trace, and of paths only the last part.

    Empty where there is none. Of errors within others it is the innermost that says it.
    """
    outer, _, inner = text.rpartition(_INNER)
    if outer and (line := telling_line(inner)):
        return line
    is_code = False
    for line in text.splitlines():
        told = _COLOUR.sub("", line).strip()
        if told and not is_code and not _NO_CAUSE.match(told):
            return _FOLDERS.sub("", _CONFIG.sub("", told))[:_LONGEST]
        is_code = told.startswith("File ")
    return ""
