"""The reason for which a model could not be built, as clients may read it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from xlaserve.config import ModelSettings, sources
from xlaserve.engine.causes import cause, telling_line

_UNFIT: Final = re.compile(r"A total of (\d+) objects could not be loaded\..*?\bname=([^,>]+)", re.DOTALL)
"""Keras's message for weights that do not fit a model."""


def explain(settings: ModelSettings, error: Exception) -> str:
    """Returns why a model could not be built, and the remedy: a line without a trace, with the last parts of paths."""
    source = short_name(settings.source)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in {"tensorflow", "keras", "keras_cv", "kagglehub"}:
            return f"source: {source} needs {package}; install xlaserve[cpu] or xlaserve[gpu]"
        if package in {"keras_hub", "tokenizers", "regex"}:
            return (
                f"source: {source} needs {package}; install xlaserve[gpu,hub] or, with tensorflow-cpu,"
                " xlaserve[cpu,hub-cpu] and then keras-hub with --no-deps"
            )
        if package == "tf_keras":
            return f"source: {source} needs tf_keras; pip install --no-deps 'tf_keras>=2.21,<2.22'"
        if package == "jax":
            return (
                f"source: reading {source} needs jax; install xlaserve[jax], or serve the SavedModel that"
                f" `xlaserve import {source}` makes where jax is installed"
            )
    text = str(error)
    if settings.weights and (unfit := _UNFIT.search(text)):
        count, layer = unfit.groups()
        return (
            f"weights: expected those of {source}, got a file that does not fit {count} of its layers, such as {layer}:"
            f" {short_name(settings.weights)}; write it with this model's save_weights"
        )
    for path in filter(None, (settings.source, settings.weights)):
        text = text.replace(path, short_name(path))  # a path may have spaces in it
    reason = telling_line(text) or cause(error)
    remedy = f"; xlaserve inspect {source} says what it holds" if sources.looks_like_path(settings.source) else ""
    return f"source: {source} can't be loaded: {reason}{remedy}"


def short_name(source: str) -> str:
    """Returns a source or a path without its folders."""
    return Path(source).name or source
