"""Model files that are one protobuf message each, read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from xlaserve.errors import ModelFailed

M = TypeVar("M", bound=Message)


def parsed(message: M, file: Path, expected: str) -> M:
    """Returns `message` with the content of a file. Raises ModelFailed where that is none of its kind."""
    try:
        message.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise unfit(file, expected) from error
    return message


def unfit(file: Path, expected: str) -> ModelFailed:
    """Returns the error of a file that is not what its name says."""
    return ModelFailed(
        f"source: expected {expected}, got {file.name} of {file.stat().st_size:,} bytes, which is none or has been cut"
        f" off; copy it once more, and compare both: sha256sum {file.name}"
    )
