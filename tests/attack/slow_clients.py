"""Clients that keep calls open: some send no message, some read no answer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from tests.attack import http2
from tests.attack.client import HEALTH, INFERENCE, PATIENCE_S, VISION
from tests.attack.connections import RECOVERS_S, check_serving, serving
from tests.attack.http2 import DATA, END_HEADERS, END_STREAM, HEADERS
from tests.attack.registry import OK, Round, attack

STREAMS: Final = 1024
"""Calls of one connection."""
CONNECTIONS: Final = 5
"""With so many, more calls than are admitted."""
ANSWERED: Final = (
    *(f"{INFERENCE}{method}" for method in ("ServerMetadata", "RepositoryIndex", "ModelStatistics", "ServerLive")),
    f"{VISION}ListModels",
    f"{HEALTH}Check",
    f"{HEALTH}Watch",
)
"""Methods that answer an empty message."""
PROBES: Final = (f"{HEALTH}Check", f"{INFERENCE}ServerLive", f"{INFERENCE}ServerReady")


@attack(allowed={OK, "refused"}, outage_s=RECOVERS_S)
def unread_answers(round: Round) -> None:
    """Clients with a window of no or a few bytes leave thousands of answers unread; others are served."""
    _hold(round, [path for path in ANSWERED if path not in PROBES], sends=True)


@attack(allowed={OK, "refused"}, outage_s=RECOVERS_S)
def calls_without_messages(round: Round) -> None:
    """Thousands of calls whose message never comes, or only its beginning; others are served."""
    _hold(round, [f"{INFERENCE}ModelInfer", f"{INFERENCE}ModelStreamInfer", *ANSWERED], sends=False)


def _hold(round: Round, paths: list[str], *, sends: bool) -> None:
    with serving(round) as client, ExitStack() as opened:
        for number in range(1 if round.is_short else CONNECTIONS):
            window = round.random.choice((0, 0, 1, 7))
            connection = opened.enter_context(http2.Connection(round.server.grpc, window=window))
            for stream in range(1, 2 * STREAMS, 2):
                data = http2.frame(HEADERS, END_HEADERS, stream, http2.headers(round.random.choice(paths)))
                if sends:
                    data += http2.frame(DATA, END_STREAM, stream, http2.message(b""))
                elif round.random.random() < 0.5:
                    data += http2.frame(
                        DATA, 0, stream, http2.message(bytes(10), length=round.random.randrange(11, 999))
                    )
                if not connection.send(data):
                    round.count("refused", f"connection {number}")
                    break
            round.count(OK, f"connection {number}")
        while round.has_time:
            if sends:  # else the probes may be among what is held
                for path in PROBES:
                    round.settle(client.send(path, b"", PATIENCE_S), path, allowed=frozenset({OK}))
            check_serving(round, client)
