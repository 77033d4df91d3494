"""HAProxy's configuration for the servers of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

HEAD: Final = """\
# Written by `xlaserve-fleet follow`; it is written again whenever the servers change.
# It has no section `global`: give it to HAProxy after a file of your own, -f haproxy.cfg -f this.cfg.
defaults
    mode http
    balance leastconn
    option redispatch
    retries 2
    retry-on conn-failure
    timeout connect 2s
    timeout client 10m
    timeout server 10m
    option httpchk GET /v2/health/ready
    default-server check inter 1s fall 2 rise 1
"""


def configuration(servers: Sequence[Mapping[str, str]], grpc_port: int, http_port: int) -> str:
    """Returns the configuration for `servers`, with `address`, `http` and `id` each.

    It stands beside a configuration that is there: it relies on nothing in that, and its names begin with `xlaserve_`.
    Both ports take requests in the clear, gRPC as HTTP/2 without TLS; each goes to the server with the fewest. Health
    is asked of the HTTP port.
    """
    grpc = [
        f"server {one['id']} {one['address']} proto h2 check port {_port(one['http'])} check-proto h1"
        for one in servers
    ]
    http = [f"server {one['id']} {one['http']}" for one in servers]
    return "\n".join(
        (
            HEAD,
            *_section("frontend xlaserve_grpc", f"bind :{grpc_port} proto h2", "default_backend xlaserve_grpc"),
            *_section("backend xlaserve_grpc", *grpc),
            *_section("frontend xlaserve_http", f"bind :{http_port}", "default_backend xlaserve_http"),
            *_section("backend xlaserve_http", *http),
        )
    )


def _section(title: str, *lines: str) -> list[str]:
    return [title, *(f"    {line}" for line in lines), ""]


def _port(address: str) -> str:
    return address.rpartition(":")[2]
