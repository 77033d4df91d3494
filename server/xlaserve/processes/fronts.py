"""The fronts that a supervisor starts: number, orders, and a spare process; `supervised_role` starts one again."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from xlaserve.config import Settings
from xlaserve.processes import front_process
from xlaserve.processes.capacity import needed
from xlaserve.processes.engines import DRAINING, LATER_S
from xlaserve.processes.front import FLUSH_S
from xlaserve.processes.supervision.restart_policy import RestartPolicy, Restarts
from xlaserve.processes.supervision.role import Role
from xlaserve.programs.tf.device import usable_cores

FRONT: Final = "front {}"
"""The name of a front's role, by its number."""
SPARE_LOOK_S: Final = 0.25
"""Interval between looks whether a spare process is there."""
SPARES: Final = RestartPolicy(window_s=600.0, at_once=0, first_wait_s=SPARE_LOOK_S, longest_wait_s=60.0, jitter=0.0)
"""Waits before another spare process is started when one has ended by itself, or could not be started."""


class Fronts:
    """The roles of `count` fronts, to which others can be added up to `settings.front_processes`.

    Each front listens on `ports`, by the names of their settings, links to the `engines` at these addresses, and
    inherits `descriptors`. `successor` is the address where a server that has taken this one's place makes changes of
    models, `metrics` the HOST:PORT of the metrics. Fronts that are started while `waits` returns True listen only once
    models serve.
    """

    def __init__(
        self,
        settings: Settings,
        count: int,
        *,
        ports: Mapping[str, int],
        engines: Sequence[Path],
        successor: Path,
        metrics: str | None,
        descriptors: Mapping[str, int],
        waits: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._of_front = settings.model_copy(update={**ports, "metrics_port": None})
        self._engines = tuple(engines)
        self._successor = successor
        self._metrics = metrics
        self._descriptors = descriptors
        self._waits = waits
        self.numbers: Mapping[str, int] = _numbers(1, count)
        """Numbers of the fronts by the names of their roles. Replaced, never changed: any thread may read it."""

    @property
    def roles(self) -> list[Role]:
        """The roles of all fronts, in the order of their numbers."""
        return [*self._roles(self.numbers)]

    def add(self, images_per_s: float, engines: int) -> list[Role]:
        """Adds the fronts that are missing to bring `images_per_s` to each of `engines`, and returns their roles."""
        wanted = needed(images_per_s, usable_cores(), engines)
        added = _numbers(len(self.numbers) + 1, min(wanted, self._settings.front_processes))
        self.numbers = {**self.numbers, **added}
        return [*self._roles(added)]

    def _roles(self, numbers: Mapping[str, int]) -> Iterable[Role]:
        settings = self._settings
        for name, number in numbers.items():
            yield Role(
                name=name,
                target=f"{front_process.__name__}:{front_process.run.__name__}",
                payload=partial(self._orders, number),
                descriptors=self._descriptors,
                has_spare=True,
                stage=DRAINING,
                drain_s=front_process.leaving_s(settings),
                stop_timeout_s=settings.shutdown_delay_s + settings.drain_timeout_s + 2 * FLUSH_S + LATER_S,
            )

    def _orders(self, number: int) -> bytes:
        """Returns the pickled orders of a front that is about to be started."""
        return pickle.dumps(
            front_process.FrontOrders(
                self._of_front, self._engines, self._successor, self._metrics, number, self._waits()
            )
        )


async def keep_spare(is_needed: Callable[[], bool], prepare: Callable[[], bool]) -> None:
    """Keeps a spare process ready for the end of a front, while `is_needed` returns True. Never returns.

    `prepare` starts one unless it is there, and returns whether it was.
    """
    restarts = Restarts(SPARES)
    while True:
        await asyncio.sleep(SPARE_LOOK_S)
        if is_needed() and not prepare():
            wait_s = restarts.wait_s(asyncio.get_running_loop().time())
            await asyncio.sleep(wait_s or SPARES.longest_wait_s)


def _numbers(first: int, last: int) -> dict[str, int]:
    return {FRONT.format(number): number for number in range(first, last + 1)}
