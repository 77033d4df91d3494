"""Simulated comparisons of arms whose true ratio is known, in the shape of a run: for tests of verdicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tests.loadtest.run_files import CLOSED, ENVIRONMENT

from xlaserve_loadtest.analysis.compare import Comparison, compare
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record.blocks import BlockLine, GeneratorUse
from xlaserve_loadtest.record.lines import Arm, Header
from xlaserve_loadtest.record.requests import REQUEST

ARMS = (
    Arm("xla", "xla", "digits", "embedded"),
    Arm("graph", "graph", "digits", "embedded"),
    Arm("graph again", "graph", "digits", "embedded", is_control_of="graph"),
)


@dataclass(frozen=True)
class Simulated:
    """Noise is the standard deviation of a logarithm: of a process for its whole life, of a block, of a latency."""

    processes: int = 4
    """Server processes of each arm, one after the other."""
    rounds: int = 1
    """Mirrored rounds of each process: two blocks for each arm."""
    between_processes: float = 0.03
    within_process: float = 0.01
    within_block: float = 0.1
    ratio: float = 1.0
    """True images/s of xla over those of graph mode."""
    modes: float = 0.0
    """Half of xla's processes are faster by this share and half slower, so that their mean is that of equal arms."""
    control_shares_process: bool = False
    """The control is a second pass over the baseline's own process."""
    requests: int = 100

    def compare(self, seed: int) -> dict[str, Comparison]:
        """Returns the comparison of each arm in one simulated run."""
        header = Header("2026-01-02T03:04:05+00:00", ("loadtest",), {}, seed, None, "graph", ARMS, ENVIRONMENT)
        return {found.arm: found for found in compare(header, self.run(np.random.default_rng(seed)))}

    def run(self, random: np.random.Generator) -> list[Sample]:
        """Returns the blocks of one simulated run."""
        samples: list[Sample] = []
        for process in range(self.processes):
            speeds = dict(
                zip(("xla", "graph", "graph again"), random.normal(0, self.between_processes, 3), strict=True)
            )
            servers = {arm: 3 * process + place for place, arm in enumerate(speeds)}
            speeds["xla"] += np.log(self.ratio)
            if self.modes:
                speeds["xla"] += np.log1p(random.choice([-1, 1]) * self.modes)
            if self.control_shares_process:
                speeds["graph again"], servers["graph again"] = speeds["graph"], servers["graph"]
            for turn in range(self.rounds):
                order = list(random.permutation(list(speeds)))
                for arm in order + order[::-1]:
                    speed = speeds[arm] + random.normal(0, self.within_process)
                    samples.append(self._block(random, arm, speed, servers[arm], process * self.rounds + turn))
        return samples

    def _block(self, random: np.random.Generator, arm: str, log_speed: float, server: int, turn: int) -> Sample:
        rows = np.zeros(self.requests, REQUEST)
        rows["measured"], rows["images"] = True, 1
        latencies = 10e6 * np.exp(random.normal(0, self.within_block, self.requests) - log_speed)
        rows["end_ns"] = latencies.astype(np.int64)
        use = GeneratorUse(workers=1, cpu_s=0.1, sends=self.requests)
        window_ns = (0, int(latencies.max()) + 1)
        return Sample(
            BlockLine(0, arm, CLOSED, 0, window_ns[1], use, server=server, window_ns=window_ns, round=turn), rows
        )
