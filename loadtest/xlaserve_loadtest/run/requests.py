"""The requests of a run: images for vision models, tensors for any other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xlaserve_loadtest.schedule import payload, tensors
from xlaserve_loadtest.schedule.payload import Mix, PayloadError, Request
from xlaserve_loadtest.settings import Settings
from xlaserve_loadtest.targets.target import ModelInfo, TargetError


def make_requests(
    settings: Settings, info: ModelInfo, modes: Sequence[str]
) -> tuple[dict[str, Sequence[Request]], Mix]:
    """Returns the requests to a model by mode, which is all in which they differ, and their images per request.

    Raises TargetError and PayloadError.
    """
    mix = settings.mix
    if settings.scenario == "offline":
        mix = Mix({largest_batch(info): 1.0})
    bodies = _of_images(settings, info, mix) if _sends_images(settings, info) else _of_tensors(settings, info, mix)
    return {**payload.for_modes(bodies, modes)}, mix


def largest_batch(info: ModelInfo) -> int:
    """Returns the images that the largest bucket of a model holds; 1 where its server names no buckets."""
    batches = re.findall(r"(?:^|,)([1-9]\d*)(?=x|,|$)", info.properties.get("buckets", ""))
    return max(map(int, batches), default=1)


def _sends_images(settings: Settings, info: ModelInfo) -> bool:
    return info.takes_images and not settings.inputs and not settings.shapes


def _of_images(settings: Settings, info: ModelInfo, mix: Mix) -> list[tuple[bytes, int]]:
    sizes = settings.sizes or ((info.size,) if info.size else ())
    if not sizes and not (settings.images and settings.payload == "encoded"):
        raise TargetError(f"{info.name} takes images of several sizes: choose one with --size HEIGHTxWIDTH")
    return payload.make_bodies(
        payload.pictures(settings.images, sizes, settings.seed),
        model=info.name,
        kind=settings.payload,
        mix=mix,
        seed=settings.seed,
    )


def _of_tensors(settings: Settings, info: ModelInfo, mix: Mix) -> list[tuple[bytes, int]]:
    if settings.images is not None or settings.sizes:
        raise PayloadError(f"{info.name} has inputs of its own: name what each is sent with --input NAME=PATH")
    chosen = tensors.choose(info.inputs, info.optional, dict(settings.inputs), dict(settings.shapes), settings.seed)
    return tensors.make_bodies(chosen, model=info.name, mix=mix, seed=settings.seed)
