"""Output tensors as JSON lists them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from xlaserve.errors import InvalidArgument
from xlaserve.wire.http import json_numbers, json_tensors
from xlaserve.wire.http.json_tensors import STEP_VALUES, JsonInput, JsonListing
from xlaserve.wire.http.message import separated, to_json


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


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 3 * STEP_VALUES), (2, 3, STEP_VALUES + 1), (3, STEP_VALUES // 2, 2), (1, 0, STEP_VALUES + 1), (1, 9, 0)],
)
def test_large_outputs_are_listed_in_steps_of_a_few_milliseconds(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], is_nested: bool
) -> None:
    def counted(value: object) -> bytes:
        most.append(np.size(np.array(value)))
        return to_json(value)

    most: list[int] = []
    monkeypatch.setattr(json_tensors, "to_json", counted)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    values[values == 1] = np.nan
    expected = np.where(np.isnan(values), None, values)  # type: ignore[call-overload] # objects
    (part,) = JsonListing(is_nested).numbers(values) or [b""]
    assert json.loads(b"[%b]" % bytes(part)) == (expected if is_nested else expected.reshape(-1)).tolist()
    assert max(most, default=0) <= STEP_VALUES


@pytest.mark.parametrize("data", [[7] * 5000, [[7] * 1000, [7] * 1000]], ids=["flat", "nested"])
def test_numbers_are_counted_before_they_are_read(data: object, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = {"name": "counts", "datatype": "INT32", "shape": [1, 4], "data": data}
    sent = JsonInput(json_numbers.loads(json.dumps(tensor).encode()), None)
    monkeypatch.delattr(json_numbers.NumberArray, "__array__")
    with pytest.raises(InvalidArgument, match=r"got (5000|2000) values"):
        sent.numbers((1, 4), np.dtype(np.int32))
    with pytest.raises(InvalidArgument, match=r"got (5000|2000) values"):
        sent.values((1, 4))


@pytest.mark.parametrize("number", ["1e39", "-1e39", "1e400"])
@pytest.mark.parametrize("count", [2, 3000])
def test_numbers_that_the_type_of_an_input_does_not_hold_are_refused(number: str, count: int) -> None:
    data = ",".join([number, *["1.5"] * (count - 1)])
    tensor = f'{{"name": "x", "datatype": "FP32", "shape": [1, {count}], "data": [{data}]}}'
    sent = JsonInput(json_numbers.loads(tensor.encode()), None)
    with pytest.raises(InvalidArgument) as refused:
        sent.numbers((1, count), np.dtype(np.float32))
    assert refused.value.field == "data of x"
