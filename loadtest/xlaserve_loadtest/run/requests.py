"""The requests of a run: images for vision models, tensors for any other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xlaserve_loadtest.schedule import payload, tensors
from xlaserve_loadtest.schedule.mix import DISTINCT_REQUESTS, Kind, Mix, Size, draw_kinds
from xlaserve_loadtest.schedule.payload import ImageMaker, Maker, PayloadError, Request
from xlaserve_loadtest.schedule.tensors import TensorMaker
from xlaserve_loadtest.settings import Settings
from xlaserve_loadtest.targets.target import ModelInfo


def make_requests(
    settings: Settings, models: Sequence[ModelInfo], modes: Sequence[str]
) -> tuple[dict[str, Sequence[Request]], Mix[int]]:
    """Returns the requests to an arm's models by mode, which is all in which they differ, and their images per request.

    Raises PayloadError.
    """
    counts = settings.mix
    if settings.scenario == "offline":
        counts = Mix({min(map(largest_batch, models)): 1.0})
    makers = [_maker(settings, info, models) for info in models]
    bodies = payload.make_bodies(_kinds(settings, counts, makers), makers)
    return {**payload.for_modes(bodies, modes)}, counts


def largest_batch(info: ModelInfo) -> int:
    """Returns the images that the largest bucket of a model holds; 1 where its server names no buckets."""
    batches = re.findall(r"(?:^|,)([1-9]\d*)(?=x|,|$)", info.properties.get("buckets", ""))
    return max(map(int, batches), default=1)


def _kinds(settings: Settings, counts: Mix[int], makers: Sequence[Maker]) -> list[Kind]:
    models = Mix(dict(enumerate(settings.model_shares if len(makers) > 1 else (1.0,))))
    sizes: Mix[Size | None] = Mix(dict(zip(settings.sizes, settings.size_shares, strict=True)) or {None: 1.0})
    if any(len(mix.shares) > 1 for mix in (models, counts, sizes)):
        return draw_kinds(models, counts, sizes, None, settings.seed)
    (kind,) = draw_kinds(models, counts, sizes, 1, settings.seed)
    return [kind] * max(DISTINCT_REQUESTS, makers[0].variety(kind))


def _maker(settings: Settings, info: ModelInfo, models: Sequence[ModelInfo]) -> Maker:
    # What another model has is not for this one.
    others = {own.name for model in models for own in model.inputs} - {own.name for own in info.inputs}
    sources = {name: source for name, source in settings.inputs if name not in others}
    shapes = {name: shape for name, shape in settings.shapes if name not in others}
    if info.takes_images and not sources and not shapes:
        return ImageMaker(info.name, settings.payload, folder=settings.images, size=info.size, seed=settings.seed)
    if (settings.images is not None or settings.sizes) and not any(model.takes_images for model in models):
        raise PayloadError(f"{info.name} has inputs of its own: name what each is sent with --input NAME=PATH")
    chosen = tensors.choose(info.inputs, info.optional, sources, shapes, settings.seed)
    return TensorMaker(info.name, chosen)
