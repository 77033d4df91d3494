"""The attacks of `make attack`, each for a moment: nothing is lost and nothing wrong."""

from __future__ import annotations

from functools import partial

import grpc
import pytest
from tests.attack import http2
from tests.attack.__main__ import table
from tests.attack.registry import ATTACKS
from tests.attack.runner import run
from tests.integration.conftest import Connect, StartServer

SECONDS = 12.0
SEED = 20_261


@pytest.mark.parametrize("fronts", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_is_lost_and_nothing_wrong_under_any_attack(fronts: int) -> None:
    names = [name for name, attack in ATTACKS.items() if attack.is_short]
    tallies = run(names, seed=SEED, seconds=SECONDS, is_short=True, fronts=fronts)
    assert tallies.keys() == {*names, "the end"}
    assert not any(tally.fault_count or tally.lost for tally in tallies.values()), table(tallies)


def test_a_path_that_is_no_text_ends_grpc_for_a_moment_only(start_server: StartServer, connect: Connect) -> None:
    server = start_server({"models": [{"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}]})
    assert connect(server).ask(7) is grpc.StatusCode.OK

    def has_listened_again(times: int) -> bool:
        return server.stderr.count("listening again") == times

    for count in range(1, 4):
        path = b"/a\xff/b"
        block = http2.headers("/PATH").replace(b"\x05/PATH", bytes([len(path)]) + path)
        with http2.Connection(server.grpc) as connection:
            connection.send(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block))
            connection.send(http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(b"")))
            # While the connection stays open: the outage must not last as long as the attacker likes.
            server.wait_for(partial(has_listened_again, count), "it went on", timeout_s=10)
        server.wait_for(lambda: connect(server).ask(7) is grpc.StatusCode.OK, "it served no more", timeout_s=20)
    assert "ERROR" not in server.stderr
    assert "Traceback" not in server.stderr
    assert server.stop() == 0
