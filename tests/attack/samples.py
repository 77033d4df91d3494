"""Valid requests, each with a check of its answer; and how to make them wrong."""

from __future__ import annotations

import io
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from PIL import Image
from tests.attack.client import INFERENCE, PREDICTION, VISION

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import tensorflow_messages_pb2 as tensorflow
from xlaserve_proto import vision_pb2 as vision

SAMPLES: Final = Path(__file__).parents[2] / "scripts" / "samples"
SIDE: Final = 32
NOOP_SHAPE: Final = (224, 224, 3)
PAYLOAD_BYTES: Final = 64
"""From here on a bytes field holds pixels or an image."""
CLOSE: Final = 1e-3

Check = Callable[[bytes], str | None]
"""Returns what is wrong with an answer."""


@dataclass(frozen=True)
class Valid:
    """A request that has to be answered, and rightly."""

    method: str
    message: Message
    check: Check


@cache
def digit_files() -> list[bytes]:
    """Returns a scan of each digit."""
    files = sorted((SAMPLES / "digits").glob("*.png"))
    assert [file.name[0] for file in files] == list("0123456789")
    return [file.read_bytes() for file in files]


@cache
def digit_pixels() -> np.ndarray:
    """Returns the scans as the model sees them."""
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in digit_files()]
    return np.stack([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for image in images])


@cache
def photo() -> bytes:
    """Returns a photo of shapes."""
    return (SAMPLES / "shapes" / "circle_square_triangle.jpg").read_bytes()


def digits(rng: random.Random, count: int = 0) -> list[int]:
    """Returns some digits."""
    return rng.choices(range(10), k=count or rng.choice((1, 1, 1, 2, 3, 5, 9)))


def classes(chosen: list[int]) -> Check:
    """Checks that the top classes are those of the digits."""

    def check(data: bytes) -> str | None:
        rows = vision.ClassifyResponse.FromString(data).classifications
        found = [row.categories[0].index if row.categories else None for row in rows]
        return None if found == chosen else f"expected the digits {chosen}, got {found}"

    return check


def scores(chosen: list[int]) -> Check:
    """Checks the same of raw scores."""

    def check(data: bytes) -> str | None:
        response = oip.ModelInferResponse.FromString(data)
        (output,) = response.outputs
        if response.raw_output_contents:
            values = np.frombuffer(response.raw_output_contents[0], np.float32)
        else:
            values = np.array(output.contents.fp32_contents, np.float32)
        if list(output.shape) != [len(chosen), 10] or values.size != 10 * len(chosen):
            return f"expected scores of {len(chosen)} images, got the shape {list(output.shape)}"
        found = values.reshape(-1, 10).argmax(axis=1).tolist()
        return None if found == chosen else f"expected the digits {chosen}, got {found}"

    return check


def classify(chosen: list[int], files: list[bytes] | None = None, **fields: Any) -> Valid:
    """Asks for digits by their scans, or by other `files` that show them."""
    encoded = files or [digit_files()[digit] for digit in chosen]
    message = vision.ClassifyRequest(**{"model": "digits", "images": encoded, "top_k": 1, **fields})
    return Valid(f"{VISION}Classify", message, classes(chosen))


def infer(rng: random.Random, chosen: list[int]) -> Valid:
    """Asks for digits by the Open Inference Protocol, in any of its ways."""
    message = oip.ModelInferRequest(model_name="digits", id=str(rng.random()))
    if rng.random() < 0.5:
        message.parameters["mode"].string_param = rng.choice(("xla", "graph"))
    kind = rng.choice(("raw", "raw", "listed", "image", "raw image"))
    if "image" in kind:
        tensor = message.inputs.add(name="image", datatype="BYTES", shape=[len(chosen)])
        files = [digit_files()[digit] for digit in chosen]
        if kind == "image":
            tensor.contents.bytes_contents.extend(files)
        else:
            message.raw_input_contents.append(b"".join(struct.pack("<I", len(file)) + file for file in files))
    else:
        datatype, code, listed = rng.choice((("UINT8", "u1", "uint"), ("INT32", "<i4", "int"), ("FP32", "<f4", "fp32")))
        tensor = message.inputs.add(name="pixels", datatype=datatype, shape=[len(chosen), SIDE, SIDE, 3])
        pixels = digit_pixels()[chosen].astype(code)
        if kind == "raw":
            message.raw_input_contents.append(pixels.tobytes())
        else:
            getattr(tensor.contents, f"{listed}_contents").extend(pixels.ravel().tolist())
    return Valid(f"{INFERENCE}ModelInfer", message, scores(chosen))


def predict(rng: random.Random, chosen: list[int]) -> Valid:
    """Asks for digits as clients of TensorFlow Serving do."""
    message = tensorflow.PredictRequest()
    message.model_spec.name = "digits"
    kind = rng.choice(("content", "listed", "image"))
    tensor = message.inputs["image" if kind == "image" else "pixels"]
    for size in [len(chosen)] if kind == "image" else [len(chosen), SIDE, SIDE, 3]:
        tensor.tensor_shape.dim.add(size=size)
    pixels = digit_pixels()[chosen]
    if kind == "image":
        tensor.dtype = tensorflow.DT_STRING
        tensor.string_val.extend(digit_files()[digit] for digit in chosen)
    elif kind == "listed":
        tensor.dtype = tensorflow.DT_UINT8
        tensor.int_val.extend(pixels.ravel().tolist())
    else:
        tensor.dtype = tensorflow.DT_FLOAT
        tensor.tensor_content = pixels.astype("<f4").tobytes()

    def check(data: bytes) -> str | None:
        values = np.array(tensorflow.PredictResponse.FromString(data).outputs["scores"].float_val)
        found = values.reshape(-1, 10).argmax(axis=1).tolist()
        return None if found == chosen else f"expected the digits {chosen}, got {found}"

    return Valid(f"{PREDICTION}Predict", message, check)


def classify_examples(chosen: list[int]) -> Valid:
    """Asks for digits by TensorFlow's examples."""
    message = tensorflow.ClassificationRequest()
    message.model_spec.name = "digits"
    for digit in chosen:
        feature = message.input.example_list.examples.add().features.feature.add(key="image")
        feature.value.bytes_list.value.append(digit_files()[digit])

    def check(data: bytes) -> str | None:
        rows = tensorflow.ClassificationResponse.FromString(data).result.classifications
        found = [int(row.classes[0].label) for row in rows]
        return None if found == chosen else f"expected the digits {chosen}, got {found}"

    return Valid(f"{PREDICTION}Classify", message, check)


def noop(levels: list[int]) -> Valid:
    """Asks `builtin:noop` for images that are all of one level; it answers with that."""
    message = oip.ModelInferRequest(model_name="noop")
    message.inputs.add(name="pixels", datatype="UINT8", shape=(len(levels), *NOOP_SHAPE))
    message.raw_input_contents.append(b"".join(bytes([level]) * math.prod(NOOP_SHAPE) for level in levels))

    def check(data: bytes) -> str | None:
        raw = oip.ModelInferResponse.FromString(data).raw_output_contents
        rows = np.frombuffer(raw[0], np.float32).reshape(len(levels), -1) if raw else np.zeros((0, 0))
        is_right = len(rows) and (rows == np.array(levels, np.float32)[:, None]).all()
        return None if is_right else f"expected the levels {levels}, got {rows[:, :1].ravel().tolist()}"

    return Valid(f"{INFERENCE}ModelInfer", message, check)


def shapes(kind: str) -> Valid:
    """Asks for what is in the photo, by `Detect` or `Segment`."""
    if kind == "Detect":
        request: Message = vision.DetectRequest(model="shapes-detector", images=[photo()], min_score=0.5)
    else:
        request = vision.SegmentRequest(model="shapes-segmenter", images=[photo()], pixel_counts=True)

    def check(data: bytes) -> str | None:
        if kind == "Detect":
            (found,) = vision.DetectResponse.FromString(data).results
            labels = sorted(item.label for item in found.detections)
        else:
            (map_,) = vision.SegmentResponse.FromString(data).maps
            labels = sorted(item.label for item in map_.counts if item.label != "background")
        return None if labels == ["circle", "square", "triangle"] else f"expected three shapes, got {labels}"

    return Valid(f"{VISION}{kind}", request, check)


def anything(rng: random.Random, *, has_shapes: bool = True) -> Valid:
    """Returns a valid request of any kind."""
    kinds: list[tuple[int, Callable[[], Valid]]] = [
        (20, lambda: infer(rng, digits(rng))),
        (10, lambda: predict(rng, digits(rng))),
        (5, lambda: classify_examples(digits(rng))),
        (25, lambda: classify(digits(rng))),
        (15, lambda: _classify_pixels(digits(rng))),
        (15, lambda: noop([rng.randrange(256) for _ in range(rng.choice((1, 1, 2)))])),
        (10 * has_shapes, lambda: shapes(rng.choice(("Detect", "Segment")))),
    ]
    (make,) = rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])
    return make()


def _classify_pixels(chosen: list[int]) -> Valid:
    pixels = vision.Pixels(images=len(chosen), height=SIDE, width=SIDE, rgb=digit_pixels()[chosen].tobytes())
    return classify(chosen, images=[], pixels=pixels)


# Wrong ones.

_INTEGERS: Final = (0, 1, -1, 2, 7, 100, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS: Final = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan)
_STRINGS: Final = (
    *("", " ", "digits", "noop", "xla", "graph", "eager", "pixels", "image", "scores", "UINT8", "FP32", "BYTES", "1"),
    *("../../etc/passwd", "\0", "a\nb\x1b[31m", "ü" * 50, "x" * 5000, "%s%n", "{}", "NaN", "-1"),
)
_KEYS: Final = ("mode", "timeout", "priority", "classification", "binary_data_size", "binary_data", "", "x")
_BITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64),
    FieldDescriptor.CPPTYPE_ENUM: (0, 2**31),
}


def mutate(message: Message, rng: random.Random) -> None:
    """Changes one field of a message, however deep; pixels mostly keep their size."""
    # Their type is a union of two implementations.
    field: Any = rng.choice(list(message.DESCRIPTOR.fields))
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        mutate(value[rng.choice(_KEYS)], rng)
    elif isinstance(value, Message):
        value.SetInParent()
        mutate(value, rng)
    elif field.is_repeated:
        _mutate_repeated(field, value, rng)
    else:
        setattr(message, field.name, _scalar(field, value, rng))


def _mutate_repeated(field: FieldDescriptor, values: Any, rng: random.Random) -> None:
    action = rng.random()
    if field.message_type is not None:
        if not values or action < 0.2:
            values.add()
        elif action < 0.3:
            del values[rng.randrange(len(values))]
        elif action < 0.4:
            values.add().CopyFrom(rng.choice(values))
        mutate(rng.choice(values), rng) if values else None
    elif not values or action < 0.1:
        values.append(_scalar(field, b"" if field.type == field.TYPE_BYTES else 0, rng))
    elif action < 0.2:
        del values[rng.randrange(len(values))]
    elif action < 0.3:
        values.append(rng.choice(values))
    else:
        index = rng.randrange(len(values))
        values[index] = _scalar(field, values[index], rng)


def _scalar(field: FieldDescriptor, value: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        low, high = _BITS[kind]
        near = int(value) + rng.choice((-1, 1))
        return rng.choice([each for each in (near, near, *_INTEGERS) if low <= each < high])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_STRINGS)
    if len(value) >= PAYLOAD_BYTES and rng.random() < 0.7:
        return scramble(value, rng)
    return damage(value, rng)


def scramble(data: bytes, rng: random.Random) -> bytes:
    """Changes some bytes and no length."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cuts, inserts, repeats or changes bytes, most often near the beginning, where lengths and tags are."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 5))):
        position = rng.randrange(min(len(changed), rng.choice((8, 100, 10_000_000)))) if changed else 0
        match rng.randrange(5):
            case 0:
                del changed[position:]
            case 1:
                changed[position:position] = rng.randbytes(rng.choice((1, 2, 10)))
            case 2:
                changed[position:position] = changed[position : position + rng.choice((1, 20, 1000))]
            case 3:
                changed[position:position] = rng.choice((b"\x0b\x0c", b"\xff" * 11, b"\x0b" * 200, b"\x92\x03\0"))
            case _:
                if changed:
                    changed[position] ^= 1 << rng.randrange(8)
    return bytes(changed)
