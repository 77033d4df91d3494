"""Where a request's time went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xlaserve_loadtest.analysis.samples import latencies_ns
from xlaserve_loadtest.record.requests import STAGES, Rows


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the mean latency."""

    name: str
    """send (due to sent), client, unaccounted, decode, queue, gather, execute, encode, or other (in the server)."""
    mean_ms: float
    share: float
    """Share of the mean latency."""


def split(answered: Rows, client_ms: float | None = None) -> tuple[Stage, ...]:
    """Splits the mean latency of `answered` into stages; empty where the server did not report its total.

    What the server's total leaves of the time from sent to answered is `client`, up to `client_ms`: CPU time of the
    generator for a request. The rest is `unaccounted`: kernels, the network, and queues of gRPC on both sides, the
    server's before its own clock starts included. Neither side can tell these apart.
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
    outside_ms = max(latency_ms - send_ms - total_ms, 0.0)
    parts_ms = {
        "send": send_ms,
        **({} if client_ms is None else {"client": min(client_ms, outside_ms)}),
        "unaccounted": outside_ms - min(client_ms or 0.0, outside_ms),
        **inside_ms,
        "other": max(total_ms - sum(inside_ms.values()), 0.0),
    }
    return tuple(Stage(name, mean, mean / latency_ms if latency_ms else 0.0) for name, mean in parts_ms.items())
