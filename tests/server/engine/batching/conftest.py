from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.server.engine.batching.served_model import Make, Model

from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs


@pytest.fixture
def make(echo: Callable[[Images], Outputs], pictures: Callable[[Iterable[int]], Images]) -> Make:
    """Makes a `Model`, one lane unless told otherwise."""
    models = []

    def make_model(**options: Any) -> Model:
        models.append(Model(echo, pictures, **options))
        return models[-1]

    return make_model
