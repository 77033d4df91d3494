"""Errors of other libraries: the one line of a long text that tells the cause, which may be sent to clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from xlaserve.errors import ModelFailed

_NO_CAUSE: Final = re.compile(
    r"Graph execution error|Detected at node|<stack traces unavailable>|The op is created at|File \"|Traceback \("
    r"|in user code|Exception encountered when calling|Arguments received by|\[\[|[•^~]"
)
"""The beginnings of lines in TensorFlow's and Keras's messages that tell the place of an error and not its cause."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_FOLDERS: Final = re.compile(r"(?<=['\"])/(?:[^/'\"]+/)+|(?<![\w.:/~])/(?:[^\s/'\"]+/)+")
"""Folders of absolute paths; `~/.keras/models` tells nothing of this machine."""
_INNER: Final = "Exception encountered: "
"""The text that Keras writes before each error within another, all in one message."""
_CONFIG: Final = re.compile(r"\.?\s*Full object config: .*")
"""The configuration that Keras adds to some errors: pages of it."""
_LONGEST: Final = 500


def cause(error: BaseException) -> str:
    """Returns the line of any library's error that tells the cause, or the error's type where no line does.

    Like `telling_line`, it may be sent to clients.
    """
    if line := telling_line(str(error)):
        return line
    origin = error.__cause__ or error.__context__
    return cause(origin) if origin is not None else type(error).__name__


def telling_line(text: str) -> str:
    """Returns the line of an error's text that tells the cause: no trace, and of paths only the last part.

    Empty where there is none. Of errors within others, the innermost is taken.
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
