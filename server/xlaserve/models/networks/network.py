"""The network that a source builds: a program, and the facts that are needed to serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xlaserve.engine.inputs import NO_RESOLUTION, Inputs, pixels
from xlaserve.engine.program import Executable, Program
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.networks.preparation import UNKNOWN, Preparation
from xlaserve.models.task import Task

Size = tuple[int | None, int | None]
"""Height and width of a model's input; None is a side that may be chosen."""
NO_SIZE: Final[Size] = NO_RESOLUTION
"""Stands for the size of a model that takes no images."""


@dataclass(frozen=True)
class Network:
    """A model as its source gives it."""

    program: Program
    size: Size
    """The heights and widths that it takes, regardless of the configured ones."""
    task: Task
    """The task, with the source's own names of the classes, where it has them."""
    weights: str
    """The origin of the weights: `imagenet`, `random`, `built in`, or the name of a file or a preset."""
    lowerings: str = ""
    """The lowerings that XLA runs it with, and how often each is applied: `depthwise 17`. Empty without any."""
    calibrated: str = ""
    """Measured quality of its int8 form for OpenVINO: `agreement 0.998 of 75 held-out images`. Empty where there is
    none."""
    image: ImageInput = RGB
    """The channels of its images, and how clients may lay them out; of several inputs, the first. `NO_IMAGE` where that
    holds none."""
    others: tuple[ImageInput | None, ...] = ()
    """The inputs behind the first: the images that they hold, None where they hold none."""
    inputs: Inputs = ()
    """The inputs of its program; by default one image."""
    batch: int | None = None
    """The only batch size that it takes, where it was made for one."""
    default_size: Size = (None, None)
    """For a model that takes several sizes, the one that it was designed for, where that is known."""
    multiple: int = 1
    """Height and width have to be multiples of this."""
    is_unscaled: bool = False
    """Whether it takes floats, and gets pixels from 0 to 255 as they are."""
    pixel_scale: float | None = None
    """The factor for the levels of pixels before its first layer, preprocessing included; None where that is not read,
    as of a model that is not from a file, or takes whole numbers."""
    is_narrow: bool = False
    """Whether it computes in bfloat16 or float16 anywhere, as a model that was trained in mixed precision, or rounds to
    levels of 8 bits; each mode then rounds in a way of its own."""
    preparation: Preparation = UNKNOWN
    """How images became the pixels that it was trained on."""
    reference: Executable | None = None
    """Computes the outputs slowly, operation by operation, in float32 where only `precision` says less; must not be
    called while the model serves. None where there is none."""
    reason: str = ""
    """Why `auto` chose the task; empty where the settings or the source name it."""

    def __post_init__(self) -> None:
        if not self.inputs:
            object.__setattr__(self, "inputs", pixels(self.image.channels, dtype=self.image.dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(each.name for each in self.inputs)

    @property
    def is_of_one_image(self) -> bool:
        """Whether one image is all that it takes."""
        return len(self.inputs) == 1 and self.inputs[0].is_image

    @property
    def lowering_names(self) -> list[str]:
        """The names in `lowerings`."""
        return [each.rpartition(" ")[0] for each in self.lowerings.split(", ") if each]
