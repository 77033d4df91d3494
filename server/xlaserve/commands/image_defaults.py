"""Defaults of models whose settings leave `fit`, `resize` and `decode` open, as comments in the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from xlaserve.config import Decoding, Fit, ModelSettings
from xlaserve.images import tensorflow_jpeg
from xlaserve.models.networks import preparation
from xlaserve.models.networks.preparation import Preparation
from xlaserve.models.sources.stated_preparation import stated
from xlaserve.models.task import Task

_FITS: Final = {kind.name: kind.default_fit for kind in get_args(Task)}
"""The usual fit of each task."""
_LATER: Final = "known once the model is loaded: the log and ListModels say it"


def commented(text: str, models: Sequence[ModelSettings]) -> str:
    """Returns a configuration with a comment behind each of these fields that is null, in the order of `models`."""
    lines, own = [], iter([_comments(settings) for settings in models])
    comments: dict[str, str] = {}
    is_models = False
    for line in text.splitlines():
        if not line.startswith((" ", "-")):
            is_models = line == "models:"
        if is_models and line.startswith("- "):
            comments = next(own)
        comment = comments.get(line) if is_models else None
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join([*lines, ""])


def _comments(settings: ModelSettings) -> dict[str, str]:
    """Returns comments by the lines behind which they stand."""
    return {f"  {field}: null": comment for field, comment in _defaults(settings)}


def _defaults(settings: ModelSettings) -> Iterator[tuple[str, str]]:
    found = stated(settings)
    yield "fit", _fit(settings, found)
    if found is None:
        yield from (("resize", _LATER), ("decode", _LATER))
        return
    reason = f", as {found.reason}" if found.reason else ", as its source tells nothing of its training"
    yield "resize", f"{found.resize}{reason}"
    if found.decode is Decoding.TENSORFLOW and not tensorflow_jpeg.is_available():
        yield "decode", "exact, as simplejpeg is not installed"
    else:
        yield "decode", f"{found.decode}{reason}"


def _fit(settings: ModelSettings, found: Preparation | None) -> str:
    if settings.task == "auto" and (found is None or found.fit is None):
        boxes = ", ".join(task for task, fit in _FITS.items() if fit is Fit.LETTERBOX)
        return f"{Fit.LETTERBOX} for {boxes}, else {Fit.RESIZE}" if found else _LATER
    if settings.task == "auto":
        assert found is not None
        return f"{found.fit}, as {found.reason}"
    if found is None:
        return _LATER
    fit = preparation.fit_of(_FITS[settings.task], found.fit)
    return f"{fit}, as {found.reason}" if fit is found.fit else f"{fit}, as is usual for {settings.task}"
