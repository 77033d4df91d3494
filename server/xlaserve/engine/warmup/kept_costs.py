"""Costs that the compile cache has kept, checked against the runs that verify each program at a later start.

Other work on the machine makes programs slower, never faster. So a run that takes clearly less than the kept cost
proves that wrong: something disturbed the machine when it was measured. The programs of a resolution were measured
together and are compared with each other, so all are timed again. The lower cost is kept: the machine may be disturbed
or throttled now, and so a run that takes more than the kept cost proves nothing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed
from xlaserve.engine.warmup.compiler import Timer
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.errors import ShuttingDown

log = logging.getLogger(__name__)

MARGIN: Final = 1.5
"""The factor by which a cost is proven too high: above noise (ADR 12), and below the factor by which one other program
on the same processors slows a run."""
WRONG: Final = (
    "model %s: the compile cache's cost of %s %s is %.1f times too high, as a run of %.2f ms shows; %s timed again"
)


def excess(cost: Cost, fastest_s: float, lanes: int) -> float:
    """Returns the factor by which a cost is too high, given the fastest run; above MARGIN it is proven wrong.

    With all lanes busy, a run takes no longer than one of each lane, one after the other.
    """
    return max(cost.alone_s, cost.loaded_s / lanes) / fastest_s


def corrected(
    programs: Mapping[tuple[Mode, Bucket], Warmed], timer: Timer, ledger: Ledger, lanes: int, stop: threading.Event
) -> dict[tuple[Mode, Bucket], Warmed]:
    """Returns the programs, timed again for each resolution where a kept cost is proven wrong.

    Blocks. Raises ShuttingDown once `stop` is set, and the errors of programs.
    """
    right = dict(programs)
    for size in dict.fromkeys(bucket[1:] for _, bucket in programs):
        alike = {key: one for key, one in programs.items() if key[1][1:] == size}
        factors = {key: excess(one.cost, one.fastest_s, lanes) for key, one in alike.items()}
        worst = max(factors, key=factors.__getitem__)
        if factors[worst] <= MARGIN:
            continue
        fastest_ms = alike[worst].fastest_s * 1000
        log.info(WRONG, ledger.model, *worst, factors[worst], fastest_ms, f"all programs at {size[0]}x{size[1]} are")
        for (mode, bucket), one in alike.items():
            if stop.is_set():
                raise ShuttingDown(f"model {ledger.model}: warm-up was stopped")
            cost = Cost(*map(min, one.cost, timer(one.executable, bucket)))
            one.keep_cost(cost)
            ledger.correct(mode, bucket, cost)
            right[mode, bucket] = replace(one, cost=cost, fastest_s=math.inf)
    return right
