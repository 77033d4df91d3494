from __future__ import annotations

from typing import Any, cast

import pytest

from xlaserve.models.networks.network import Network
from xlaserve.models.task import Classification


@pytest.mark.parametrize(
    ("lowerings", "names"),
    [("", []), ("stem 1", ["stem"]), ("depth-wise 17, two words 2", ["depth-wise", "two words"])],
)
def test_names_of_lowerings_may_be_any(lowerings: str, names: list[str]) -> None:
    network = Network(cast(Any, None), (None, None), Classification(3), "random", lowerings)
    assert network.lowering_names == names
