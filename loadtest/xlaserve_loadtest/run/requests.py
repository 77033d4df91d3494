"""The requests of a run: images for vision models, tensors for any other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from xlaserve_loadtest.schedule import payload, tensors
from xlaserve_loadtest.schedule.mix import DISTINCT_REQUESTS, Kind, Mix, Size, draw_kinds
from xlaserve_loadtest.schedule.payload import RGB, ImageMaker, Maker, PayloadError, Request
from xlaserve_loadtest.schedule.tensors import TensorMaker
from xlaserve_loadtest.settings import Settings
from xlaserve_loadtest.targets.target import ModelInfo

_MAX_COUNTS: Final = 4
"""Shares of more numbers of images are not shown."""


class Content(NamedTuple):
    """The requests for an arm's models."""

    requests: dict[str, tuple[Request, ...]]
    """Requests in the order of sending, by mode: that is all in which they differ."""
    kinds: Sequence[Kind]
    """The kind of each."""
    images_per_request: str
    """The number of images in a request, as reports show it."""

    def rewritten(self, encode: Callable[[Request, ModelInfo], Request], models: Sequence[ModelInfo]) -> Content:
        """Returns the same in another protocol; what is sent several times is held once. Raises PayloadError."""
        sent = {id(request): request for own in self.requests.values() for request in own}
        made = {key: encode(request, models[request.model]) for key, request in sent.items()}
        requests = {mode: tuple(made[id(request)] for request in own) for mode, own in self.requests.items()}
        return self._replace(requests=requests)


def make_content(settings: Settings, models: Sequence[ModelInfo], modes: Sequence[str]) -> Content:
    """Returns what is sent to an arm's models. Raises PayloadError."""
    counts = settings.mix
    if settings.scenario == "offline":
        counts = Mix({min(map(largest_batch, models)): 1.0})
    makers = [_maker(settings, info, models) for info in models]
    kinds = _kinds(settings, counts, makers)
    requests = payload.for_modes(payload.make_bodies(kinds, makers, copies=1 + len(modes)), modes)
    return Content(requests, kinds, _shown(kinds) if settings.replay else str(counts))


def largest_batch(info: ModelInfo) -> int:
    """Returns the images that the largest bucket of a model holds; 1 where its server names no buckets."""
    batches = re.findall(r"(?:^|,)([1-9]\d*)(?=x|,|$)", info.properties.get("buckets", ""))
    return max(map(int, batches), default=1)


def _kinds(settings: Settings, counts: Mix[int], makers: Sequence[Maker]) -> list[Kind]:
    if settings.replay:
        return settings.replay.sequence()
    models = Mix(dict(enumerate(settings.model_shares if len(makers) > 1 else (1.0,))))
    sizes: Mix[Size | None] = Mix(dict(zip(settings.sizes, settings.size_shares, strict=True)) or {None: 1.0})
    if any(len(mix.shares) > 1 for mix in (models, counts, sizes)):
        return draw_kinds(models, counts, sizes, None, settings.seed)
    (kind,) = draw_kinds(models, counts, sizes, 1, settings.seed)
    return [kind] * max(DISTINCT_REQUESTS, makers[0].variety(kind))


def _shown(kinds: Sequence[Kind]) -> str:
    """Returns the images per request of a trace: their shares, or how far they go."""
    counts = Counter(kind.images for kind in kinds)
    if len(counts) > _MAX_COUNTS:
        return f"{min(counts)} to {max(counts)}"
    return str(Mix({images: counts[images] / counts.total() for images in sorted(counts)}))


def _maker(settings: Settings, info: ModelInfo, models: Sequence[ModelInfo]) -> Maker:
    # What another model has is not for this one.
    others = {own.name for model in models for own in model.inputs} - {own.name for own in info.inputs}
    sources = {name: source for name, source in settings.inputs if name not in others}
    shapes = {name: shape for name, shape in settings.shapes if name not in others}
    if info.takes_images and not sources and not shapes:
        return ImageMaker(
            info.name,
            settings.payload,
            folder=settings.images,
            size=info.size,
            seed=settings.seed,
            has_stamp=settings.is_distinct,
            layout=info.layout or RGB,
        )
    has_images = settings.images is not None or settings.sizes or settings.payload == "encoded"
    if has_images and not any(model.takes_images for model in models):
        raise PayloadError(f"{info.name} has inputs of its own: name what each is sent with --input NAME=PATH")
    if settings.is_distinct:
        raise PayloadError(f"--distinct is for images, and {info.name} has inputs of its own")
    chosen = tensors.choose(info.inputs, info.optional, sources, shapes, settings.seed)
    return TensorMaker(info.name, chosen)
