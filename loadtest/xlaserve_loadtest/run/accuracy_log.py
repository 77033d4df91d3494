"""The outputs of every sample once, in the form of LoadGen's `mlperf_log_accuracy.json` (loadgen/logging.cc)."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from xlaserve_loadtest.files import naming
from xlaserve_loadtest.record.lines import SUFFIX
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array

LOG_SUFFIX: Final = ".mlperf_log_accuracy.json"


async def write_log(
    run_path: Path,
    arm: str,
    requests: Sequence[Request],
    ask: Callable[[str, int], Awaitable[Sequence[Sequence[Array]]]],
) -> Path:
    """Writes the outputs of an arm next to the run file, and returns the path. Raises TargetError.

    `ask` returns an arm's outputs for its first requests. `qsl_idx` is a sample's place among those that the run draws
    from (files of a folder by name), `data` the bytes of all of the sample's outputs, one after the other, in hex.
    """
    # Request i begins with sample i; after the last sample they start again.
    samples = len({request.data for request in requests})
    outputs = await ask(arm, samples)
    lines = [
        {"seq_id": index, "qsl_idx": index, "data": b"".join(np.asarray(one[0]).tobytes() for one in own).hex().upper()}
        for index, own in enumerate(outputs)
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", arm)
    path = run_path.with_name(f"{run_path.name.removesuffix(SUFFIX)}.{name}{LOG_SUFFIX}")
    with naming(path):
        path.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")
    return path
