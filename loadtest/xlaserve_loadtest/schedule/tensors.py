"""Requests for any model of the Open Inference Protocol, with tensors as the model's metadata declare them."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve_loadtest.schedule.mix import DISTINCT_REQUESTS, Kind
from xlaserve_loadtest.schedule.payload import (
    SUFFIXES,
    Layout,
    PayloadError,
    check_memory,
    reading_image,
    sampled,
    synthetic,
)
from xlaserve_proto import open_inference_pb2 as oip

ANY: Final = -1
"""A side of any length; as the first side, the batch."""
NOISE: Final = "noise"
ZEROS: Final = "zeros"

Item = NDArray[Any]
"""The array of one image or other item for one input, without the batch."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of items by input, for sides that the metadata leave open."""

DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
BYTES: Final = "BYTES"
LENGTH_BYTES: Final = 4
_MAX_NOISY_INTEGER: Final = 9
"""Largest random integer but in UINT8: integers are often indices, and small ones are valid in most models."""


class Tensor(NamedTuple):
    """An input or output as declared in the model's metadata."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """Shape with the batch; ANY where a side has any length."""

    @property
    def has_batch(self) -> bool:
        """Whether the first side is the batch, the number of images of a request."""
        return self.shape[:1] == (ANY,)


@dataclass(frozen=True)
class Input:
    """An input of the model and the source of its items."""

    tensor: Tensor
    source: str
    """NOISE, ZEROS, or the path of a file or folder."""
    shape: tuple[int, ...]
    """Shape of an item, without the batch; ANY where a side has any length."""
    seed: int

    @cached_property
    def items(self) -> Sequence[Item]:
        """Items to send in turn, at least one. Items of BYTES are arrays of `bytes` objects. Raises PayloadError."""
        return _items(self)


def choose(
    declared: Sequence[Tensor], optional: Sequence[str], sources: Mapping[str, str], shapes: Shapes, seed: int
) -> list[Input]:
    """Returns the inputs to send: every input of `declared` that is not `optional`, and the inputs in `sources`.

    A source is `noise` (the default), `zeros`, or the path of a file or folder. Raises PayloadError.
    """
    names = [tensor.name for tensor in declared]
    for name in (*sources, *shapes):
        if name not in names:
            raise PayloadError(f"--input: the model has no input {name!r}; it has {', '.join(names) or 'none'}")
    if not declared:
        raise PayloadError("the model's metadata name no input: there is nothing to send")
    wanted = [tensor for tensor in declared if tensor.name in sources or tensor.name not in optional]
    if not wanted:
        raise PayloadError(f"every input of the model is optional: name those to send, --input {names[0]}={NOISE}")
    return [
        Input(tensor, sources.get(tensor.name, NOISE), _item_shape(tensor, shapes.get(tensor.name)), seed + place)
        for place, tensor in enumerate(wanted)  # two images of a pair would else be the same
    ]


class TensorMaker:
    """Makes requests to `model` with the items of `inputs`."""

    has_stamp = False

    def __init__(self, model: str, inputs: Sequence[Input]) -> None:
        self._model = model
        self._inputs = inputs

    def variety(self, kind: Kind) -> int:
        """Returns the largest number of items of an input; 1 for a file."""
        return 1 if kind.file else max(len(one.items) for one in self._inputs)

    def item_bytes(self, kind: Kind) -> int:
        """Returns the bytes of one item of each input together. Raises PayloadError."""
        return sum(one.items[0].size * _item_bytes(one.tensor.datatype) for one in self._inputs_of(kind))

    def data(self, kind: Kind, first: int) -> bytes:
        """Returns a request with items from `first` on. Raises PayloadError for several items where an input has no
        batch."""
        if kind.size:
            raise PayloadError(f"{self._model} has inputs of its own: --size is for models of images")
        fixed = [one.tensor for one in self._inputs if not one.tensor.has_batch]
        if fixed and kind.images != 1:
            shape = "x".join(map(str, fixed[0].shape))
            raise PayloadError(f"--images-per-request: input {fixed[0].name} is {shape}, without a batch: expected 1")
        return _serialised(self._inputs_of(kind), model=self._model, first=first, count=kind.images)

    def _inputs_of(self, kind: Kind) -> Sequence[Input]:
        if kind.file is None:
            return self._inputs
        if len(self._inputs) > 1:
            names = ", ".join(one.tensor.name for one in self._inputs)
            raise PayloadError(f"{self._model} is sent {names}: {kind.file} can be only one of them")
        return [replace(self._inputs[0], source=str(Path(kind.file).absolute()))]


def parse_source(text: str) -> tuple[str, str]:
    """Parses `pixels=photos/`: an input and its source. Raises ValueError."""
    name, equals, source = text.partition("=")
    if not (name and equals and source):
        raise ValueError(f"expected NAME={NOISE}, NAME={ZEROS} or NAME=PATH, got {text!r}")
    return name, source


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parses `pixels=224x224x3`: an input and the shape of its items. Raises ValueError."""
    name, equals, sides = text.partition("=")
    parts = sides.split("x")
    if not (name and equals) or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"expected NAME=SIDExSIDE such as pixels=224x224x3, got {text!r}")
    return name, tuple(map(int, parts))


def _serialised(inputs: Sequence[Input], *, model: str, first: int, count: int) -> bytes:
    message = oip.ModelInferRequest(model_name=model)
    for one in inputs:
        chosen = [one.items[(first + offset) % len(one.items)] for offset in range(count)]
        shape = chosen[0].shape
        message.inputs.add(
            name=one.tensor.name,
            datatype=one.tensor.datatype,
            shape=(count, *shape) if one.tensor.has_batch else shape,
        )
        message.raw_input_contents.append(b"".join(_raw(item, one.tensor.datatype) for item in chosen))
    return message.SerializeToString()


def _item_bytes(datatype: str) -> int:
    """Returns the bytes of an element; of BYTES, whose elements have any length, the bytes of the length field."""
    return np.dtype(DTYPES[datatype]).itemsize if datatype in DTYPES else LENGTH_BYTES


def _raw(item: Item, datatype: str) -> bytes:
    if datatype == BYTES:
        return b"".join(struct.pack("<I", len(value)) + value for value in item.flat)
    return item.tobytes()


def _item_shape(tensor: Tensor, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if tensor.datatype not in DTYPES and tensor.datatype != BYTES:
        expected = ", ".join((*DTYPES, BYTES))
        raise PayloadError(f"input {tensor.name}: datatype {tensor.datatype} can't be sent; expected one of {expected}")
    declared = tensor.shape[1:] if tensor.has_batch else tensor.shape
    if any(side < ANY for side in declared):
        raise PayloadError(
            f"input {tensor.name}: the model declares {_words(declared)}: expected sides from 0 on, or {ANY}"
        )
    if shape is not None:
        if not _fits(shape, declared):
            raise PayloadError(f"--shape: input {tensor.name}: expected {_words(declared)}, got {_words(shape)}")
        return shape
    return declared


def _items(one: Input) -> Sequence[Item]:
    tensor, shape = one.tensor, one.shape
    if one.source not in (NOISE, ZEROS):
        return _from_files(tensor, Path(one.source), shape, one.seed)
    if ANY in shape:
        raise PayloadError(
            f"input {tensor.name} is {_words(shape)}: say how long its open sides are, --shape {tensor.name}=..."
        )
    if one.source == ZEROS:
        return [_full(tensor.datatype, shape)]
    check_memory([math.prod(shape) * _item_bytes(tensor.datatype)] * DISTINCT_REQUESTS)
    if (layout := Layout.of((ANY, *shape))) and tensor.datatype == "UINT8":
        return _images(layout, shape, one.seed)
    random = np.random.default_rng(one.seed)
    return [_noise(tensor.datatype, shape, random) for _ in range(DISTINCT_REQUESTS)]


def _images(layout: Layout, shape: tuple[int, ...], seed: int) -> list[Item]:
    sides = dict(zip(layout.axes[1:], shape, strict=True))
    made = synthetic(DISTINCT_REQUESTS, size=(sides["H"], sides["W"]), seed=seed, channels=layout.channels)
    return list(layout.arranged(np.stack([picture.pixels for picture in made])))


def _words(shape: Sequence[int]) -> str:
    return "x".join("?" if side == ANY else str(side) for side in shape) or "a scalar"


def _full(datatype: str, shape: tuple[int, ...]) -> Item:
    if datatype == BYTES:
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, DTYPES[datatype])


def _noise(datatype: str, shape: tuple[int, ...], random: np.random.Generator) -> Item:
    if datatype == BYTES:
        item = _full(datatype, shape)
        for place in np.ndindex(shape):
            item[place] = random.bytes(8).hex().encode()
        return item
    dtype = np.dtype(DTYPES[datatype])
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    top = 255 if datatype == "UINT8" else _MAX_NOISY_INTEGER
    return random.integers(0, top, shape, endpoint=True).astype(dtype)


def _from_files(tensor: Tensor, path: Path, shape: tuple[int, ...], seed: int) -> list[Item]:
    if not path.exists():
        raise PayloadError(f"--input {tensor.name}: no file or folder {path}")
    paths = sampled(sorted(own for own in path.iterdir() if own.is_file()), seed) if path.is_dir() else [path]
    if not paths:
        raise PayloadError(f"--input {tensor.name}: no file in {path}")
    items = [item for own in paths for item in _read(tensor, own, shape)]
    if len({item.shape for item in items}) > 1:
        raise PayloadError(f"--input {tensor.name}: files of several shapes: choose one with --shape {tensor.name}=...")
    return items


def _read(tensor: Tensor, path: Path, shape: tuple[int, ...]) -> list[Item]:
    """Returns the items in a file: an image is one item, a `.npy` file is one or, with an additional first side,
    several."""
    where = f"--input {tensor.name}: {path}"
    if tensor.datatype == BYTES:
        if math.prod(shape) != 1:
            raise PayloadError(f"{where}: a file is one element, and the input is {_words(shape)}")
        item = _full(BYTES, shape)
        item.flat[0] = path.read_bytes()
        return [item]
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(path, allow_pickle=False)
        elif path.suffix.lower() in SUFFIXES:
            array = _picture(path, shape, tensor.datatype)
        else:
            raise PayloadError(f"{where}: expected a file that ends in .npy, {', '.join(SUFFIXES)}")
    except (OSError, ValueError) as error:
        raise PayloadError(f"{where}: {error}") from None
    dtype = np.dtype(DTYPES[tensor.datatype])
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise PayloadError(f"{where}: expected {tensor.datatype}, got {array.dtype}")
    items = list(array) if array.ndim == len(shape) + 1 else [array]
    if not items or not _fits(items[0].shape, shape):
        raise PayloadError(f"{where}: expected {_words(shape)}, got {_words(array.shape)}")
    return [np.ascontiguousarray(item, dtype) for item in items]


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(shape) == len(declared) and all(want in (ANY, side) for side, want in zip(shape, declared, strict=True))


def _picture(path: Path, shape: tuple[int, ...], datatype: str) -> Item:
    """Returns an image as `[height, width, 3]` or `[3, height, width]`, by `shape`; floating point is from 0 to 1."""
    if len(shape) != 3 or 3 not in (shape[0], shape[-1]):
        raise PayloadError(f"{path}: an image is HEIGHTxWIDTHx3 or 3xHEIGHTxWIDTH, and the input is {_words(shape)}")
    is_first = shape[-1] != 3
    height, width = shape[1:] if is_first else shape[:2]
    with reading_image(path), Image.open(path) as opened:
        image = opened.convert("RGB")
    image = image.resize((image.width if width == ANY else width, image.height if height == ANY else height))
    pixels: Item = np.asarray(image)
    if datatype.startswith("FP"):
        pixels = pixels.astype(np.float32) / 255
    return pixels.transpose(2, 0, 1) if is_first else pixels
