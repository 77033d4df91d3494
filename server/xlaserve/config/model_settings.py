"""One model's settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, field_serializer, field_validator, model_validator

from xlaserve.config import sources
from xlaserve.config.base import Frozen, OrPath, Pairs

AUTO: Final = "auto"
MAX_GREY16: Final = 2**16 - 1


class ModeTraits(NamedTuple):
    """What the server does with a mode's programs."""

    uses_compiler: bool = False
    """A compiler makes them or parts of them: those that compute something other than their model are refused."""
    is_jit: bool = False
    """XLA compiles each as one program: several at a time, with lowerings, and, where a compile cache is filled, in
    `model.networks.cached`."""
    is_kept: bool = False
    """The compile cache keeps what they are made of, so that a later start need not build the model."""
    choice: tuple[Mode, ...] = ()
    """The modes of which it runs each bucket in the fastest, in the first unless another is clearly faster; it then has
    no programs of its own."""
    is_checked: bool = True
    """Whether `xlaserve check` runs it without being asked to."""


class Mode(StrEnum):
    """How a model is run. What the server knows of a mode is its row in `TRAITS`, and mypy asks for its programs in
    `runtimes.tf.executable`; CONTRIBUTING.md says what else names it."""

    EAGER = "eager"
    """Operation by operation, from Python."""
    GRAPH = "graph"
    """As a frozen graph, without XLA."""
    XLA = "xla"
    """As a `tf.function` with `jit_compile=True`."""
    AUTOCLUSTER = "autocluster"
    """As a frozen graph of which TensorFlow gives XLA the parts, the clusters, that XLA can compile."""
    OPENVINO = "openvino"
    """The frozen graph, compiled by OpenVINO for a CPU."""
    AUTO = "auto"
    """Each bucket in the mode that warm-up measured to be the fastest."""

    @property
    def traits(self) -> ModeTraits:
        """Its row of the table."""
        return TRAITS[self]


TRAITS: Final = {
    Mode.EAGER: ModeTraits(),
    Mode.GRAPH: ModeTraits(is_kept=True),
    Mode.AUTOCLUSTER: ModeTraits(uses_compiler=True, is_checked=False),
    Mode.XLA: ModeTraits(uses_compiler=True, is_jit=True, is_kept=True),
    Mode.OPENVINO: ModeTraits(uses_compiler=True, is_kept=True, is_checked=False),
    Mode.AUTO: ModeTraits(choice=(Mode.XLA, Mode.GRAPH, Mode.OPENVINO)),
}


class Fit(StrEnum):
    """How an encoded image comes to have the model's size."""

    RESIZE = "resize"
    """Stretched to it, regardless of its aspect ratio."""
    LETTERBOX = "letterbox"
    """Enlarged or shrunk as a whole until it fills the height or the width, centred, on grey (114)."""
    PAD = "pad"
    """At the top left, on black; shrunk as a whole where it is larger, never enlarged."""
    REJECT = "reject"
    """Not at all: another size is refused."""


class Decoding(StrEnum):
    """How JPEG images are decoded."""

    EXACT = "exact"
    """Every pixel."""
    FAST = "fast"
    """To a half, a quarter or an eighth of the sides by the decoder itself, where more than enough pixels remain."""


class Grey16(StrEnum):
    """How grey images of 16 bits become levels from 0 to 255."""

    HIGH_BYTE = "high_byte"
    """By their upper 8 bits."""
    LARGEST = "largest"
    """In proportion to the largest value of each image."""


Window = tuple[int, int]
"""The values of 16 bits that become black and white; those between are scaled, those beyond clipped."""


class PixelRange(StrEnum):
    """What black and white are in FP16 and FP32 pixels."""

    LEVELS = "0..255"
    """As in UINT8."""
    UNIT = "0..1"
    """As PyTorch's and many others' transforms give them."""


class Precision(StrEnum):
    """What a model computes in; its outputs are float32 always."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Half the bits, with float32's range: faster where the device multiplies it (AVX512-BF16, AMX, newer GPUs)."""
    FLOAT16 = "float16"
    """Half the bits, with more digits and a small range: for GPUs. Large activations overflow."""
    INT8 = "int8"
    """A quarter of the bits, in ranges that `xlaserve calibrate` found: for the mode `openvino` alone."""


class Lowering(StrEnum):
    """Another way to compute some operations, for XLA on a CPU; docs/lowering.md says what each brings."""

    FLOAT32 = "float32"
    """Models that compute in less, in float32: XLA on a CPU converts to it and back at each operation otherwise."""
    DEPTHWISE = "depthwise"
    """Depthwise and separable convolutions as sums of shifted products."""
    GROUPED = "grouped"
    """Convolutions with groups as sums or as fewer convolutions."""
    STEM = "stem"
    """Convolutions of a few channels, such as a network's first, as sums of shifted outer products."""
    POINTWISE = "pointwise"
    """1 x 1 convolutions with strides as matrix products of the pixels that they read."""
    SMALL = "small"
    """Convolutions of images smaller than the kernel, without what of it meets nothing but padding."""
    WINOGRAD = "winograd"
    """3 x 3 convolutions by Winograd's minimal filtering."""
    NORMALIZATION = "normalization"
    """Batch normalization with its scale and offset computed ahead, layer normalization of what was computed once."""
    POOLING = "pooling"
    """Maximum and average pooling over small windows as shifted images, over all pixels as sums of slices."""
    RESIZE = "resize"
    """Bilinear resizing as means of gathered rows and columns."""
    MICRO_BATCHES = "micro_batches"
    """Batches computed two images at a time, where each lane has one thread."""


BoxFormat = Literal["xyxy", "yxyx", "xywh", "center_xywh", "rel_xyxy", "rel_yxyx", "rel_xywh", "rel_center_xywh"]
"""How a box is written, as KerasCV names it."""

TaskName = Literal["classification", "detection", "segmentation", "embedding"]

OutputRole = Literal["scores", "boxes", "classes", "count", "class_map", "embedding"]
"""What an output is to its task; the names that the protocol shows."""


VERSION: Final = r"^[0-9]{1,18}$"
LABEL: Final = r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"
LATEST: Final = re.compile(r"latest [1-9][0-9]{0,3}")

Number = Annotated[str, Field(pattern=VERSION, coerce_numbers_to_str=True), AfterValidator(lambda text: str(int(text)))]
"""The number of a version."""
Label = Annotated[str, Field(pattern=LABEL)]
"""The name of a version."""


def _version_or_label(text: str) -> str:
    if re.fullmatch(VERSION, text):
        return str(int(text))
    if re.fullmatch(LABEL, text):
        return text
    raise ValueError("expected a version's number, or a label: a letter or _, and at most 63 of A-Z a-z 0-9 . _ -")


VersionOrLabel = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_version_or_label)]
"""A version by its number or its label."""
Percentage = Annotated[float, Field(gt=0, le=100)]

SHARED: Final[Mapping[str, Any]] = {"version_labels": (), "routing": ()}
"""Settings that all versions of a model share, and what they are by default."""


class Bucket(NamedTuple):
    """A padded input shape that is compiled ahead of traffic."""

    batch: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.height}x{self.width}"


class BucketSettings(NamedTuple):
    """A bucket as it is configured: without height and width it takes the model's own."""

    batch: int
    height: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        return _shown(self)


class AutoBuckets(Frozen):
    """How `buckets: auto` chooses."""

    max_batch: int = Field(16, ge=1, le=256)
    """The largest candidate. Candidates are the powers of two and the numbers half-way between them: 1, 2, 3, 4, 6, 8,
    12, 16."""
    max_buckets: int = Field(6, ge=1, le=16)
    """Most buckets that are kept, for each resolution. Fewer are where more would gain less than 1 %."""
    max_compile_s: float = Field(300.0, gt=0)
    """Once measuring candidates has taken this long, no more are begun: the best of those measured are kept. The most
    useful come first."""
    max_memory_mib: int | None = Field(None, ge=1)
    """Most of the host's memory that the programs kept for one resolution may take, the largest of them running on
    every lane. No limit by default."""
    demand: Path | None = None
    """The demand to choose for: a file that `xlaserve buckets MODEL --save FILE` wrote from a server's traffic. By
    default as many images are expected to meet each demand from 1 to twice `max_batch`."""

    @property
    def candidates(self) -> tuple[int, ...]:
        """The batch sizes to measure, in ascending order."""
        powers = [2**exponent for exponent in range(self.max_batch.bit_length())]
        between = [3 * power // 2 for power in powers[1:]]
        return tuple(sorted({size for size in (*powers, *between, self.max_batch) if size <= self.max_batch}))


class ShadowSettings(Frozen):
    """What else some of a model's requests run in, for comparing."""

    version: VersionOrLabel | None = None
    """The version to run, by its number or its label; by default the one that answered."""
    mode: Mode | None = None
    """The mode to run in; by default the request's, or the version's default where it does not offer that."""
    share: float = Field(0.01, gt=0, le=1)
    """The share of the requests, drawn at random. Those that come while the device is busy are left out."""


class ModelSettings(Frozen):
    """One model to serve."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["resnet-50"])
    """What requests call it."""
    source: Annotated[str, OrPath(sources.looks_like_path)]
    """Where it comes from: `keras.applications:<Name>`, `keras_cv:<Backbone>`, `keras_cv:<Head>-<Backbone>`,
    `keras_hub:<Class>`, the path of a `.keras` file, of a `.jax` file (what `jax.export` wrote) or of a SavedModel
    folder, or of a folder that holds one of these and no other, `kagglehub:<handle>` (one of these, fetched from
    Kaggle and kept), `builtin:digits`, `builtin:shapes-detector`, `builtin:shapes-segmenter`, or `builtin:noop`."""
    task: Literal["auto", TaskName] = "auto"
    """What its outputs mean; `auto` tells by the source, or by the names and shapes of its outputs. `embedding` makes
    Keras Applications, KerasCV's backbones and KerasHub's classifiers give their pooled features."""
    version: Number = Field("1", examples=[2])
    """What requests may call its version; a number. Models of one name are its versions, which serve at the same
    time."""
    versions: str | tuple[Number, ...] | None = None
    """Where the source is a folder of versions, `1/`, `2/` and so on, with a SavedModel or a file each: those to
    serve, as `latest 2`, `all` or a list such as `[1, 3]`; `latest 1` by default. Those that `version_labels` or
    `routing` name are served as well."""
    version_labels: Pairs[Label, Number] = Field((), examples=[{"stable": 2, "canary": 3}])
    """Names of versions, which requests may use in place of numbers: `{stable: 2, canary: 3}`. `stable` answers
    requests without a version; where there is none or it is not ready, the highest version that is ready does. For all
    versions of the model: set at one of them. Labels move without a reload."""
    routing: Pairs[VersionOrLabel, Percentage] = Field((), examples=[{"canary": 5}])
    """Percentages of the requests without a version that labels or versions answer: `{canary: 5}`. Requests with the
    same id go to the same version. For all versions of the model, as `version_labels`."""
    weights: Annotated[str | None, OrPath(sources.is_weights_path)] = None
    """For `keras.applications`: `imagenet` (the default: Keras's own download and cache), `random`, or the path of a
    weights file. For `keras_cv`, whose published weights lie on a hub: `random` or the path of a file that
    `save_weights` wrote. For `keras_hub`: the same, or a preset, which brings its own architecture and preprocessing:
    a name such as `resnet_50_imagenet`, a handle such as `kaggle://...` or `hf://...`, both of which KerasHub downloads
    and keeps, or the path of a folder that `save_to_preset` wrote, as `./folder`. For `.jax` files of functions that
    take their weights: the path of a `.npz` file of these, in JAX's order. Other sources hold their own weights."""
    classes: int | None = Field(None, ge=1)
    """How many classes `keras.applications`, `keras_cv` and `keras_hub` are built for; those of the published weights
    by default. For outputs that name classes by their numbers: how many there are, if no labels say it."""
    preprocess: Literal["auto", "none", "tf", "torch", "caffe", "unit"] = "auto"
    """What is done to RGB pixels from 0 to 255 inside the compiled program: `tf` scales to -1..1, `unit` to 0..1,
    `torch` to 0..1 and then by ImageNet's mean and deviation, `caffe` reorders to BGR and subtracts ImageNet's mean,
    `none` passes 0..255. `auto` is what Keras, KerasCV or KerasHub define for the family or the preset, and `none` for
    other sources."""
    input_size: tuple[int, int] | None = Field(None, examples=[[224, 224]])
    """Height and width, for a model that takes several; the model's own by default."""
    fit: Fit | None = None
    """How encoded images come to have the model's size: `resize` stretches them, `letterbox` keeps their aspect ratio,
    centred on grey, `pad` puts them at the top left on black and never enlarges them, `reject` refuses another size. By
    default `letterbox` for detection and segmentation, whose answers are of shapes and places, else `resize`."""
    decode: Decoding = Decoding.EXACT
    """How JPEG images are decoded. `exact` decodes every pixel. `fast` has the decoder halve the sides of large ones as
    long as they are at least twice what `fit` brings them to, which takes less time and memory; pixels then differ by a
    few levels, and warm-up measures how far the answers do. Only images with at least four times the model's height and
    width gain: for 224x224, 1280x960 does and 500x375 does not. Boxes and maps are in the original's pixels all the
    same. PNG, WebP and pictures that answers are drawn into are always decoded exactly."""
    grey16: Grey16 | Window | None = None
    """How grey PNG files of 16 bits become levels from 0 to 255. `high_byte` takes the upper 8 bits, which leaves
    levels 0 to 15 of values up to 4095, as X-ray devices and microscopes write them. `largest` makes the largest value
    of each image white. `[low, high]` is a window: values up to `low` become black, those from `high` on white. Unset,
    the upper 8 bits are taken, and the answer to such an image has a warning. PNG files of 16 bits in colour or with
    transparency always keep the upper 8."""
    pixel_range: PixelRange = PixelRange.LEVELS
    """What FP16 and FP32 pixels of requests range over: `0..255` or `0..1`. A request says otherwise with the parameter
    `pixel_range`. Other types and encoded images are from 0 to 255 always."""
    metadata_input: Literal["pixels", "image"] = "pixels"
    """The input that metadata and configuration show to clients of KServe and Triton, many of which fill every input
    that they find there. Requests may send the other one all the same."""
    input_name: str = Field("", max_length=128)
    """What clients of the Open Inference Protocol and of TensorFlow Serving call the input, for those that were written
    for another server: metadata show it, and requests may use it in place of `pixels` or, with encoded images, of
    `image`."""
    output_name: str = Field("", max_length=128)
    """What the same clients call the output of a model that has only one, in place of `scores`, `class_map` or
    `embedding`."""
    strict_parameters: bool = False
    """Refuse requests with parameters that this server does not know, for finding misspelled ones. Otherwise they are
    ignored, as clients send those of other servers."""
    labels: Path | None = None
    """A text file with the name of one class a line."""
    max_detections: int = Field(100, ge=1, le=1000)
    """For detection: the most objects of an image."""
    score_threshold: float = Field(0.2, ge=0, lt=1)
    """For detection: only objects with a score above this are answered."""
    iou_threshold: float = Field(0.5, gt=0, le=1)
    """For detection: of two boxes whose intersection over union is above this, the one with the lower score goes."""
    bounding_box_format: BoxFormat = "xyxy"
    """For detectors from files and SavedModels: what their boxes are. `rel_` is relative to the image's size, the
    others are in pixels."""
    output_names: Pairs[OutputRole, str] = Field((), examples=[{"scores": "logits"}])
    """For files and SavedModels with several outputs: the model's own name for `scores`, `class_map`, `embedding`, or a
    detector's `boxes`, `scores`, `classes` and `count`."""
    signature: str | None = None
    """For SavedModels: the signature to run; `serving_default` or the only one by default."""
    custom_objects: Pairs[str, str] = Field((), examples=[{"Patches": "my_package.layers:Patches"}])
    """For `.keras` files: where the classes and functions that Keras doesn't know are, as
    `{Name: package.module:Name}`. Importing a module runs it."""
    safe_mode: bool = True
    """For `.keras` files: whether to refuse those that hold Python code. `false` runs it: only for files that you
    trust."""
    modes: tuple[Mode, ...] = Field((Mode.XLA,), min_length=1, examples=[["xla", "graph"]])
    """The modes that it offers; each is compiled and warmed for every bucket. `auto` also has `xla`, `graph` and,
    where it is installed, `openvino` compiled, and runs each bucket in the fastest."""
    precision: Precision = Precision.FLOAT32
    """What a Keras model computes in: `float32`, `bfloat16` or `float16`. Weights, preprocessing and outputs stay
    float32. Warm-up measures how far its answers then are from those in float32."""
    openvino_precision: Precision | None = None
    """What the mode `openvino` computes in, for models from any source; `precision` by default. Warm-up measures how
    far its answers then are from those in float32. `int8` needs a `calibration`."""
    calibration: Path | None = None
    """For `openvino_precision: int8`: the folder that `xlaserve calibrate` wrote for this very model."""
    verification: Literal["refuse", "warn", "off"] = "refuse"
    """Warm-up compares every program's answers to a few images with those that TensorFlow gives operation by operation.
    A program that is off by more than a thousandth of the largest number gets a warning. With `refuse`, a model fails
    if XLA or OpenVINO made one that is off by more than a hundredth, which rounding in float32 does not explain; `warn`
    serves it, `off` compares nothing. Narrower precisions, and the modes `graph` and `eager`, are never refused."""
    batch_dependence: Literal["single", "refuse", "allow"] = "single"
    """What becomes of a model whose answer to an image depends on the other images of its batch, as one does that takes
    a mean over the batch: `single` serves it in batches of one, `refuse` fails it, `allow` serves it as any other."""
    disable_lowerings: tuple[Lowering, ...] = Field((), examples=[["winograd"]])
    """On a CPU, XLA runs some operations of models in another form, which is faster and gives the same result up to
    rounding: `float32` (of models that compute in less), `depthwise`, `grouped`, `stem`, `pointwise`, `small`,
    `winograd`, `normalization`, `pooling`, `resize` and `micro_batches`. Those named here are left as they are."""
    default_mode: Mode | None = None
    """The mode of a request that names none; the first of `modes` by default."""
    buckets: tuple[BucketSettings, ...] = Field(
        (*map(BucketSettings, (1, 2, 4, 8, 16)),), examples=[[1, 4, [1, 224, 224]]]
    )
    """The input shapes to compile: batch sizes such as `8`, or `[batch, height, width]`. Requests are padded to the
    cheapest of them, or split. `auto` measures candidates at warm-up, in the default mode, and keeps the set with the
    least expected cost."""
    auto_buckets: AutoBuckets = Field(AutoBuckets(), examples=[{"max_batch": 16}])
    """How `buckets: auto` chooses: `max_batch` (16), `max_buckets` (6), `max_compile_s` (300), `max_memory_mib` and
    `demand`."""
    resolutions: tuple[tuple[int, int], ...] = Field((), examples=[[[224, 224]]])
    """Heights and widths that plain batch sizes and `auto` are compiled for, where the model takes several; instead of
    `input_size`."""
    unmatched: Literal["reject", "background"] = "reject"
    """What becomes of pixels of a resolution without buckets: `reject` refuses them. `background`, where the network
    takes several sizes, runs them in graph mode while their buckets compile beside the traffic, and then in those."""
    max_background_resolutions: int = Field(4, ge=1, le=256)
    """Most resolutions that compile so, as long as the model is loaded, in each engine. Others are refused."""
    max_queue_delay_ms: float = Field(0.0, ge=0, le=10_000)
    """How long an incomplete batch may wait for more images while a lane is free. 0: an idle device never waits. Raise
    it only where throughput at low load matters more than latency."""
    shadow: ShadowSettings | None = Field(None, examples=[{"version": "canary", "share": 0.01}])
    """Runs a share of the requests in another version or mode as well, once they are answered and while the device is
    idle, and compares answers and latency: `version`, `mode` and `share` (0.01). `xlaserve compare-versions` shows what
    was found."""
    max_queue_images: int | None = Field(None, ge=1)
    """Overrides the server's `max_queue_images`; no less than its largest bucket."""

    @field_validator("buckets", mode="before")
    @classmethod
    def _allow_auto_and_plain_batch_sizes(cls, value: Any) -> Any:
        if value == AUTO:
            return ()
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"expected {AUTO}, or a list of batch sizes and of [batch, height, width]")
        return tuple((item,) if isinstance(item, int) else item for item in value)

    @field_serializer("buckets")
    def _show_buckets(self, value: tuple[BucketSettings, ...]) -> object:
        return value or AUTO

    @field_validator("buckets")
    @classmethod
    def _check_buckets(cls, value: tuple[BucketSettings, ...]) -> tuple[BucketSettings, ...]:
        for bucket in value:
            if (bucket.height is None) != (bucket.width is None):
                raise ValueError("expected each bucket to be a batch size or [batch, height, width]")
            if any(side is not None and not 1 <= side <= 65_536 for side in bucket):
                raise ValueError("expected every number of a bucket to be from 1 to 65536")
        return value

    @field_validator("grey16", mode="before")
    @classmethod
    def _check_grey16(cls, value: Any) -> Any:
        is_window = isinstance(value, (list, tuple)) and len(value) == 2 and all(type(one) is int for one in value)
        if value is None or value in [*Grey16] or (is_window and 0 <= value[0] < value[1] <= MAX_GREY16):
            return value
        raise ValueError(f"expected {' or '.join(Grey16)}, or a window [low, high] from 0 to {MAX_GREY16}")

    @field_validator("versions", mode="before")
    @classmethod
    def _check_versions(cls, value: Any) -> Any:
        is_policy = isinstance(value, str) and (value == "all" or LATEST.fullmatch(value))
        if value is not None and not is_policy and not (isinstance(value, (list, tuple)) and value):
            raise ValueError("expected latest 2 or another number, all, or a list of versions")
        return value

    @field_validator("routing")
    @classmethod
    def _check_routing(cls, value: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        if sum(share for _, share in value) > 100:
            raise ValueError("expected percentages of 100 together at most")
        return value

    @field_validator("input_size")
    @classmethod
    def _check_input_size(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not all(1 <= side <= 65_536 for side in value):
            raise ValueError("expected height and width to be from 1 to 65536")
        return value

    @field_validator("resolutions")
    @classmethod
    def _check_resolutions(cls, value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        if not all(1 <= side <= 65_536 for size in value for side in size):
            raise ValueError("expected heights and widths to be from 1 to 65536")
        return value

    @field_validator("modes", "buckets", "resolutions", "disable_lowerings")
    @classmethod
    def _check_repeated(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if repeated := [_shown(item) for item, number in Counter(value).items() if number > 1]:
            raise ValueError(f"expected each once, {', '.join(repeated)} is repeated")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.default_mode is not None and self.default_mode not in self.modes:
            raise ValueError(f"default_mode: expected one of modes ({', '.join(self.modes)}), got {self.default_mode}")
        if self.resolutions and self.input_size:
            raise ValueError("input_size and resolutions are both set; expected one of them")
        self._check_int8()
        if self.max_queue_images is not None:
            self.check_queue(self.max_queue_images)
        if self.shadow is not None:
            self._check_shadow(self.shadow)
        return self

    def _check_int8(self) -> None:
        is_int8 = self.openvino_precision is Precision.INT8
        if self.precision is Precision.INT8:
            raise ValueError("precision: expected float32, bfloat16 or float16; int8 is for openvino_precision alone")
        if is_int8 and self.calibration is None:
            raise ValueError(
                "openvino_precision int8 needs a calibration: the folder that xlaserve calibrate wrote for the model"
            )
        if self.calibration is not None and not is_int8:
            raise ValueError(f"calibration: expected openvino_precision: int8 with it, got {self.openvino_precision}")
        if is_int8 and self.precision is not Precision.FLOAT32:
            raise ValueError(
                f"openvino_precision int8 is made of float32: expected that precision, got {self.precision}"
            )

    def _check_shadow(self, shadow: ShadowSettings) -> None:
        if shadow.version not in (None, self.version):
            return  # whose modes are known once it is loaded
        if shadow.mode is None:
            raise ValueError("shadow: expected another version, or a mode")
        if shadow.mode not in self.modes:
            raise ValueError(f"shadow.mode: expected one of modes ({', '.join(self.modes)}), got {shadow.mode}")

    def check_queue(self, max_images: int) -> None:
        """Raises ValueError where too few images may wait to fill the largest bucket."""
        if "buckets" in self.model_fields_set and max_images < self.largest_batch:
            raise ValueError(
                f"max_queue_images: expected at least {self.largest_batch}, the largest bucket of model {self.name},"
                f" got {max_images}"
            )

    @property
    def title(self) -> str:
        """What messages call it: by its name, and by its version unless none is configured."""
        return f"{self.name} version {self.version}" if "version" in self.model_fields_set else self.name

    @property
    def alone(self) -> ModelSettings:
        """The same for another process, without what refers to other versions."""
        return self.model_copy(update={**SHARED, "shadow": None})

    @property
    def largest_batch(self) -> int:
        """The batch size of the largest bucket; with `buckets: auto` of the largest candidate."""
        return max((bucket.batch for bucket in self.buckets), default=self.auto_buckets.max_batch)

    @property
    def most_programs(self) -> int:
        """How many programs warm-up compiles; with `buckets: auto`, at most."""
        sized = sum(bucket.height is not None for bucket in self.buckets)
        plain = len(self.buckets or self.auto_buckets.candidates) - sized
        return len(self.compiled_modes) * (sized + plain * max(1, len(self.resolutions)))

    @property
    def has_auto_buckets(self) -> bool:
        """Whether `buckets` is `auto`: then the tuple of that name is empty."""
        return not self.buckets

    @property
    def compiled_modes(self) -> tuple[Mode, ...]:
        """The modes to compile: those offered, and those that `auto` chooses from."""
        choice = chain.from_iterable(mode.traits.choice for mode in self.modes)
        return tuple(mode for mode in dict.fromkeys((*self.modes, *choice)) if not mode.traits.choice)

    def needs(self, mode: Mode) -> bool:
        """Returns whether the model is to fail where a mode that is compiled for it does: `auto` does without."""
        return mode in self.modes

    def precision_in(self, mode: Mode) -> Precision:
        """Returns what the programs of a mode compute in."""
        own = self.openvino_precision if mode is Mode.OPENVINO else None
        return own or self.precision

    @property
    def effective_default_mode(self) -> Mode:
        """The mode of a request that names none."""
        return self.default_mode or self.modes[0]


def _shown(item: object) -> str:
    """Returns a mode as it is, and a bucket or a resolution by its numbers."""
    return "x".join(str(side) for side in item if side is not None) if isinstance(item, tuple) else str(item)


BUILTIN_MODELS: Final = (
    ModelSettings(
        name="digits",
        source="builtin:digits",
        modes=(Mode.XLA, Mode.GRAPH, Mode.EAGER),
        buckets=tuple(map(BucketSettings, (1, 2, 4, 8, 16, 32))),
    ),
)
