from __future__ import annotations

import pytest

from xlaserve_loadtest.run import environment


def test_what_is_recorded_of_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLASERVE_COMPILE_CACHE")
    monkeypatch.setenv("XLASERVE_TOKEN", "xla_secret")
    monkeypatch.setenv("XLASERVE_TLS_KEY", "key.pem")
    monkeypatch.setenv("XLASERVE_LANES", "2")
    assert {name: value for name, value in environment.describe().flags.items() if name.startswith("XLASERVE_")} == {
        "XLASERVE_LANES": "2"
    }
