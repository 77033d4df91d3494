"""Asks each arm for its outputs before the run, one request at a time: what its answers under load are compared with.

It is a trial as well. A request that an arm refuses whatever the load ends the run before it has begun.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from xlaserve_loadtest.record.lines import Header, Status
from xlaserve_loadtest.run.fleet import Fleet
from xlaserve_loadtest.run.recorder import Recorder
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array, RequestError, TargetError
from xlaserve_loadtest.targets.tolerance import are_alike, slacks_of

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
            again = await fleet.outputs(arm.name, 1)
        except RequestError as error:
            if error.status in _FOR_GOOD:
                raise TargetError(f"{arm.name} refused a trial request: {error}") from None
            _record(recorder, f"{arm.name}: outputs could not be compared: {error}")
            continue
        except TargetError as error:
            _record(recorder, f"{arm.name}: outputs could not be compared: {error}")
            continue
        found[arm.name] = outputs
        if not _are_all_alike(again[0], outputs[0]):
            _record(
                recorder,
                f"{arm.name} answers the same request differently even alone: its answers under load are not compared",
            )
            continue
        for own in header.arms:
            if arm.name in (own.name, own.is_control_of):
                await fleet.learn(own.name, outputs)
    return found


def _covering(requests: Sequence[Request], images: int) -> int:
    """Returns how many requests it takes to send that many images."""
    sent = accumulate(request.images for request in requests)
    return next((number for number, total in enumerate(sent, start=1) if total >= images), len(requests))


def _are_all_alike(ours: Sequence[Array], theirs: Sequence[Array]) -> bool:
    return all(map(are_alike, ours, theirs, slacks_of([theirs])))


def _record(recorder: Recorder, text: str) -> None:
    recorder.event(time.monotonic_ns(), "error", text)
