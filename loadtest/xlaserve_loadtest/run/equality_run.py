"""Compares the outputs of two arms for the same images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from xlaserve_loadtest.record.lines import Arm, Equality
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import ANY, DTYPES
from xlaserve_loadtest.targets.target import Array, ModelInfo

RELATIVE: Final = 0.01
"""Largest relative difference of a number. TensorFloat-32 on a GPU stays below, a wrong answer does not."""
OF_LARGEST: Final = 0.001
"""Allowed on top of RELATIVE, as a share of the largest number of all outputs: near 0 rounding may differ."""
DIFFERING_NAMES: Final = 0.001
"""Share of integers that may differ: rounding decides between two equally likely classes."""


def incomparable(own: Sequence[ModelInfo], other: Sequence[ModelInfo]) -> str:
    """Returns why the outputs of two arms' models can't be compared: inputs or shapes differ; empty where they can."""
    if len(own) != len(other):
        return f"they run {len(own)} and {len(other)} models"
    return next(filter(None, map(_incomparable, own, other)), "")


def _incomparable(own: ModelInfo, other: ModelInfo) -> str:
    if own.outputs and not any(tensor.datatype in DTYPES for tensor in own.outputs):
        return "they answer no numbers"
    inputs = [[(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in info.inputs] for info in (own, other)]
    if inputs[0] != inputs[1]:
        return f"they take {inputs[0]} and {inputs[1]}"
    shapes = [[tensor.shape[1:] for tensor in info.outputs] for info in (own, other)]
    if list(map(len, shapes[0])) != list(map(len, shapes[1])) or not all(
        has == wants or ANY in (has, wants)
        for one, another in zip(*shapes, strict=True)
        for has, wants in zip(one, another, strict=True)
    ):
        return f"they have the shapes {shapes[0]} and {shapes[1]}"
    return ""


def compare_models(
    arm: Arm,
    baseline: str,
    requests: Sequence[Request],
    own: Sequence[Sequence[Array]],
    other: Sequence[Sequence[Array]],
) -> Iterator[Equality]:
    """Yields how far an arm's outputs for its first requests are from the `other`, for each of its models."""
    for index, model in enumerate(arm.served):
        places = [place for place, request in enumerate(requests[: len(own)]) if request.model == index]
        if places:
            ours, theirs = ([outputs[place] for place in places] for outputs in (own, other))
            images = sum(requests[place].images for place in places)
            found = compare_outputs(arm.name, baseline, images, ours, theirs)
            yield replace(found, model=model) if arm.models else found


def compare_outputs(
    arm: str, baseline: str, images: int, own: Sequence[Sequence[Array]], other: Sequence[Sequence[Array]]
) -> Equality:
    """Returns how far `own` outputs are from the `other`: those of the model for each request; all hold `images`.

    Equal means that every number differs by at most RELATIVE of the baseline's plus OF_LARGEST of the largest one, and
    of integers, such as a pixel's class, all but DIFFERING_NAMES are the same.
    """
    largest_absolute = largest_relative = 0.0
    scale = max(
        (
            float(np.abs(output[np.isfinite(output)]).max(initial=0.0))
            for outputs in other
            for output in outputs
            if not _names(output)
        ),
        default=0.0,
    )
    slack = OF_LARGEST * scale
    agreements: list[bool] = []
    is_equal = len(own) == len(other)
    for own_outputs, other_outputs in zip(own, other, strict=False):
        for ours, theirs in zip(own_outputs, other_outputs, strict=True):
            if not _are_numbers_alike(ours, theirs):
                is_equal = False
                continue
            if _names(theirs):
                is_equal = is_equal and bool((ours != theirs).mean() <= DIFFERING_NAMES)
                continue
            with np.errstate(invalid="ignore"):
                difference = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
            largest_absolute = max(largest_absolute, float(difference.max(initial=0.0)))
            # Below `slack` a number counts as 0 and has no relative difference.
            of = np.maximum(np.abs(theirs), slack if slack else 1.0)
            largest_relative = max(largest_relative, float((difference / of).max(initial=0.0)))
            is_equal = is_equal and bool((difference <= slack + RELATIVE * np.abs(theirs)).all())
            if len(own_outputs) == 1 and ours.ndim == 2 and ours.shape[1] > 1:
                agreements += (ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist()
    return Equality(
        arm=arm,
        baseline=baseline,
        images=images,
        largest_absolute=largest_absolute,
        largest_relative=largest_relative,
        top1_agreement=sum(agreements) / len(agreements) if agreements else None,
        tolerance_absolute=slack,
        tolerance_relative=RELATIVE,
        is_equal=is_equal,
    )


def _are_numbers_alike(ours: Array, theirs: Array) -> bool:
    """Whether both have the same shape and only numbers; minus infinity, the logarithm of 0, in the same places."""
    return (
        ours.shape == theirs.shape
        and bool((ours < np.inf).all() and (theirs < np.inf).all())
        and np.array_equal(ours == -np.inf, theirs == -np.inf)
    )


def _names(output: Array) -> bool:
    return output.dtype.kind == "i"
