"""Compares the outputs of two arms for the same images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from xlaserve_loadtest.record.lines import Arm, Equality
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import ANY, Tensor
from xlaserve_loadtest.targets.answers import COMPARED
from xlaserve_loadtest.targets.target import Array, ModelInfo
from xlaserve_loadtest.targets.ties import in_order
from xlaserve_loadtest.targets.tolerance import RELATIVE, are_alike, are_comparable, are_names, distances, slacks_of


def not_compared(arm: str, baseline: str, why: str) -> Equality:
    """Returns the line for two arms whose outputs can't be compared."""
    return Equality(arm, baseline, 0, 0.0, 0.0, None, 0.0, RELATIVE, is_equal=False, incomparable=why)


def incomparable(own: Sequence[ModelInfo], other: Sequence[ModelInfo]) -> str:
    """Returns why the outputs of two arms' models can't be compared: inputs or shapes differ; empty where they can.

    What is of `own` stands first.
    """
    if len(own) != len(other):
        return f"they run {len(own)} and {len(other)} models"
    return next(filter(None, map(_incomparable, own, other)), "")


def _incomparable(own: ModelInfo, other: ModelInfo) -> str:
    if own.outputs and not any(tensor.datatype in COMPARED for tensor in own.outputs):
        return "they answer neither numbers nor strings"
    inputs = [[(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in info.inputs] for info in (own, other)]
    if inputs[0] != inputs[1]:
        return f"{own.name} takes {_listed(own.inputs)} against {_listed(other.inputs)}"
    shapes = [[tensor.shape[1:] for tensor in info.outputs] for info in (own, other)]
    if list(map(len, shapes[0])) != list(map(len, shapes[1])) or not all(
        has == wants or ANY in (has, wants)
        for one, another in zip(*shapes, strict=True)
        for has, wants in zip(one, another, strict=True)
    ):
        return f"{own.name} answers {_listed(own.outputs)} against {_listed(other.outputs)}"
    return ""


def _listed(tensors: Sequence[Tensor]) -> str:
    """Returns names, datatypes and shapes, such as "scores FP32 [n,8]"."""

    def shape(tensor: Tensor) -> str:
        first = "n" if tensor.has_batch else "?"
        return ",".join("?" if side == ANY else str(side) for side in tensor.shape).replace("?", first, 1)

    return ", ".join(f"{tensor.name} {tensor.datatype} [{shape(tensor)}]" for tensor in tensors) or "nothing"


def compare_models(
    arm: Arm,
    baseline: str,
    requests: Sequence[Request],
    own: Sequence[Sequence[Array]],
    other: Sequence[Sequence[Array]],
) -> Iterator[Equality]:
    """Yields how far an arm's outputs for its first requests are from the `other`, for each of its models."""
    both = requests[: min(len(own), len(other))]
    for index, model in enumerate(arm.served):
        places = [place for place, request in enumerate(both) if request.model == index]
        if places:
            ours, theirs = ([outputs[place] for place in places] for outputs in (own, other))
            images = [requests[place].images for place in places]
            found = compare_outputs(arm.name, baseline, images, ours, theirs)
            yield replace(found, model=model) if arm.models else found


def compare_outputs(
    arm: str, baseline: str, images: Sequence[int], own: Sequence[Sequence[Array]], other: Sequence[Sequence[Array]]
) -> Equality:
    """Returns how far `own` outputs are from the `other`: those of the model for each request, which holds `images`.

    Equal means that every output of every request is within the tolerance of `targets.tolerance`.
    """
    largest_relative = 0.0
    slacks = slacks_of(other)
    # The largest difference of the output that is furthest off for its tolerance, and that.
    furthest = (0.0, max(slacks, default=0.0))
    agreements: list[bool] = []
    differing = 0
    for count, own_outputs, other_outputs in zip(images, own, other, strict=True):
        ordered = in_order(own_outputs, other_outputs, slacks)
        triples = list(zip(ordered, other_outputs, slacks, strict=True))
        differing += 0 if all(are_alike(*triple) for triple in triples) else count
        for ours, theirs, slack in triples:
            if are_names(theirs) or not are_comparable(ours, theirs):
                continue
            difference = distances(ours, theirs)
            furthest = max(furthest, (float(difference.max(initial=0.0)), slack), key=_of_tolerance)
            # Below `slack` a number counts as 0 and has no relative difference.
            of = np.maximum(np.abs(theirs), slack if slack else 1.0)
            largest_relative = max(largest_relative, float((difference / of).max(initial=0.0)))
            if len(own_outputs) == 1 and ours.ndim == 2 and ours.shape[1] > 1:
                agreements += (ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist()
    return Equality(
        arm=arm,
        baseline=baseline,
        images=sum(images),
        largest_absolute=furthest[0],
        largest_relative=largest_relative,
        top1_agreement=sum(agreements) / len(agreements) if agreements else None,
        tolerance_absolute=furthest[1],
        tolerance_relative=RELATIVE,
        is_equal=not differing,
        differing=differing,
    )


def _of_tolerance(furthest: tuple[float, float]) -> float:
    """Returns a difference as a multiple of the tolerance that stands with it."""
    largest, slack = furthest
    if not largest:
        return 0.0
    return largest / slack if slack else math.inf
