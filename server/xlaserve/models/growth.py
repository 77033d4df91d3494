"""Growth of a version that serves with its smallest buckets (`ready_when: first_bucket`): the others are added."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import replace

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.program import Sealed
from xlaserve.engine.warmup.auto_buckets import Programs
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.compiler import fastest
from xlaserve.errors import ModelFailed, ShuttingDown
from xlaserve.models.catalog import Model
from xlaserve.models.version import Served

log = logging.getLogger(__name__)


async def grow(
    served: Served, batcher: Batcher, buckets: Iterable[Bucket], programs: Programs, beside: BesideTraffic
) -> None:
    """Compiles the remaining `buckets` beside the traffic, the smallest first, and has each serve once it is there.

    `programs` are those that serve, each resolution's smallest bucket among them.
    """
    version, settings = served.version, served.settings
    known = {(mode, bucket[1:]): (bucket, warmed) for (mode, bucket), warmed in programs.items()}
    for bucket in sorted(buckets, key=math.prod):
        made = {}
        try:
            for mode in version.compiled_modes:
                try:
                    made[mode, bucket] = await beside.make(mode, bucket, known[mode, bucket[1:]])
                except ShuttingDown:
                    return
                except Exception as error:
                    version.leave_out(mode, error)
            if not made:
                raise ModelFailed("none of its modes compiled")
        except Exception:
            log.exception("model %s: %s did not compile; the other buckets serve in its place", version.title, bucket)
            continue
        if Mode.AUTO in settings.modes:
            ((_, mode),) = chosen = tuple(fastest(made).items())
            version.auto |= dict(chosen)
            made[Mode.AUTO, bucket] = made[mode, bucket]
        batcher.add(made)
    if not served.takes_unmatched:
        version.model = served.model = await asyncio.to_thread(sealed, served.model)
    log.info("model %s: all %d programs are there", version.title, len(version.ledger))


def sealed(model: Model) -> Model:
    """Returns the model without the parts that only compiling needs, as no more of it is compiled."""
    if isinstance(model.program, Sealed):
        model.program.seal()
    return replace(model, reference=None)
