"""Whether the load generator kept up, or a figure is its own rather than the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record.blocks import GeneratorUse, MachineUse

BUSY_LIMIT: Final = 0.8
LATE_LIMIT: Final = 0.01
WAIT_LIMIT: Final = 0.1
STEAL_LIMIT: Final = 0.05
OTHERS_LIMIT: Final = 0.05
"""Share of the machine's processor time from which on other processes are told of."""


@dataclass(frozen=True, slots=True)
class GeneratorFigures:
    """Figures of the load generator."""

    workers: int
    """Most workers of any block."""
    cpu_ms_per_request: float | None
    busy: float | None
    """Share of its measured ceiling, in its busiest block; None where that is not known."""
    own_ms: float | None
    """Latency of one request at a time to a server on its machine that does nothing; None where not measured."""
    sends: int
    late_sends: int
    late_share: float
    """Of the generator with the most, where there are several."""
    wait_ms: float | None
    """Mean time that an answer waited until the generator came to it; None in older files."""
    steal: float | None
    """Share of the machine's processor time that its hypervisor gave to others."""
    limits: tuple[str, ...]
    """Why the result is the generator's rather than the target's, in words; empty where it kept up."""
    others: float | None = None
    """Share of the machine's processor time that processes other than the load test and its server used; None where
    that can't be told."""

    @property
    def is_disturbed(self) -> bool:
        """Whether others used enough of the machine to change figures."""
        return self.others is not None and self.others > OTHERS_LIMIT

    @property
    def is_limited(self) -> bool:
        """Whether the generator did not keep up, or was kept from it."""
        return bool(self.limits)


def figures(samples: Sequence[Sample]) -> GeneratorFigures:
    """Sums up the generator's part in the blocks of one arm and load."""
    own = [sample.block.generator for sample in samples]
    busy = max((one.busy for one in own if one.busy is not None), default=None)
    sends, late = sum(one.sends for one in own), sum(one.late_sends for one in own)
    machines: dict[str, list[MachineUse]] = {}
    for machine in (machine for one in own for machine in one.machines):
        machines.setdefault(machine.generator, []).append(machine)
    # Where one of several generators is late, others that are not must not hide it.
    late_share = max(map(_late_share, machines.values()), default=_late_share(own))
    wait_ms, steal = _mean(own, (one.wait_ms for one in own)), _mean(own, (one.steal for one in own))
    answers = sum(sample.latencies_ns.size for sample in samples)
    mean_ms = sum(int(sample.latencies_ns.sum()) for sample in samples) / answers / 1e6 if answers else None
    limits = []
    if busy is not None and busy > 1:
        limits.append(f"it sent {busy:.3g} times what was measured before the run as its most{_meanwhile(own)}")
    elif busy is not None and busy > BUSY_LIMIT:
        limits.append(f"it was {busy:.0%} busy (limit {BUSY_LIMIT:.0%})")
    if late_share > LATE_LIMIT:
        limits.append(f"{late_share:.1%} of sends were late (limit {LATE_LIMIT:.0%})")
    if wait_ms is not None and mean_ms is not None and wait_ms > WAIT_LIMIT * mean_ms:
        limits.append(f"answers waited {two_digits(wait_ms)} ms for it (limit {WAIT_LIMIT:.0%} of the mean latency)")
    if steal is not None and steal > STEAL_LIMIT:
        limits.append(f"the hypervisor gave {steal:.0%} of the processors to others (limit {STEAL_LIMIT:.0%})")
    requests = sum(sample.rows.size for sample in samples)
    return GeneratorFigures(
        workers=max(one.workers for one in own),
        cpu_ms_per_request=sum(one.cpu_s for one in own) * 1000 / requests if requests else None,
        busy=busy,
        own_ms=max((one.own_ms for one in own if one.own_ms is not None), default=None),
        sends=sends,
        late_sends=late,
        late_share=late_share,
        wait_ms=wait_ms,
        steal=steal,
        limits=tuple(limits),
        others=_mean(own, (one.others for one in own)),
    )


def _meanwhile(blocks: Sequence[GeneratorUse]) -> str:
    """Returns that the machine was busy when the ceiling was measured, where it was."""
    others = max((block.ceiling_others for block in blocks if block.ceiling_others is not None), default=0.0)
    return f", while others used {others:.0%} of the processors" if others > OTHERS_LIMIT else ""


def _late_share(uses: Sequence[GeneratorUse | MachineUse]) -> float:
    sends = sum(use.sends for use in uses)
    return sum(use.late_sends for use in uses) / sends if sends else 0.0


def _mean(blocks: Sequence[GeneratorUse], values: Iterable[float | None]) -> float | None:
    """Returns the mean over blocks by their sends; None where a block does not say."""
    known = [(block.sends, value) for block, value in zip(blocks, values, strict=True) if value is not None]
    sends = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / sends if sends and len(known) == len(blocks) else None


def two_digits(value: float) -> str:
    """Returns a number in its two first digits, or as a whole one, without an exponent."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
