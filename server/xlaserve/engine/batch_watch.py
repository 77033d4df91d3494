"""A watch for batches that don't end: a model's own code may never return."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from xlaserve.engine.under_way import BatchRun, UnderWay

LOOK_S: Final = 1.0
LONG_LOOKS: Final = 60
"""Looks at a batch after which it is long, and between its warnings. Looks are counted, not seconds: there are none
while this process is stopped, as on a machine that is suspended."""
COST_FACTOR: Final = 10.0
"""A batch is taken to never end once it is long and takes this many times what warm-up measured."""

log = logging.getLogger(__name__)


class BatchWatch:
    """Warns of long batches, and calls `on_endless` once no other batch can run beside batches that never end.

    That is where they hold all `lanes` lanes, or the thread of the event loop, on which this is built. The batches are
    marked in `under_way`. `on_endless` is called on a thread of its own, as the event loop may stand still; the process
    should end.
    """

    def __init__(self, under_way: UnderWay, lanes: int, on_endless: Callable[[], object]) -> None:
        self._under_way = under_way
        self._lanes = lanes
        self._on_endless = on_endless
        self._event_loop = threading.get_ident()
        self._looks: dict[BatchRun, int] = {}
        """Looks at which each batch was under way."""
        self._has_ended = False

    def start(self) -> None:
        """Looks once in `LOOK_S`, on a thread, until the process ends."""
        threading.Thread(target=self._follow, name="batch watch", daemon=True).start()

    def _follow(self) -> None:
        while not self._has_ended:
            time.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Looks at all batches."""
        self._looks = {batch: self._looks.get(batch, 0) + 1 for batch in self._under_way.batches()}
        for batch, looks in self._looks.items():
            if looks % LONG_LOOKS == 0:
                title, program, _ = batch.noted
                log.warning("model %s: a batch in %s has run for %g s so far", title, program, looks * LOOK_S)
        endless = [batch for batch, looks in self._looks.items() if _is_endless(batch, looks)]
        holds_loop = any(batch.thread == self._event_loop for batch in endless)
        if (holds_loop or len(endless) >= self._lanes) and not self._has_ended:
            self._has_ended = True
            self._under_way.mark_endless(endless)
            held = "the event loop is" if holds_loop else f"all lanes ({self._lanes}) are"
            models = ", ".join(f"model {batch.noted.title} ({batch.noted.program})" for batch in endless)
            log.critical("%s held by batches that never end, and this process ends: %s", held, models)
            self._on_endless()


def _is_endless(batch: BatchRun, looks: int) -> bool:
    return looks >= LONG_LOOKS and looks * LOOK_S > COST_FACTOR * batch.noted.cost_s
