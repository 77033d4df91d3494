"""The attacks of `make attack`, each for a moment: nothing is lost and nothing wrong."""

from __future__ import annotations

from tests.attack.__main__ import table
from tests.attack.registry import ATTACKS
from tests.attack.runner import run

SECONDS = 12.0
SEED = 20_261


def test_nothing_is_lost_and_nothing_wrong_under_any_attack() -> None:
    names = [name for name, attack in ATTACKS.items() if attack.is_short]
    tallies = run(names, seed=SEED, seconds=SECONDS, is_short=True)
    assert tallies.keys() == {*names, "the end"}
    assert not any(tally.fault_count or tally.lost for tally in tallies.values()), table(tallies)
