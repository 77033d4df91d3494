from __future__ import annotations

from collections.abc import Iterator

import pytest

from xlaserve.models.lowering import materialize


@pytest.fixture(scope="module")
def without_barriers() -> Iterator[None]:
    """Leaves out XLA's own barrier, so that nothing has to be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialize, "xla_optimization_barrier", lambda values: values)
        yield
