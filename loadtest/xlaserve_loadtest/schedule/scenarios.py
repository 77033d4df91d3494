"""MLPerf Inference's four scenarios by name: the load that each of them means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Name = Literal["single-stream", "multi-stream", "server", "offline"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """How queries come, and what is reported."""

    name: Name
    images_per_request: int | None
    """Samples of a query; None: the largest bucket, as one query of everything is sent in pieces."""
    percentile: float | None
    metric: str


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario("single-stream", 1, 90.0, "p90 latency of queries of one image, each sent when the last is answered"),
        Scenario("multi-stream", 8, 99.0, "p99 latency of queries of 8 images, each sent when the last is answered"),
        Scenario("server", 1, 99.0, "the highest rate of Poisson arrivals whose p99 stays under the limit"),
        Scenario("offline", None, None, "images per second with everything due at once"),
    )
}
