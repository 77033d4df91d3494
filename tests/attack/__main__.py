"""`python -m tests.attack`: attacks real servers, and accounts for every call."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.attack.registry import ATTACKS, Tally
from tests.attack.runner import run

SECONDS = 400.0
"""With the starts of servers that come on top, less than ten minutes."""


def main() -> int:
    """Returns 0 where nothing was lost and nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--seed", type=int, help="of all random numbers; printed, and another one each time by default")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for all attacks together (default: %(default)g)"
    )
    parser.add_argument("--fronts", type=int, default=0, metavar="N", help="attack servers of N fronts and an engine")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), metavar="NAME", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="show the attacks and stop")
    options = parser.parse_args()
    if options.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:32} {attack.summary}")
        return 0
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.seconds:g} s, fronts {options.fronts}", flush=True)
    began = time.monotonic()
    tallies = run(
        options.only or list(ATTACKS),
        seed=seed,
        seconds=options.seconds,
        fronts=options.fronts,
        say=lambda text: print(text, flush=True),
    )
    print(f"\n{table(tallies)}\n\nseed {seed}, {time.monotonic() - began:.0f} s")
    return int(any(tally.fault_count or tally.lost for tally in tallies.values()))


def table(tallies: dict[str, Tally]) -> str:
    """Returns what was tried, what came of it, and what was lost."""
    lines = [f"{'attack':32} {'tried':>8} {'lost':>6} {'faults':>7}  outcomes"]
    for name, tally in tallies.items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.most_common())
        lines.append(f"{name:32} {tally.tried:8} {tally.lost:6} {tally.fault_count:7}  {outcomes}")
    lost = sum(tally.lost for tally in tallies.values())
    faults = sum(tally.fault_count for tally in tallies.values())
    tried = sum(tally.tried for tally in tallies.values())
    lines.append(f"{tried} tried; lost: {lost or 'nothing'}; wrong: {faults or 'nothing'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
