"""`python -m tests.prove`: simulates runs, has loadtest analyse them, and prints what it claims and what is true."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable

from tests.prove.registry import PARTS, Row
from tests.prove.runner import run

ERRORS = 2.0
"""Standard errors by which a share may miss its limit: the simulation is a sample too."""


def main() -> int:
    """Returns 0 where every claim held."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=sorted(PARTS), metavar="NAME", help="may be repeated")
    parser.add_argument("--short", action="store_true", help="a fortieth of the runs, as the test suite does it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="show the parts and stop")
    options = parser.parse_args()
    if options.list:
        for part in PARTS.values():
            print(f"{part.name:24} {part.summary}")
        return 0
    began = time.monotonic()
    names = options.only or list(PARTS)
    rows = run(names, seed=options.seed, is_short=options.short, jobs=options.jobs)
    print(table((name, row) for name in names for row in rows[name]))
    print(f"\n{worst((name, row) for name in names for row in rows[name])}")
    print(f"\nseed {options.seed}, {time.monotonic() - began:.0f} s")
    return int(not all(row.passes(ERRORS) for found in rows.values() for row in found))


def table(rows: Iterable[tuple[str, Row]]) -> str:
    """Returns parts and rows as a table in Markdown, followed by how many claims held."""
    lines = ["| part | claim | scenario | claimed | measured | |", "|---|---|---|--:|--:|---|"]
    held = count = 0
    for name, row in rows:
        is_held = row.passes(ERRORS)
        held += is_held
        count += 1
        claimed = f"{'>=' if row.is_least else '<='} {row.limit:.4g}"
        measured = f"{row.measured:.4g}" + (f" ± {row.error:.1g}" if row.error else "")
        verdict = "holds" if is_held else "**FAILS**"
        lines.append(f"| {name} | {row.claim} | {row.scenario} | {claimed} | {measured} | {verdict} |")
    lines.append(f"\n{held} of {count} claims hold")
    return "\n".join(lines)


def worst(rows: Iterable[tuple[str, Row]]) -> str:
    """Returns the row of each claim that is nearest to its limit or furthest beyond, as a table in Markdown."""
    claims: dict[tuple[str, str, float], list[Row]] = {}
    for name, row in rows:
        claims.setdefault((name, row.claim, row.limit), []).append(row)
    lines = ["| part | claim | claimed | scenarios | worst | where |", "|---|---|--:|--:|--:|---|"]
    for (name, claim, limit), found in claims.items():
        row = min(found, key=lambda row: row.measured if row.is_least else -row.measured)
        claimed = f"{'>=' if row.is_least else '<='} {limit:.4g}"
        lines.append(f"| {name} | {claim} | {claimed} | {len(found)} | {row.measured:.4g} | {row.scenario} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
