"""The configuration that serves a model file, with its open questions; or the reason why the file can't be served."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from xlaserve.config import sources
from xlaserve.images.image_input import COLORS, DTYPES, OF_TEXT, of_flattened
from xlaserve.inspection.model_file import reading
from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.inspection.model_file.image_input import ImageInput, image_input
from xlaserve.inspection.model_file.reading import Line
from xlaserve.models.output_facts import lacks_images
from xlaserve.models.sources.graph_operations import DECODERS
from xlaserve.models.sources.onnx_tflite.tflite_tables import DETECTION

SUFFIXES: Final = {"zip archive": ".keras", "HDF5": ".h5", "TFLite": ".tflite"}
"""Suffixes by words in the names of formats."""
MOST_LINES: Final = 8
ONE_INPUT: Final = frozenset({sources.Source.JAX_FILE})
"""Kinds of sources that are served with one input only."""
TEACHABLE_MACHINE: Final = "teachable machine"
FAMILY_PREPROCESS: Final = {
    **{"mobilenet": "tf", "mobilenetv3": "none", "resnet": "caffe", "vgg": "caffe", "densenet": "torch"},
    **{"xception": "tf", "inception": "tf", "nasnet": "tf", "efficientnet": "none", "convnext": "none"},
    TEACHABLE_MACHINE: "tf",
    DETECTION.lower(): "tf",
    **{f"resnet{depth}v2": "tf" for depth in (50, 101, 152)},
}
"""The preprocessing of Teachable Machine and of Keras Applications, by the beginnings of networks' names; `none` is for
those that scale pixels themselves."""
RANGES: Final = "unit is 0..1, tf -1..1, none 0..255"
IMAGES_WITHOUT_CHANNELS: Final = 3
"""Axes of a batch of images without channels, or of sequences."""
UNTOLD: Final = "the file doesn't tell: as your training did"


@dataclass(frozen=True)
class Plan:
    """The configuration that serves a model file, or the reason why there is none."""

    lines: tuple[Line, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """Facts for clients, such as how their images are treated, each with its heading."""
    refusal: str = ""
    """The reason why it can't be served, and the next step; empty where it can."""


def plan(found: Description) -> Plan:
    """Returns how a model is served."""
    refusal = found.refusal or _unfit(found)
    if refusal:
        return Plan(refusal=refusal)
    image = image_input(found.inputs[0]) if found.inputs else None
    preprocessing = [*_preprocessing(found)]
    reorders = any(line.value == "caffe" for line in preprocessing)  # to BGR
    labels = _labels(found.path)
    is_tflite = found.format == "TFLite"
    outputs = (
        reading.suppressed(labels)
        if DETECTION in found.layers
        else reading.read(_served(found), image, labels, is_tflite=is_tflite)
    )
    if any(line.field == "preprocess" for line in outputs.lines):
        preprocessing = []
    lines = [
        Line("name", sources.name_at(found.path)),
        Line("source", _source(found.path)),
        *(Line(field, value) for field, value in found.settings),
        *_needed(found, image),
        *preprocessing,
        *outputs.lines,
        *(() if reorders else _colors(image, of_images=any(line.value == "image" for line in outputs.lines))),
        *_resizing(found, image),
        *_numbers(found, image),
    ]
    return Plan(tuple(lines[:MOST_LINES]), (*_facts(found, image), ("task", outputs.task)))


def _unfit(found: Description) -> str:
    """Returns why a model can't be served by what it takes, or by its file's name; empty where it can."""
    path = found.path
    if sources.kind_of(_source(path)) is None:
        return f"source: {_next_step(found)}"
    inputs, kind = found.inputs, sources.kind_of(_source(path))
    if len(inputs) > 1 and kind in ONE_INPUT:
        return (
            f"source: expected a model of one input, the image, got {_listed(inputs)}; where the model is, export one"
            " that takes the image alone"
        )
    if _takes_encoded(found) or _has_no_shape(found):
        return ""
    if any(one.dtype == "string" for one in inputs):
        return f"source: expected pixels, got {_listed(inputs)}: {OF_TEXT}"
    if any(image_input(one) is None and None in (one.shape or (None, None))[1:] for one in inputs):
        return (
            f"source: expected images [n, height, width, channels], or tensors of known sides, got {_listed(inputs)};"
            " where the model is, export it with these sides"
        )
    return ""


def _has_no_shape(found: Description) -> bool:
    """Whether a model is a frozen graph whose only input gets its shape by `input_size`."""
    is_graph = sources.kind_of(_source(found.path)) is sources.Source.GRAPH_FILE
    return is_graph and len(found.inputs) == 1 and found.inputs[0].shape is None and found.inputs[0].dtype in DTYPES


def _served(found: Description) -> tuple[Tensor, ...]:
    """Returns the outputs as they are served: those of a model for one image with an axis for images."""
    taken = [one.shape for one in found.inputs]
    return tuple(
        replace(one, shape=(1, *(one.shape or ()))) if lacks_images(one.shape, taken) else one for one in found.outputs
    )


def _takes_encoded(found: Description) -> bool:
    """Whether a model takes text that its graph decodes as images."""
    is_text = bool(found.inputs) and found.inputs[0].dtype == "string"
    return is_text and not DECODERS.isdisjoint(found.layers)


def _next_step(found: Description) -> str:
    path = found.path
    suffix = (
        ".keras"
        if "zip" in found.format
        else ".h5"
        if "HDF5" in found.format
        else ".tflite"
        if found.format == "TFLite"
        else ""
    )
    renamed = path.with_suffix(suffix)
    step = f": mv {_typed(path)} {_typed(renamed)}" if suffix else ""
    return f"expected a name that ends in one of {', '.join(sorted(sources.FILES))}, got {path.name}{step}"


def _needed(found: Description, image: ImageInput | None) -> Iterator[Line]:
    """Yields settings without which the model is not served, or not as it was trained."""
    if image is not None and None in (image.height, image.width):
        sides = [image.height or 224, image.width or 224]
        yield Line("input_size", sides, "it takes any size: height and width of your training's images")
    if _has_no_shape(found):
        yield Line("input_size", [224, 224], f"{UNTOLD}; of flattened images too")
    if found.custom:
        paths = {one: f"my_package.my_module:{one}" for one in found.custom}
        yield Line("custom_objects", paths, "it needs your classes: where they are", True)
    if found.has_code:
        yield Line("safe_mode", False, "it needs its Python code run: only for files that you trust", True)


def _preprocessing(found: Description) -> Iterator[Line]:
    if found.scaling or _takes_encoded(found) or (found.inputs and "float" not in (found.inputs[0].dtype or "float32")):
        return
    family = found.family.lower()
    usual = max((one for one in FAMILY_PREPROCESS if family.startswith(one)), key=len, default="")
    how = FAMILY_PREPROCESS.get(usual, "unit")
    if usual:
        yield Line("preprocess", how, f"usual for {found.family}; {RANGES}: as your training did", True)
    else:
        yield Line("preprocess", how, f"{RANGES}; {UNTOLD}", True)


def _colors(image: ImageInput | None, *, of_images: bool) -> Iterator[Line]:
    if image is None:
        return
    if image.channels is None:
        yield Line("color", "rgb", "it takes any number of channels: grey, rgb, bgr or rgba")
    if image.channels == 3:
        converted = "; yuv if it converted them by COLOR_BGR2YUV" if of_images else ""
        yield Line("color", "bgr", f"if your training read images with OpenCV{converted}", True)


def _resizing(found: Description, image: ImageInput | None) -> Iterator[Line]:
    """Yields the resizing that most often differs from the default."""
    if image is not None and image.channels in (None, *COLORS) and found.family.lower() != TEACHABLE_MACHINE:
        how = {"library": "opencv", "filter": "bilinear"}
        yield Line("resize", how, "if your training resized by cv2.resize; `xlaserve match` finds others", True)


def _numbers(found: Description, image: ImageInput | None) -> Iterator[Line]:
    """Yields settings for inputs of floats that may hold other numbers than levels of pixels."""
    if image is None or found.scaling or "float" not in (found.inputs[0].dtype or "float32"):
        return
    is_flat = len(found.inputs[0].shape or ()) == IMAGES_WITHOUT_CHANNELS
    if (is_flat or image.channels not in (None, *COLORS)) and sources.kind_of(_source(found.path)) not in ONE_INPUT:
        yield Line("layout", "none", "if these are no images, but sequences or features", True)
    elif image.channels == 1:
        yield Line("depth", "float", "if it was trained on other numbers than 0..255, such as heights", True)


def _facts(found: Description, image: ImageInput | None) -> Iterator[tuple[str, str]]:
    if _takes_encoded(found):
        yield "images", "encoded: the server decodes and resizes them in the graph's place, or says why it can't"
    if image is None:
        if found.inputs and not _takes_encoded(found):
            yield "inputs", f"{_listed(found.inputs)}{of_flattened(found.inputs[0].shape)}"
        return
    scaled = f"; the model scales them itself: {', '.join(found.scaling)}" if found.scaling else ""
    yield "images", f"{image.text}{scaled}"
    if _served(found) != found.outputs:
        yield "batch", "the file is for one image: its outputs have no axis for images, and get one; buckets: [1]"
    elif image.batch is not None:
        yield "batch", f"the file is for batches of {image.batch}; others are served where the network allows it"


def _labels(path: Path) -> str:
    """Returns the file with the classes' names: one beside the model, or a name for one."""
    folder = path.parent
    beside = [one for one in ("labels.txt", "class_names.txt", f"{path.stem}.labels.txt") if (folder / one).is_file()]
    return str(folder / (beside[0] if beside else f"{path.stem}.labels.txt"))


def _source(path: Path) -> str:
    return str(path) if sources.looks_like_path(str(path)) else f"./{path}"


def _listed(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{one.name}: {one.text}" for one in tensors)


def _typed(path: Path) -> str:
    return shlex.quote(str(path))
