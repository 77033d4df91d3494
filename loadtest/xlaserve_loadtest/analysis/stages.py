"""Where a request's time went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xlaserve_loadtest.analysis.samples import latencies_ns
from xlaserve_loadtest.record.lines import STAGES, Rows


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the mean latency."""

    name: str
    """send (from due to sent), network, decode, queue, gather, execute, encode, or other (in the server)."""
    mean_ms: float
    share: float
    """Share of the mean latency."""


def split(answered: Rows) -> tuple[Stage, ...]:
    """Splits the mean latency of `answered` into stages; empty where the server did not report its total.

    `network` is the client's time less the server's total: gRPC on both sides and the network between them.
    """
    reported = answered[~np.isnan(answered["total_s"])]
    if not reported.size:
        return ()
    latency_ms = float(latencies_ns(reported).mean()) / 1e6
    send_ms = float((reported["start_ns"] - reported["scheduled_ns"]).mean()) / 1e6
    total_ms = float(reported["total_s"].mean(dtype=np.float64)) * 1e3
    inside_ms = {
        # A stage that a request did not pass took no time.
        stage.removesuffix("_s"): float(np.nan_to_num(reported[stage]).mean(dtype=np.float64)) * 1e3
        for stage in STAGES
        if stage != "total_s" and not np.isnan(reported[stage]).all()
    }
    parts_ms = {
        "send": send_ms,
        "network": max(latency_ms - send_ms - total_ms, 0.0),
        **inside_ms,
        "other": max(total_ms - sum(inside_ms.values()), 0.0),
    }
    return tuple(Stage(name, mean, mean / latency_ms if latency_ms else 0.0) for name, mean in parts_ms.items())
