from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.wire.grpc.context import address, deadline


@pytest.mark.parametrize(("remaining_s", "until"), [(None, float("inf")), (5.0, 6.0), (0.0, 1.0)])
def test_a_deadline_is_on_the_clock(remaining_s: float | None, until: float) -> None:
    context: Any = SimpleNamespace(time_remaining=lambda: remaining_s)
    assert deadline(context, lambda: 1.0) == until


@pytest.mark.parametrize(
    ("peer", "counted_as"),
    [
        ("ipv4:192.0.2.7:4711", "192.0.2.7"),
        ("ipv6:[::ffff:192.0.2.7]:4711", "192.0.2.7"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::/64"),
        ("unix:", ""),
        ("", ""),
    ],
)
def test_a_client_is_counted_by_its_address(peer: str, counted_as: str) -> None:
    context: Any = SimpleNamespace(peer=lambda: peer)
    assert address(context) == counted_as
