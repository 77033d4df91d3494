from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xlaserve_loadtest.schedule import tensors
from xlaserve_loadtest.schedule.mix import Kind
from xlaserve_loadtest.schedule.payload import PayloadError, check_memory, make_bodies
from xlaserve_loadtest.schedule.tensors import Tensor, TensorMaker
from xlaserve_proto import open_inference_pb2 as oip

IDS = Tensor("ids", "INT64", (-1, 16))
PHOTO = Tensor("photo", "FP32", (-1, 3, 4, 6))
TEXT = Tensor("text", "BYTES", (-1, 1))
ALONE = Tensor("alone", "UINT8", (2, 2))


def sent(
    *declared: Tensor,
    sources: dict[str, str] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    optional: tuple[str, ...] = (),
    images: int = 1,
    seed: int = 0,
) -> list[oip.ModelInferRequest]:
    chosen = tensors.choose(declared, optional, sources or {}, shapes or {}, seed)
    bodies = make_bodies([Kind(images=images)] * 16, [TensorMaker("m", chosen)])
    return [oip.ModelInferRequest.FromString(body.data) for body in bodies]


@pytest.mark.parametrize("datatype", tensors.DTYPES)
def test_noise_fills_every_datatype_and_differs_between_requests(datatype: str) -> None:
    requests = sent(Tensor("x", datatype, (-1, 40)), images=3)
    raws = {request.raw_input_contents[0] for request in requests}
    assert len(raws) == len(requests)
    assert all(len(raw) == 3 * 40 * np.dtype(tensors.DTYPES[datatype]).itemsize for raw in raws)
    assert (requests[0].inputs[0].datatype, [*requests[0].inputs[0].shape]) == (datatype, [3, 40])


def test_noise_is_that_of_the_seed() -> None:
    one, again, other = (sent(IDS, PHOTO, TEXT, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_inputs_of_images_get_images_that_differ_between_the_inputs() -> None:
    pair = [Tensor(name, "UINT8", (-1, 3, 40, 60)) for name in ("before", "after")]
    before, after = sent(*pair)[0].raw_input_contents
    assert before != after
    channels = np.frombuffer(before, np.uint8).reshape(3, 40, 60).astype(int)
    assert np.abs(np.diff(channels, axis=2)).mean() < 16  # soft, where noise has 85


def test_every_input_is_sent_but_optional_ones_that_are_not_named() -> None:
    assert [tensor.name for tensor in sent(IDS, TEXT, optional=("text",))[0].inputs] == ["ids"]
    named = sent(IDS, TEXT, optional=("text",), sources={"text": "zeros"})[0]
    assert [tensor.name for tensor in named.inputs] == ["ids", "text"]
    assert named.raw_input_contents[1] == bytes(4)  # the length of an empty element
    with pytest.raises(PayloadError, match="every input of the model is optional: name those to send, --input ids="):
        sent(IDS, optional=("ids",))


def test_an_input_without_a_batch_is_sent_as_it_is_declared() -> None:
    assert [*sent(ALONE)[0].inputs[0].shape] == [2, 2]
    with pytest.raises(PayloadError, match="alone is 2x2, without a batch: expected 1"):
        sent(ALONE, images=2)


def test_open_sides_are_asked_for_and_checked() -> None:
    text = Tensor("tokens", "INT32", (-1, -1))
    with pytest.raises(PayloadError, match=r"tokens is \?: say how long its open sides are, --shape tokens="):
        sent(text)
    assert [*sent(text, shapes={"tokens": (7,)})[0].inputs[0].shape] == [1, 7]
    with pytest.raises(PayloadError, match="ids: expected 16, got 7"):
        sent(IDS, shapes={"ids": (7,)})


def test_numpy_files_are_sent_one_item_or_many(tmp_path: Path) -> None:
    one, many = np.arange(16), np.arange(48).reshape(3, 16)
    np.save(tmp_path / "one.npy", one)
    np.save(tmp_path / "many.npy", many)
    request = sent(IDS, sources={"ids": str(tmp_path / "one.npy")})[5]
    assert request.raw_input_contents[0] == one.astype("<i8").tobytes()
    firsts = {request.raw_input_contents[0] for request in sent(IDS, sources={"ids": str(tmp_path / "many.npy")})}
    assert firsts == {row.astype("<i8").tobytes() for row in many}


def test_a_folder_of_images_fills_a_tensor_in_its_own_layout(tmp_path: Path) -> None:
    for value in (0, 255):
        Image.new("RGB", (12, 8), (value, 0, 255)).save(tmp_path / f"{value}.png")
    photos = [
        np.frombuffer(request.raw_input_contents[0], "<f4") for request in sent(PHOTO, sources={"photo": str(tmp_path)})
    ]
    first, second = (photo.reshape(3, 4, 6) for photo in photos[:2])
    assert (first[0].max(), first[2].min()) == (0.0, 1.0)
    assert second[0].min() == 1.0
    pixels = sent(Tensor("pixels", "UINT8", (-1, 4, 6, 3)), sources={"pixels": str(tmp_path)})[0]
    assert pixels.raw_input_contents[0][:3] == bytes([0, 0, 255])


def test_files_are_the_elements_of_an_input_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "greeting.txt").write_bytes(b"hello")
    request = sent(TEXT, sources={"text": str(tmp_path)})[0]
    assert request.raw_input_contents[0] == b"\x05\0\0\0hello"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.npy", b"not numpy", "a.npy: "),
        ("a.png", b"not a picture", "a.png: cannot identify the image: expected JPEG, PNG or WebP, got "),
        ("a.txt", b"text", "expected a file that ends in .npy"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PayloadError, match=reason):
        sent(PHOTO, sources={"photo": str(tmp_path)})


def test_arrays_of_another_shape_or_kind_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros(17, np.int64))
    np.save(tmp_path / "real.npy", np.zeros(16))
    np.save(tmp_path / "none.npy", np.zeros((0, 16), np.int64))
    for name, reason in (
        ("wide", "expected 16, got 17"),
        ("real", "expected INT64, got float64"),
        ("none", "got 0x16"),
    ):
        with pytest.raises(PayloadError, match=reason):
            sent(IDS, sources={"ids": str(tmp_path / f"{name}.npy")})


def test_what_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(PayloadError, match="no input 'other'; it has ids"):
        sent(IDS, sources={"other": "noise"})
    with pytest.raises(PayloadError, match="no input 'other'; it has ids"):
        sent(IDS, shapes={"other": (1,)})
    with pytest.raises(PayloadError, match="no file or folder nowhere"):
        sent(IDS, sources={"ids": "nowhere"})
    with pytest.raises(PayloadError, match="datatype BF16 can't be sent; expected one of BOOL"):
        sent(Tensor("x", "BF16", (-1, 2)))
    with pytest.raises(PayloadError, match="the model's metadata name no input"):
        sent()
    with pytest.raises(PayloadError, match="the model declares -7: expected sides from 0 on, or -1"):
        sent(Tensor("x", "FP32", (-1, -7)))


def test_requests_that_are_too_large_are_refused_before_they_are_made() -> None:
    with pytest.raises(PayloadError, match=r"would have 37,252\.9 GiB: expected less than 2"):
        sent(Tensor("x", "FP32", (-1, 100_000, 100_000, 1_000)))
    with pytest.raises(PayloadError, match=r"a request would have 11\.9 GiB"):
        sent(IDS, images=100_000_000)
    with pytest.raises(PayloadError, match=r"500 different requests would take 931\.3 GiB, and "):
        check_memory([2_000_000_000] * 500)


@pytest.mark.parametrize("text", ["", "=", "pixels", "pixels=", "=noise"])
def test_a_wrong_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=noise"):
        tensors.parse_source(text)


@pytest.mark.parametrize("text", ["", "x", "x=", "=3", "x=3x", "x=0", "x=-1", "x=3,4", "x=²"])
def test_a_wrong_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=SIDExSIDE"):
        tensors.parse_shape(text)


def test_sources_and_shapes_are_read() -> None:
    assert tensors.parse_source("pixels=photos/of=cats") == ("pixels", "photos/of=cats")
    assert tensors.parse_shape("pixels=224x224x3") == ("pixels", (224, 224, 3))


def test_a_request_of_a_file_holds_its_items(tmp_path: Path) -> None:
    rows = np.arange(3 * 16, dtype=np.int64).reshape(3, 16)
    np.save(tmp_path / "rows.npy", rows)
    open_ids = Tensor("ids", "INT64", (-1, -1))
    maker = TensorMaker("m", tensors.choose([open_ids], (), {}, {}, 0))
    (body,) = make_bodies([Kind(images=4, file=str(tmp_path / "rows.npy"))], [maker])
    (raw,) = oip.ModelInferRequest.FromString(body.data).raw_input_contents
    np.testing.assert_array_equal(np.frombuffer(raw, np.int64).reshape(4, 16), rows[[0, 1, 2, 0]])
    with pytest.raises(PayloadError, match="say how long its open sides are"):
        make_bodies([Kind()], [maker])


def test_a_file_is_for_a_model_of_one_input(tmp_path: Path) -> None:
    maker = TensorMaker("m", tensors.choose([IDS, TEXT], (), {}, {}, 0))
    with pytest.raises(PayloadError, match=r"m is sent ids, text: .*one\.npy can be only one of them"):
        make_bodies([Kind(file=str(tmp_path / "one.npy"))], [maker])
