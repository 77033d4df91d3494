"""The first call to a server, as its log tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlaserve.config import ModelSettings, Settings
from xlaserve.processes.first_call import DEFAULT_TARGET, first_call
from xlaserve_client import connection

MODELS = (ModelSettings(name="cats", source="builtin:noop"), ModelSettings(name="dogs", source="builtin:noop"))


@pytest.mark.parametrize(
    ("settings", "addresses", "says"),
    [
        (
            {},
            {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"},
            "try it: http://127.0.0.1:8000/ or xlaserve-client run cats IMAGE",
        ),
        (
            {"host": "0.0.0.0"},
            {"http": "0.0.0.0:80", "grpc": "0.0.0.0:9001"},
            "try it: http://127.0.0.1:80/ or xlaserve-client run --target 127.0.0.1:9001 cats IMAGE",
        ),
        (
            {"host": "::"},
            {"http": "[::]:80", "grpc": "[::]:81"},
            "try it: http://[::1]:80/ or xlaserve-client run --target [::1]:81 cats IMAGE",
        ),
        (
            {"tls_certificate": Path("a.pem"), "tls_key": Path("b.pem")},
            {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"},
            "try it: https://127.0.0.1:8000/ or xlaserve-client run --tls cats IMAGE",
        ),
        (
            {"access": Path("access.yaml")},
            {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"},
            "try it: http://127.0.0.1:8000/",
        ),
    ],
)
def test_the_first_call_can_be_typed_as_it_is_shown(
    settings: dict[str, object], addresses: dict[str, str | None], says: str
) -> None:
    assert first_call(Settings(models=MODELS, **settings), addresses) == says


def test_the_target_that_is_left_out_is_the_clients_own() -> None:
    assert DEFAULT_TARGET == connection.DEFAULT_TARGET
