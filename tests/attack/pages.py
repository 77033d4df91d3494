"""Web pages that call a server which is not theirs, by a name of their own or from another origin."""

from __future__ import annotations

from typing import Final

from tests.attack.connections import check_serving, serving
from tests.attack.http_bombs import LIVE, answers_to
from tests.attack.http_requests import CLASSIFY, DIGITS
from tests.attack.registry import OK, Round, attack

PAGE: Final = "https://page.example"
"""An origin whose pages may call."""
OTHERS: Final = ("https://other.example", "http://page.example", "https://page.example:444", "null", f"{PAGE}.evil")


@attack(allowed={"403"})
def requests_for_other_hosts(round: Round) -> None:
    """Requests that a page would send whose own name leads to this machine: refused at each path of both ports."""
    names = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000", "xlaserve")
    paths = ("/", "/v1/status", "/v2", LIVE, "/metrics", "/docs", "/none", "/healthz")
    with serving(round) as client:
        while round.has_time:
            address = round.random.choice((round.server.http, round.server.metrics))
            path, name = round.random.choice(paths), round.random.choice(names)
            for host, allowed in ((name, None), (round.random.choice((address, "localhost")), frozenset({OK, "404"}))):
                said = answers_to(address, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                round.count(said[9:12].decode().replace("200", OK), f"{path} of {host}", allowed)
        check_serving(round, client)


@attack(allowed={OK, "400"})
def preflights(round: Round) -> None:
    """Browsers' questions before a page sends: pages of a named origin may, to a private network too, and no others."""
    rng = round.random
    with serving(round) as client:
        while round.has_time:
            path, method = rng.choice((LIVE, CLASSIFY, DIGITS, "/v1/status")), rng.choice(("GET", "POST"))
            is_private = rng.random() < 0.5
            for origin in (PAGE, rng.choice(OTHERS)):
                lines = [
                    f"OPTIONS {path} HTTP/1.1",
                    "Host: localhost",
                    "Connection: close",
                    f"Origin: {origin}",
                    f"Access-Control-Request-Method: {method}",
                    "Access-Control-Request-Headers: authorization,content-type",
                    *(["Access-Control-Request-Private-Network: true"] if is_private else []),
                ]
                said = answers_to(round.server.http, "\r\n".join((*lines, "", "")).encode())
                status = said[9:12].decode().replace("200", OK)
                head = said.lower()
                may = f"access-control-allow-origin: {origin}".encode() in head
                may_private = b"access-control-allow-private-network: true" in head
                # Of a page that may not, a browser reads nothing else.
                is_right = (may, may_private) == (True, is_private) if origin == PAGE else not may
                allowed = frozenset({OK if origin == PAGE else "400"})
                what = f"a page of {origin} before {method} {path}"
                round.count(status, what, allowed, None if is_right else repr(said[:400]))
        check_serving(round, client)
