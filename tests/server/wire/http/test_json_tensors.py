"""Output tensors as JSON lists them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from xlaserve.wire.http.json_tensors import JsonListing
from xlaserve.wire.http.message import separated


@pytest.mark.parametrize("shape", [(3, 2), (3, 0), (3, 0, 2), (3,)])
def test_rows_that_were_listed_apart_are_one_list(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    listing = JsonListing()
    parts = [part for row in range(3) for part in listing.numbers(values[row : row + 1])]
    assert json.loads(b"[%b]" % b"".join(separated(parts))) == values.reshape(-1).tolist()
    assert json.loads(b"[%b]" % b"".join(listing.numbers(values))) == values.reshape(-1).tolist()


@pytest.mark.parametrize("shape", [(3, 2), (3, 0), (3, 0, 2), (3,)])
def test_each_row_is_a_list_of_its_own_where_lists_are_nested(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = [part for row in values[:, np.newaxis] for part in JsonListing(is_nested=True).numbers(row)]
    assert json.loads(b"[%b]" % b"".join(separated(parts))) == values.tolist()
