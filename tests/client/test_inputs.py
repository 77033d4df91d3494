from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.client.conftest import Puppet

from xlaserve_client import AsyncVisionClient, InvalidRequest, ModelNotFound, VisionClient

PHOTO = np.full((2, 4, 5, 3), 3, np.uint8)
GIVEN: Mapping[str, Any] = {"photo": PHOTO, "numbers": [[1, 2.5], [3, 4]], "place": [5, 6]}


@pytest.fixture
def client(puppet: Puppet) -> Iterator[VisionClient]:
    with VisionClient(puppet.target, deadline_s=5) as client:
        yield client


def sent(puppet: Puppet) -> dict[str, tuple[str, list[int], bytes]]:
    """The datatype, shape and contents of each input of the last request."""
    request = puppet.seen[-1]
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def test_inputs_are_sent_in_the_types_of_the_metadata(client: VisionClient, puppet: Puppet) -> None:
    result = client.infer(inputs=GIVEN, model="pets", mode="graph")
    assert result.mode == "graph"
    np.testing.assert_array_equal(result.scores.argmax(axis=1), [3, 3])
    assert sent(puppet) == {
        "photo": ("UINT8", [2, 4, 5, 3], PHOTO.tobytes()),
        "numbers": ("FP32", [2, 2], np.array([1, 2.5, 3, 4], "<f4").tobytes()),
        "place": ("INT32", [2, 1], np.array([5, 6], "<i4").tobytes()),
    }


def test_arrays_without_the_batch_are_one_row(client: VisionClient, puppet: Puppet) -> None:
    client.infer(inputs={"place": 2, "photo": PHOTO[0], "numbers": np.ones(2, np.float16)}, model="pets")
    assert {name: shape for name, (_, shape, _) in sent(puppet).items()} == {
        "photo": [1, 4, 5, 3],
        "numbers": [1, 2],
        "place": [1, 1],
    }


def test_images_are_sent_encoded_beside_arrays(client: VisionClient, puppet: Puppet, tmp_path: Path) -> None:
    path = tmp_path / "two.png"
    path.write_bytes(b"\x02png")
    for photo in (path, str(path), b"\x02png", [path]):
        result = client.infer(inputs={"photo": photo, "numbers": [1, 2], "place": 0}, model="pets")
        assert result.scores.argmax() == 2
        assert sent(puppet)["photo"] == ("BYTES", [1], b"\x04\x00\x00\x00\x02png")


async def test_the_asyncio_client_sends_the_same(puppet: Puppet, tmp_path: Path) -> None:
    path = tmp_path / "two.png"
    path.write_bytes(b"\x02png")
    async with AsyncVisionClient(puppet.target, deadline_s=5) as client:
        for photo in (path, b"\x02png"):
            result = await client.infer(inputs={"photo": photo, "numbers": [1, 2], "place": 0}, model="pets")
            assert result.scores.argmax() == 2
        assert sent(puppet)["place"] == ("INT32", [1, 1], bytes(4))
        with pytest.raises(ValueError, match="photo: expected shape"):
            await client.infer(inputs={**GIVEN, "photo": PHOTO[:, :3]}, model="pets")
        with pytest.raises(TypeError, match="expected images, or inputs by their names"):
            await client.infer(model="pets")
    assert len(puppet.seen) == 3


def test_float32_is_sent_unchanged_to_inputs_that_may_be_images(client: VisionClient, puppet: Puppet) -> None:
    client.infer(inputs={**GIVEN, "photo": PHOTO.astype(np.float32)}, model="pets")
    assert sent(puppet)["photo"][0] == "FP32"


def test_the_only_input_has_another_name_for_encoded_images(client: VisionClient, puppet: Puppet) -> None:
    puppet.declared = [("pixels", "UINT8", (-1, 4, 5, 3))]
    assert client.infer(inputs={"image": b"\x02png"}, model="digits").scores.argmax() == 2
    assert client.infer(inputs={"pixels": PHOTO}, model="digits").scores.shape == (2, 4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"photo": None}, TypeError, "photo: expected uint8, got object"),
        ({"photo": PHOTO.astype(np.float64)}, TypeError, "photo: expected uint8, got float64"),
        ({"photo": PHOTO.astype(np.int16) + 256}, ValueError, "photo: expected numbers from 0 to 255, got 259 to 259"),
        ({"photo": PHOTO[:, :3]}, ValueError, r"photo: expected shape \[n, 4, 5, 3\], got \[2, 3, 5, 3\]"),
        ({"numbers": [[1, 2], [3]]}, ValueError, "numbers: expected encoded images or an array"),
        ({"numbers": ["a", 1]}, TypeError, "numbers: expected float32, got <U"),
        ({"numbers": [1, 2]}, ValueError, r"numbers: expected 2 rows, as photo has, got shape \[1, 2\]"),
        ({"place": [0.5, 1]}, TypeError, "place: expected int32, got float64"),
        ({"place": [0, 2**40]}, ValueError, "place: expected numbers from -2147483648 to 2147483647"),
        ({"mask": 1}, ValueError, "inputs: expected photo, numbers, place, got 'photo', 'numbers', 'place', 'mask'"),
        ({"photo": PHOTO[:0]}, ValueError, r"photo: expected at least one row, got shape \[0, 4, 5, 3\]"),
    ],
)
def test_wrong_inputs_are_told_before_they_are_sent(
    client: VisionClient, puppet: Puppet, wrong: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.infer(inputs={**GIVEN, **wrong}, model="pets")
    assert len(puppet.seen) == 1  # the metadata


def test_missing_inputs_and_files_are_told(client: VisionClient, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected photo, numbers, place, got 'photo'"):
        client.infer(inputs={"photo": PHOTO}, model="pets")
    with pytest.raises(ValueError, match="got none"):
        client.infer(inputs={}, model="pets")
    with pytest.raises(FileNotFoundError):
        client.infer(inputs={**GIVEN, "photo": tmp_path / "none.png"}, model="pets")
    with pytest.raises(TypeError, match="expected images, or inputs by their names"):
        client.infer(model="pets")
    with pytest.raises(TypeError, match="expected images, or inputs by their names"):
        client.infer(PHOTO, inputs=GIVEN, model="pets")


def test_metadata_are_asked_for_once_and_again_after_a_refusal(client: VisionClient, puppet: Puppet) -> None:
    for _ in range(2):
        client.infer(inputs=GIVEN, model="pets")
    assert len(puppet.seen) == 3
    puppet.failures.append((grpc.StatusCode.INVALID_ARGUMENT, "inputs: expected others"))
    with pytest.raises(InvalidRequest):
        client.infer(inputs=GIVEN, model="pets")
    puppet.declared = [("numbers", "FP64", (-1, 2))]  # the model was loaded with another file
    puppet.failures.append((grpc.StatusCode.NOT_FOUND, "no such model"))
    with pytest.raises(ModelNotFound):
        client.infer(inputs={"numbers": [0, 1]}, model="pets")
    with pytest.raises(ValueError, match="inputs: expected numbers, got 'photo'"):
        client.infer(inputs=GIVEN, model="pets")
    assert len(puppet.seen) == 6
