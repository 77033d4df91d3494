from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.rpc.context import deadline


@pytest.mark.parametrize(("remaining_s", "until"), [(None, float("inf")), (5.0, 6.0), (0.0, 1.0)])
def test_a_deadline_is_on_the_clock(remaining_s: float | None, until: float) -> None:
    context: Any = SimpleNamespace(time_remaining=lambda: remaining_s)
    assert deadline(context, lambda: 1.0) == until
