"""The scaling of pixels before a network."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from xlaserve.config.base import Frozen


def _not_zero(value: float) -> float:
    if value == 0:
        raise ValueError("expected another number than 0")
    return value


Deviation = Annotated[FiniteFloat, AfterValidator(_not_zero)]
NamedPreprocess = Literal["none", "tf", "torch", "caffe", "unit", "standardize"]
OF_RGB: Final = ("torch", "caffe")
"""Names of preprocessing whose means are those of red, green and blue."""


class ScalingSettings(Frozen):
    """Scaling by numbers: `(level / divisor - mean) / deviation`, of levels from 0 to 255."""

    divisor: float = Field(1.0, gt=0, allow_inf_nan=False, examples=[255])
    """The number that levels are divided by first: 255 for a mean and a deviation of pixels from 0 to 1."""
    mean: FiniteFloat | tuple[FiniteFloat, ...] = Field(0.0, examples=[[0.485, 0.456, 0.406]])
    """The number that is subtracted then, or one for each channel, in the order of `color`."""
    deviation: Deviation | tuple[Deviation, ...] = Field(1.0, examples=[[0.229, 0.224, 0.225]])
    """The number that the rest is divided by, or one for each channel. Below 0 it inverts: `{mean: 255, deviation: -1}`
    is `255 - level`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("expected divisor, mean or deviation, as in preprocess: {mean: 127, deviation: 128}")
        if () in (self.mean, self.deviation) or len(self.channels) > 1:
            raise ValueError("mean, deviation: expected a number, or a list with one for each channel")
        return self

    @property
    def channels(self) -> frozenset[int]:
        """The number of channels of its lists; empty without lists."""
        return frozenset(len(value) for value in (self.mean, self.deviation) if isinstance(value, tuple))

    @property
    def factor(self) -> float:
        """The factor for levels without its sign, of all channels together."""
        deviations = self.deviation if isinstance(self.deviation, tuple) else (self.deviation,)
        return len(deviations) / sum(map(abs, deviations)) / self.divisor

    def __str__(self) -> str:
        fields = self.model_dump(mode="json", exclude_unset=True)
        return f"{{{', '.join(f'{name}: {value}' for name, value in fields.items())}}}"


Preprocess = NamedPreprocess | ScalingSettings
