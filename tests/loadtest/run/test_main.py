from __future__ import annotations

import pytest

from xlaserve_loadtest import __main__ as entry
from xlaserve_loadtest import cli


def test_ctrl_c_outside_of_a_run_is_a_status_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    assert entry.main() == 130
