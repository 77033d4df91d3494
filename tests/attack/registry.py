"""What an attack is, and what it accounts for."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tests.attack.client import LOST, Call, leak
from tests.attack.server import Server

MAX_FAULTS: Final = 8
"""Faults that are kept of one attack; they tend to be alike."""
MIN_TRIES: Final = 3
"""Tries of an attack at least, however little time there is."""
OK: Final = "OK"
REFUSED: Final = frozenset({OK, "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION"})
"""How a request that may be wrong may end."""
BUSY: Final = frozenset({OK, "RESOURCE_EXHAUSTED"})
"""How a valid request may end on a server that is flooded."""
LOADS_S: Final = 150.0
"""The longest time that a load may take on a busy machine, with the load before it, in seconds."""

Site = Literal["shared", "sizes", "own"]


@dataclass
class Tally:
    """What an attack tried and what came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Calls, connections or anything else that was accounted for."""
        return self.outcomes.total()

    @property
    def lost(self) -> int:
        """Those that never settled."""
        return self.outcomes[LOST]

    def fault(self, text: str) -> None:
        """Notes a fault."""
        self.fault_count += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(text)


class Round:
    """One run of one attack: its random numbers, its time, its servers and its tally."""

    def __init__(
        self,
        attack: Attack,
        *,
        seed: int,
        seconds: float,
        is_short: bool,
        shared: Server | None,
        folder: Path,
        fronts: int = 0,
    ) -> None:
        self.attack = attack
        self.random = random.Random(f"{seed} {attack.name}")
        self.is_short = is_short
        self.folder = folder
        self.tally = Tally()
        self._ends_at = time.monotonic() + seconds
        self.shared = shared
        self.fronts = fronts
        folder.mkdir(exist_ok=True)
        self._started: list[Server] = []
        self._asked = 0

    @property
    def server(self) -> Server:
        """The shared server."""
        assert self.shared is not None, "an attack with servers of its own starts them"
        return self.shared

    @property
    def has_shapes(self) -> bool:
        """Whether the shared server has the models that find shapes."""
        return not self.is_short

    @property
    def has_time(self) -> bool:
        """Whether the attack should go on; it begins in any case."""
        self._asked += 1
        return self._asked <= MIN_TRIES or time.monotonic() < self._ends_at

    @property
    def started(self) -> Iterable[Server]:
        """The servers that the attack started itself."""
        return self._started

    def start(self, config: Mapping[str, Any], **options: Any) -> Server:
        """Starts a server of the attack's own, which need not be ready yet, and which ends with the attack."""
        server = Server(config, self.folder / f"server{len(self._started)}", fronts=self.fronts, **options)
        self._started.append(server)
        return server

    def count(self, outcome: str, what: str, allowed: frozenset[str] | None = None, wrong: str | None = None) -> None:
        """Accounts for one try: its outcome must be one of those `allowed`, and nothing may be `wrong` with it."""
        self.tally.outcomes[outcome] += 1
        allowed = self.attack.allowed if allowed is None else allowed
        if outcome not in allowed:
            self.tally.fault(f"{what}: expected one of {', '.join(sorted(allowed))}, got {outcome}")
        elif wrong:
            self.tally.fault(f"{what}: {wrong}")

    def settle(
        self,
        call: Call,
        what: str,
        *,
        allowed: frozenset[str] | None = None,
        check: Callable[[bytes], str | None] | None = None,
    ) -> str:
        """Waits for a call, accounts for it, and returns its outcome; an answer must pass `check`."""
        outcome, response, details = call.outcome()
        wrong = check(response) if check and outcome == OK else leak(details)
        text = f"{what} ({details[:200]})" if details else what
        self.count(outcome, text, allowed, wrong)
        return outcome

    def end(self) -> None:
        """Ends the attack's own servers, however they are."""
        for server in self._started:
            if server.is_alive:
                server.kill()


@dataclass(frozen=True)
class Attack:
    """An attack, by its name."""

    name: str
    run: Callable[[Round], None]
    allowed: frozenset[str]
    """Outcomes that each try may have, unless the attack says otherwise of a try."""
    site: Site
    """What it runs against: the server that several share, the one of several resolutions, or its own."""
    weight: float
    """Its share of the time."""
    is_short: bool
    """Whether it belongs to the short form."""
    most_mib: int
    """By how much the server's resident memory may grow at most while it runs."""
    expects: tuple[str, ...]
    """Texts of errors that it should bring into the log."""
    outage_s: float
    """How long the server may be away after a call of it; 0 where never."""

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


ATTACKS: Final[dict[str, Attack]] = {}


def attack(
    *,
    allowed: Iterable[str],
    site: Site = "shared",
    weight: float = 1.0,
    is_short: bool = True,
    most_mib: int = 768,
    expects: str | tuple[str, ...] = (),
    outage_s: float = 0.0,
) -> Callable[[Callable[[Round], None]], Callable[[Round], None]]:
    """Registers a function as an attack of its name."""

    def register(run: Callable[[Round], None]) -> Callable[[Round], None]:
        name = run.__name__.replace("_", "-")
        texts = (expects,) if isinstance(expects, str) else expects
        ATTACKS[name] = Attack(name, run, frozenset(allowed), site, weight, is_short, most_mib, texts, outage_s)
        return run

    return register
