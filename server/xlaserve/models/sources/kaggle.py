"""Models from Kaggle, by handle. Fetched only where the configuration names one; kagglehub keeps what it fetched."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed


def fetch(handle: str) -> Path:
    """Returns the folder of a model, `owner/model/framework/variation` with a version behind it or not.

    Raises ModelFailed with the reason and what to do about it.
    """
    kagglehub = importlib.import_module("kagglehub")
    try:
        with quiet():
            return Path(kagglehub.model_download(handle))
    except Exception as error:
        raise ModelFailed(
            f"source: kagglehub:{handle} could not be fetched: {cause(error)[:300]}; fetch it where there is a network "
            "and set KAGGLEHUB_CACHE, or name the folder itself"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops the progress bars of downloads, which are for interactive use."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
