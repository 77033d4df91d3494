from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from xlaserve.config import Mode
from xlaserve.inspection.check.record import Checked, CheckedProgram, Environment


@pytest.fixture
def checked() -> Callable[..., Checked]:
    """Makes the record of a model of that name; anything about it can be said."""

    def make(name: str = "m", programs: Sequence[CheckedProgram] = (), **fields: Any) -> Checked:
        usual: dict[str, Any] = {
            "source": "builtin:noop",
            "modes": (Mode.EAGER, Mode.GRAPH, Mode.XLA),
            "batches": (1, 8),
            "at": "2026-11-21T12:00:00+00:00",
            "seconds": 3.0,
            "machine": Environment(device="CPU", cores=2, python="3.11", packages={"keras": "3"}),
        }
        return Checked(name=name, programs=tuple(programs), **{**usual, **fields})

    return make
