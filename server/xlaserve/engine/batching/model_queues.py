"""The queues of one model, a queue for each mode and resolution, and the order in which their batches run.

Only images of one mode and resolution share a batch. The queues share the model's turns as models share the device, by
start-time fair queueing (see `lanes`): each batch advances its queue's virtual time by the seconds it takes, and the
queue with the least is next. So a flood in one resolution holds up an image of another, whose queue was empty, only by
the batches that were in flight (one on each lane and the one that is gathered ahead), and by one batch of each
resolution more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.costs import Costs, Turn
from xlaserve.engine.batching.lanes import Share
from xlaserve.engine.batching.queue import Job, Queue
from xlaserve.engine.buckets.demand import Demand
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed
from xlaserve.engine.request import Shape


class Live(NamedTuple):
    """A model's work at a moment, for metrics and pages. Plain data, which can be pickled."""

    waiting_images: int = 0
    outstanding_s: float = 0.0
    """Seconds in which every request that waits or runs should be answered."""
    queued_work_s: float = 0.0
    """Seconds that the images in the queues should take the device, by its measured costs."""
    in_flight_images: int = 0
    """Images that are decoded, wait or run."""
    in_flight_images_limit: int = 0
    turns: tuple[tuple[Mode, Bucket, Turn], ...] = ()
    """The buckets that serve, and the time of a batch of each from the queue to its answers."""
    demand: Mapping[tuple[int, int], Demand] = {}
    """Demand by height and width, of all modes together."""


class ModelQueues:
    """The queues of one model on a device with `lanes` lanes.

    A batch that is not full waits up to `max_delay_s` seconds for more images.
    """

    def __init__(self, lanes: int, max_delay_s: float, clock: Callable[[], float]) -> None:
        self.max_delay_s = max_delay_s
        self.by_shape: dict[Shape, Queue] = {}
        self.demand: defaultdict[tuple[int, int], Demand] = defaultdict(Demand)
        """Demand by height and width, of all modes together."""
        self.share = Share(self._is_next_full)
        """The model's part of the device."""
        self._lanes = lanes
        self._clock = clock
        self._virtual_s = 0.0

    def add(self, programs: Mapping[tuple[Mode, Bucket], Warmed]) -> None:
        """Adds the buckets of `programs`, with queues for new shapes. Waiting images are planned again."""
        for shape, costs in _costs_by_shape(programs).items():
            if shape in self.by_shape:
                self.by_shape[shape].costs.add(costs)
            else:
                self.by_shape[shape] = Queue(shape, Costs(costs, self._lanes))

    @property
    def images(self) -> int:
        """Images in the queues."""
        return sum(queue.images for queue in self.by_shape.values())

    @property
    def requests(self) -> int:
        """Requests of which images are in the queues."""
        return sum(len(line.jobs) for queue in self.by_shape.values() for line in queue.lines.values())

    def turns(self) -> Iterator[tuple[Mode, Bucket, Turn]]:
        """Yields the buckets that serve, and the time of a batch of each from the queue to its answers."""
        for (mode, height, width), queue in self.by_shape.items():
            for batch, turn in queue.costs.turns().items():
                yield mode, Bucket(batch, height, width), turn

    def append(self, job: Job) -> None:
        """Puts `job` into its queue."""
        if not job.queue.images:
            self._catch_up(job.queue)
        job.queue.append(job)

    def due(self) -> float:
        """Returns when the next batch may start, in seconds of the clock: infinity without any images."""
        return min(queue.due(self.max_delay_s) for queue in self.by_shape.values())

    def next(self, now: float) -> Queue | None:
        """Returns the queue whose batch is next: of those that are due, the one with the least virtual time."""
        due = [queue for queue in self.by_shape.values() if queue.due(self.max_delay_s) <= now]
        return min(due, key=lambda queue: (queue.virtual_s, queue.planned_at), default=None)

    def begin(self, queue: Queue, expected_s: float) -> None:
        """Charges a batch of `queue` that begins with the seconds that it is expected to take."""
        self._virtual_s = max(self._virtual_s, queue.virtual_s)
        self.charge(queue, expected_s)

    def charge(self, queue: Queue, seconds: float) -> None:
        """Charges `queue` and the model's share of the device with seconds of a lane; negative ones correct others."""
        self.share.virtual_s += seconds
        queue.virtual_s += seconds

    def charge_empty(self, queue: Queue, seconds: float) -> None:
        """Charges `queue`, in which nothing waited, with a batch that has run."""
        self._catch_up(queue)
        self.charge(queue, seconds)

    def _catch_up(self, queue: Queue) -> None:
        """Moves an empty `queue` up to the model's virtual time: it is served next, and idle time earns no credit."""
        queue.virtual_s = max(queue.virtual_s, self._virtual_s)

    def _is_next_full(self) -> bool:
        queue = self.next(self._clock())
        return queue is not None and queue.is_full


def _costs_by_shape(programs: Mapping[tuple[Mode, Bucket], Warmed]) -> dict[Shape, dict[int, Cost]]:
    costs: dict[Shape, dict[int, Cost]] = {}
    for (mode, bucket), warmed in programs.items():
        costs.setdefault((mode, bucket.height, bucket.width), {})[bucket.batch] = warmed.cost
    return costs
