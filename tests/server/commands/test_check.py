"""What `xlaserve check` checks of a configured model."""

from __future__ import annotations

from typing import Any

import pytest

from xlaserve.commands import check
from xlaserve.config import BucketSettings, Mode, ModelSettings

SIZED = BucketSettings(1, 32, 48)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, (None, None)),
        ({"buckets": (BucketSettings(1), BucketSettings(8))}, (None, None)),
        ({"resolutions": ((16, 24), (32, 32))}, (16, 24)),
        ({"resolutions": ((16, 24),), "buckets": (BucketSettings(1),)}, (16, 24)),
        ({"buckets": (SIZED,)}, (32, 48)),
    ],
)
def test_a_model_is_checked_at_its_first_resolution(
    fields: dict[str, Any], size: tuple[int | None, int | None]
) -> None:
    model = ModelSettings(**{"name": "mine", "source": "builtin:digits", **fields})
    checked = check._with(model, (Mode.XLA,), (1, 8))
    assert checked.buckets == (BucketSettings(1, *size), BucketSettings(8, *size))
