"""The inputs of a network: images, recognised by their shapes, and other tensors, which are passed as they come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.engine.inputs import Inputs, InputSpec, pixels
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import DTYPES, NO_IMAGE, OF_TEXT, ImageInput, axes_of, of_flattened
from xlaserve.models.networks.heads import Raw, TensorShape
from xlaserve.models.networks.image_tensor import Call, ImageTensor, image_tensor
from xlaserve.models.networks.network import NO_SIZE, Size

Prepare = Callable[["NetworkInput", tf.Tensor], tf.Tensor]
"""Returns what a network takes for an input of a program, the channels of images last."""

_log = logging.getLogger(__name__)

_NARROW: Final = {"bfloat16": "float32"}
"""Types that clients have no name for, and the ones that they are sent in."""


class NetworkInput(NamedTuple):
    """An input of a network."""

    name: str
    declared: TensorShape
    image: ImageTensor | None
    """None where it holds no images."""


@dataclass(frozen=True)
class NetworkInputs:
    """All inputs of a network, in its own order."""

    tensors: tuple[NetworkInput, ...]

    @classmethod
    def of_image(cls, image: ImageTensor) -> NetworkInputs:
        """Returns the inputs of a network that takes one image and nothing else."""
        return cls((NetworkInput("pixels", TensorShape(None, image.dtype), image),))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The order in which programs take them: first the one whose size is the bucket's, an image of any size
        where there is one, else an image."""
        places = range(len(self.tensors))
        images = [place for place in places if self.tensors[place].image is not None]
        first = next((place for place in images if self._is_open(place)), images[0] if images else 0)
        return (first, *(place for place in places if place != first))

    @property
    def first(self) -> ImageTensor | None:
        """The image whose size is the bucket's; None for a network that takes no images."""
        return self.tensors[self.order[0]].image

    @property
    def image(self) -> ImageInput:
        """The image whose size is the bucket's, as clients send it."""
        return NO_IMAGE if self.first is None else self.first.image

    @property
    def others(self) -> tuple[ImageInput | None, ...]:
        """The inputs behind the first, as clients send them; None for one that holds no images."""
        rest = (self.tensors[place].image for place in self.order[1:])
        return tuple(None if image is None else image.image for image in rest)

    @property
    def size(self) -> Size:
        """The height and width of the image whose size is the bucket's."""
        return NO_SIZE if self.first is None else self.first.size

    @property
    def batch(self) -> int | None:
        """The only batch size that the network takes, where it was made for one. Raises ModelFailed for several."""
        found = {each.image.batch if each.image else (each.declared.shape or (None,))[0] for each in self.tensors}
        found.discard(None)
        if len(found) > 1:
            batches = " and ".join(map(str, sorted(filter(None, found))))
            raise ModelFailed(
                f"source: expected inputs of one batch size, got some of {batches}; where the model is, export all of"
                " them with a batch of any size: None"
            )
        return next(iter(found), None)

    @cached_property
    def specs(self) -> Inputs:
        """The inputs as programs take them, in `order`."""
        if len(self.tensors) == 1 and self.first is not None:
            return pixels(self.first.image.channels, dtype=self.first.image.dtype)
        return tuple(self._spec(place) for place in self.order)

    def last(self, call: Call) -> Call:
        """Returns `call`, which takes images as the network declares them, as a function of images with their channels
        last."""
        tensors = self.tensors

        def run(*values: tf.Tensor) -> Raw:
            given = zip(tensors, values, strict=True)
            return call(*(each.image.declared(value) if each.image else value for each, value in given))

        return run

    def prepared(self, given: tuple[tf.Tensor, ...], prepare: Prepare) -> list[tf.Tensor]:
        """Returns what the network takes, in its own order, for the inputs of a program."""
        values = dict(zip(self.order, given, strict=True))
        return [prepare(each, values[place]) for place, each in enumerate(self.tensors)]

    def gives_first(self, output: TensorShape) -> bool:
        """Whether an output, if it is maps, is `[n, channels, height, width]`; see `ImageTensor.gives_first`."""
        return self.first is not None and self.first.gives_first(output)

    def _is_open(self, place: int) -> bool:
        image = self.tensors[place].image
        return image is not None and None in image.size

    def _spec(self, place: int) -> InputSpec:
        name, declared, image = self.tensors[place]
        if image is None:
            assert declared.shape is not None
            return InputSpec(name, _NARROW.get(declared.dtype, declared.dtype), tuple(declared.shape[1:]))
        is_sized = place == self.order[0] or self._is_open(place)
        sides = (None, None) if is_sized else image.size
        return InputSpec(name, image.image.dtype, (*sides, image.image.channels), is_image=True)


def network_inputs(declared: Mapping[str, TensorShape], settings: ModelSettings) -> NetworkInputs:
    """Returns the inputs of a network by their names. Raises ModelFailed where one can't be served, or where the
    settings of images do not fit."""
    if not declared:
        raise ModelFailed(
            "source: expected a model of one input or several, got one without; where the model is, begin it with"
            " keras.Input((height, width, 3))"
        )
    return NetworkInputs(tuple(NetworkInput(name, one, _image(name, one, settings)) for name, one in declared.items()))


def _image(name: str, declared: TensorShape, settings: ModelSettings) -> ImageTensor | None:
    """Returns an input as an image; None where its shape or type are of none."""
    if declared.shape is None or (declared.dtype in DTYPES and axes_of(declared.shape, settings.layout) is not None):
        return image_tensor(declared, settings.color, settings.layout, settings.depth)
    if declared.dtype == "string":
        raise ModelFailed(f"source: expected numbers, got {name}: {declared}: {OF_TEXT}")
    if not declared.shape or None in declared.shape[1:]:
        raise ModelFailed(
            "source: expected images, such as [None, height, width, channels], or numbers [None, ...] whose other sides"
            f" are known, got {name}: {declared}; export the model with these sides"
        )
    if hint := of_flattened(declared.shape):
        _log.info("input %s takes numbers, %s%s", name, declared, hint)
    return None
