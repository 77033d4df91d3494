"""Asks each arm for its outputs before the run, one request at a time: what its answers under load are compared with.

It is a trial as well. A request that an arm refuses whatever the load ends the run before it has begun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.lines import Header
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.run.equality_run import compare_models
from xlaserve_loadtest.run.fleet import Fleet
from xlaserve_loadtest.run.recorder import Recorder
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.references import Reference
from xlaserve_loadtest.targets.target import Array, RequestError, TargetError
from xlaserve_loadtest.targets.ties import in_order
from xlaserve_loadtest.targets.tolerance import are_alike, differing_shares, slacks_of

MAX_BYTES: Final = 256 * 2**20
"""Memory for outputs in each process that sends, for all arms together; those that would exceed it are not kept."""
_FOR_GOOD: Final = (
    Status.INVALID_ARGUMENT,
    Status.NOT_FOUND,
    Status.PERMISSION_DENIED,
    Status.UNAUTHENTICATED,
    Status.UNIMPLEMENTED,
)
"""Statuses of a request that will never be answered."""

Outputs = list[list[Array]]
"""Outputs of each request, in the order of the model's metadata."""


async def ask_alone(fleet: Fleet, header: Header, images: int, recorder: Recorder) -> dict[str, Outputs]:
    """Returns the outputs for about so many `images`, by arm without controls, and hands them to those that send.

    An arm that fails is left out, which is recorded. Raises TargetError for an arm that refuses its requests for good.
    """
    arms = [arm for arm in header.arms if arm.is_control_of is None]
    found: dict[str, Outputs] = {}
    for arm in arms:
        count = _covering(fleet.requests[arm.name], images)
        try:
            # A control gets a copy of its baseline's.
            outputs = await fleet.outputs(arm.name, count, MAX_BYTES // len(header.arms))
            again = await fleet.outputs(arm.name, len(outputs))
        except RequestError as error:
            if error.status in _FOR_GOOD:
                raise TargetError(f"{arm.name} refused a trial request: {error}") from None
            _record(recorder, f"{arm.name}: outputs could not be compared: {error}")
            continue
        except TargetError as error:
            _record(recorder, f"{arm.name}: outputs could not be compared: {error}")
            continue
        found[arm.name] = outputs
        if not any(map(len, outputs)):
            _note(recorder, f"{arm.name} answers no numbers: its answers under load are not compared.")
            continue
        # Each answer may be compared with each: generators on other machines have to be heard meanwhile.
        references = await asyncio.to_thread(references_of, fleet.requests[arm.name], outputs, again)
        if all(reference.share is None for reference in references):
            _record(
                recorder,
                f"{arm.name} answers the same request differently even alone: its answers under load are not compared",
            )
            for differing in compare_models(arm, arm.name, fleet.requests[arm.name], again, outputs):
                recorder.write(differing)
            continue
        if allowed := max(reference.share or 0.0 for reference in references):
            _note(
                recorder,
                f"{arm.name} answers the same request differently even alone: "
                f"up to {allowed:.2%} of an image's numbers may differ under load.",
            )
        if len(references) > 1 and await asyncio.to_thread(are_indistinct, fleet.requests[arm.name], outputs):
            _note(
                recorder,
                f"{arm.name} answers all of its requests alike within the tolerance: answers that it gives to another "
                "request under load are not found.",
            )
        for own in header.arms:
            if arm.name in (own.name, own.is_control_of):
                await fleet.learn(own.name, references)
    return found


def _covering(requests: Sequence[Request], images: int) -> int:
    """Returns how many requests it takes to send that many images."""
    sent = accumulate(request.images for request in requests)
    return next((number for number, total in enumerate(sent, start=1) if total >= images), len(requests))


def references_of(requests: Sequence[Request], outputs: Outputs, again: Outputs) -> list[Reference]:
    """Returns the outputs of each request, and how much of them may differ under load.

    That is twice the largest share that differed between two answers to the same request, of its model. It is half of
    what answers to other requests differ by at most, so that none of these is taken for its own; a request for which
    that is less than what differed alone is not compared.
    """
    asked = list(zip(requests, outputs, again, strict=False))
    references: dict[int, Reference] = {}
    for model in {request.model for request, _, _ in asked}:
        places = [place for place, (request, _, _) in enumerate(asked) if request.model == model]
        slacks = slacks_of(outputs[place] for place in places)
        own_share = max(float(_share(asked[place][2], outputs[place], slacks).max()) for place in places)
        for place in places:
            most = _least_apart(outputs, place, places, slacks) / 2 if own_share else 1.0
            references[place] = Reference(outputs[place], None if own_share > most else min(2 * own_share, most))
    return [references[place] for place in range(len(asked))]


def are_indistinct(requests: Sequence[Request], outputs: Outputs) -> bool:
    """Whether no model's answer to one of its requests can be told from that to another."""
    asked = list(zip(requests, outputs, strict=False))
    for model in {request.model for request, _ in asked}:
        own = [answer for request, answer in asked if request.model == model]
        slacks = slacks_of(own)
        if any(_share(answer, own[0], slacks).any() for answer in own[1:]):
            return False
    return True


def _least_apart(outputs: Outputs, place: int, places: Sequence[int], slacks: Sequence[float]) -> float:
    """Returns the least share of an image's numbers by which the answer to another request differs, if it does."""
    apart = np.concatenate([_share(outputs[other], outputs[place], slacks) for other in places])
    return float(apart[apart > 0].min(initial=1.0))


def _share(ours: Sequence[Array], theirs: Sequence[Array], slacks: Sequence[float]) -> NDArray[np.float64]:
    """Returns for each image the share of its numbers that differ beyond the tolerance and by no order of ties."""
    if len(ours) != len(theirs):
        return np.ones(1)
    ordered = in_order(ours, theirs, slacks)
    if all(map(are_alike, ordered, theirs, slacks)):
        return np.zeros(1)
    return differing_shares(ordered, theirs, slacks)


def _note(recorder: Recorder, text: str) -> None:
    recorder.event(time.monotonic_ns(), "note", text)


def _record(recorder: Recorder, text: str) -> None:
    recorder.event(time.monotonic_ns(), "error", text)
