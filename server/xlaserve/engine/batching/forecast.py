"""Forecasts of when a model's requests will be answered, so that late ones are refused on arrival.

The expected time is that of the work ahead at its measured cost. It is corrected, for each priority, by the ratio of
the time that requests took to the time that was expected: requests that come later and are put before others, other
models' load and delays of the event loop are not foreseen but learned. Where nothing waits nothing is refused, so a
wrong forecast is always corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from xlaserve.engine.batching.lanes import Lanes, Share
from xlaserve.engine.batching.queue import PATIENCE_S, Job, PriorityLine, Queue
from xlaserve.engine.request import EncodedRequest, Shape
from xlaserve.errors import DeadlineExceeded, DeadlineUnreachable

FAR: Final = 100
"""A deadline that is this many times farther away than the work ahead takes is not checked."""


@dataclass(eq=False)
class Forecast:
    """Expects when the jobs of `model`, which wait in `queues` for the turns of `share`, will be answered."""

    model: str
    queues: Mapping[Shape, Queue]
    lanes: Lanes
    share: Share
    clock: Callable[[], float]
    max_delay_s: float
    """How long a batch that is not full waits for more images."""

    def check(self, job: Job) -> None:
        """Sets the expected time of `job`, which is not in its queue yet.

        Raises DeadlineUnreachable where images wait and `job` would be late, or would make jobs late that it overtakes.
        """
        queue, images = job.queue, job.images
        slack_s = job.request.deadline - job.arrived
        if self._is_far(queue, slack_s):
            return
        line = queue.lines[job.request.priority]
        overtaken = line.behind(job.rank)
        ahead = line.images - sum(other.waiting for other in overtaken)
        job.expected_s = self._expected_s(queue, line, ahead + images, job.arrived)
        likely_s = line.wait_margin.likely_s(job.expected_s)
        job.spare_s = slack_s - likely_s
        if not queue.images:
            return
        planner = queue.costs.planner
        if job.spare_s < 0:
            raise self._unreachable(likely_s, slack_s, planner.batch_s)
        delay_s = job.expected_s * images / (ahead + images) if overtaken else 0.0
        if any(0 <= other.spare_s < delay_s for other in overtaken):  # less than 0: late as it is
            raise DeadlineUnreachable(
                f"model {self.model}: requests that were accepted before would miss their deadlines", planner.batch_s
            )
        for other in overtaken:
            other.spare_s -= delay_s
            if other.expected_s is not None:
                other.expected_s += delay_s

    def check_encoded(self, request: EncodedRequest) -> None:
        """Raises DeadlineUnreachable for encoded images that can't be answered by their deadline in any shape.

        Raises nothing where none are decoded and none wait.
        """
        images, deadline, priority, shapes, decode_s, decoding = request
        now = self.clock()
        slack_s = deadline - now
        queues = [self.queues[shape] for shape in shapes]
        if slack_s > FAR * decode_s and all(self._is_far(queue, slack_s) for queue in queues):
            return
        if not decoding and not any(queue.images for queue in queues):
            return
        rank = min(deadline, now + PATIENCE_S)
        likely_s = math.inf
        for queue in queues:
            line, planner = queue.lines[priority], queue.costs.planner
            ahead = line.images - sum(other.waiting for other in line.behind(rank)) + decoding
            expected_s = self._expected_s(queue, line, ahead + images, now)
            likely_s = min(likely_s, max(decode_s + planner.seconds(images), line.wait_margin.likely_s(expected_s)))
        if likely_s > slack_s:
            raise self._unreachable(likely_s, slack_s, 0.0)

    def learn(self, job: Job) -> None:
        """Compares the expected time of `job` with the time that it took, or would at least have taken."""
        if job.expected_s is None:
            return
        now = self.clock()
        if job.answered == job.images:
            took_s = now - job.arrived
        elif now >= job.request.deadline or _was_late(job):
            took_s = max(now, job.request.deadline) - job.arrived
        else:
            return
        job.queue.lines[job.request.priority].wait_margin.observe(job.expected_s, took_s)

    def work_s(self) -> float:
        """Returns the seconds that all waiting images should take, had the model the device to itself."""
        return sum(queue.costs.planner.seconds(queue.images) for queue in self.queues.values() if queue.images)

    def drain_s(self) -> float:
        """Returns the seconds in which every request that waits or runs should be answered."""
        return self.lanes.wait_s(self.clock()) + self.work_s() * (1 + self.lanes.count_others(self.share))

    def _is_far(self, queue: Queue, slack_s: float) -> bool:
        planner = queue.costs.planner
        return slack_s > FAR * planner.batch_s * (2 + queue.images // planner.best)

    def _expected_s(self, queue: Queue, line: PriorityLine, images: int, now: float) -> float:
        """Returns the seconds in which the first `images` images of a line should be answered.

        Meanwhile other priorities, resolutions and modes get their shares, and so do other models.
        """
        planner = queue.costs.planner
        others = (_taken_meanwhile(other, line, images) for other in queue.lines.values() if other is not line)
        total = images + math.ceil(sum(others))
        own_s = planner.seconds(total)
        work_s = own_s + sum(
            min(own_s, other.costs.planner.seconds(other.images))
            for other in self.queues.values()
            if other.images and other is not queue
        )
        wait_s = self.lanes.wait_s(now)
        if total < planner.best:
            wait_s = max(wait_s, self.max_delay_s)
        return wait_s + work_s * (1 + self.lanes.count_others(self.share))

    def _unreachable(self, likely_s: float, slack_s: float, least_s: float) -> DeadlineUnreachable:
        return DeadlineUnreachable(
            f"model {self.model}: the deadline is in {max(0.0, slack_s):.3f} s, and the answer would take"
            f" {likely_s:.3f} s with what waits already",
            max(likely_s - slack_s, least_s),
        )


def _taken_meanwhile(other: PriorityLine, line: PriorityLine, images: int) -> float:
    """Returns the number of images of an `other` priority that are taken while `images` of `line` are.

    That is no more than its weight allows, and otherwise the images that wait, or as many as lately.
    """
    lately = images * other.lately / line.lately if line.lately else 0.0
    return min(images * other.weight / line.weight, max(other.images, lately))


def _was_late(job: Job) -> bool:
    settled = job.settled
    return settled.done() and not settled.cancelled() and isinstance(settled.exception(), DeadlineExceeded)
