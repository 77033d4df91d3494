"""One model's settings."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from xlaserve.config import sources
from xlaserve.config.base import Frozen, OrPath, Pairs
from xlaserve.config.box_decoding_settings import BoxDecoding
from xlaserve.config.bucket_settings import AutoBuckets, BucketSettings, shown
from xlaserve.config.example_settings import ExampleSettings
from xlaserve.config.image_settings import (
    MAX_GREY16,
    Border,
    Color,
    Decoding,
    Depth,
    Fit,
    Grey16,
    Layout,
    PixelRange,
    Window,
)
from xlaserve.config.modes import Lowering, Mode, Precision
from xlaserve.config.output_settings import (
    DEFAULT_THRESHOLD,
    Activation,
    Blank,
    BoxFormat,
    ClassNames,
    KeypointFormat,
    OutputRange,
    OutputRole,
    OutputSettings,
    TaskName,
)
from xlaserve.config.preprocess_settings import NamedPreprocess, ScalingSettings
from xlaserve.config.resize_settings import ResizeSettings
from xlaserve.config.shadow_settings import ShadowSettings
from xlaserve.config.version_names import LATEST, SHARED, Label, Number, Percentage, VersionOrLabel

AUTO: Final = "auto"


class ModelSettings(Frozen):
    """One model to serve."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["resnet-50"])
    """The model's name in requests."""
    source: Annotated[str, OrPath(sources.looks_like_path)]
    """Where it comes from: `keras.applications:<Name>`, `keras_cv:<Backbone>`, `keras_cv:<Head>-<Backbone>`,
    `keras_hub:<Class>`, the path of a `.keras` or `.h5` file, of a `.pb` file (a frozen graph of TensorFlow 1), of a
    `.onnx` or `.tflite` file, of a `.jax` file (what `jax.export` wrote) or of a SavedModel folder, or of a folder that
    holds one of these and no other, `kagglehub:<handle>` (one of these, fetched from Kaggle and kept),
    `builtin:digits`, `builtin:shapes-detector`, `builtin:shapes-segmenter`, or `builtin:noop`."""
    task: Literal["auto", TaskName] = "auto"
    """The meaning of the outputs. `tensors` reads nothing: clients get the model's own outputs, by their own names, of
    any shape and type but text. `regression` is numbers, such as an age; `sequence` is a class for each step, such as
    the letters of a text; `keypoints` are places, such as joints; `image` is an image made of the image, such as one
    without its noise. `auto` tells by the source, or by the outputs' names, shapes and values, and takes `tensors`
    where these are of no task for certain; the log and the metadata say what it took, and why. `embedding` makes Keras
    Applications, KerasCV's backbones and KerasHub's classifiers give their pooled features."""
    version: Number = Field("1", examples=[2])
    """The version's number, by which requests may choose it. Models of one name are its versions, which serve at
    the same time."""
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
    preprocess: Literal["auto", NamedPreprocess] | ScalingSettings = Field(
        "auto", examples=["unit", {"divisor": 255, "mean": [0.485, 0.456, 0.406], "deviation": [0.229, 0.224, 0.225]}]
    )
    """Preprocessing of pixels from 0 to 255 inside the compiled program: `tf` scales to -1..1, `unit` to 0..1,
    `torch` RGB to 0..1 and then by ImageNet's mean and deviation, `caffe` reorders RGB to BGR and subtracts ImageNet's
    mean, `standardize` brings each image to a mean of 0 and a deviation of 1 (`tf.image.per_image_standardization`),
    `none` passes 0..255. A mapping has numbers of one's own: `(level / divisor - mean) / deviation`, such as
    `{mean: 127, deviation: 128}`. `auto` is what Keras, KerasCV or KerasHub define for the family or the preset, and
    `none` for other sources."""
    input_size: tuple[int, int] | None = Field(None, examples=[[224, 224]])
    """Height and width, for a model that takes several; the model's own by default."""
    fit: Fit | None = None
    """How encoded images come to have the model's size: `resize` stretches them, `letterbox` keeps their aspect ratio,
    centred on grey, `pad` puts them at the top left on black and never enlarges them, `crop` cuts their middle to the
    model's aspect ratio before it is resized, `center_crop` resizes them to `shorter_side` and cuts the middle of that,
    `reject` refuses another size. By default `letterbox` for detection, segmentation, keypoints and image, whose
    answers are of shapes and places, else what the training did, where the source tells it (a preset of KerasHub,
    Teachable Machine, the published weights of Keras Applications), or `resize`."""
    shorter_side: int | None = Field(None, ge=1, le=65_536, examples=[256])
    """For `fit: center_crop`: the pixels of an image's shorter side before its middle is cut out; 256 for each 224 of
    the model's own by default. No less than the model's size."""
    border: Border | None = Field(None, examples=[[114, 114, 114]])
    """For `letterbox` and `pad`: what an image does not cover, as a level from 0 to 255 or as `[red, green, blue]`; 114
    for `letterbox` and 0 for `pad` by default."""
    resize: ResizeSettings | None = Field(None, examples=[{"library": "tensorflow", "filter": "bilinear"}])
    """How encoded images are resized: `library`, `filter` and `antialias`. Write what resized the images in training:
    a model that has seen sharp pixels answers worse to smoothed ones. By default what the source tells of its training:
    TensorFlow's `bilinear` for models that Keras has saved, a preset's own for KerasHub's, else Pillow's `bilinear`.
    The log says which, and why."""
    decode: Decoding | None = None
    """How JPEG images are decoded. `exact` decodes every pixel, as Pillow does. `tensorflow` does so with the less
    accurate transform of `tf.io.decode_jpeg`, about a level apart; it is the default for models that Keras has saved,
    where the package simplejpeg is installed, and `exact` otherwise. `fast` has the decoder halve the sides of large
    ones as long as they are at least twice what `fit` brings them to, which takes less time and memory; pixels then
    differ by a few levels, and warm-up measures how far the answers do. Only images with at least four times the
    model's height and width gain: for 224x224, 1280x960 does and 500x375 does not. Boxes and maps are in the original's
    pixels all the same. PNG, WebP and pictures that answers are drawn into are always decoded exactly."""
    grey16: Grey16 | Window | None = None
    """How grey PNG files of 16 bits become levels from 0 to 255. `high_byte` takes the upper 8 bits, which leaves
    levels 0 to 15 of values up to 4095, as X-ray devices and microscopes write them. `largest` makes the largest value
    of each image white. `[low, high]` is a window: values up to `low` become black, those from `high` on white. Unset,
    the upper 8 bits are taken, and the answer to such an image has a warning. PNG files of 16 bits in colour or with
    transparency always keep the upper 8."""
    color: Color | None = None
    """The channels of the model's pixels, to which encoded images are converted: `grey` (luma, as Pillow's mode L),
    `rgb`, `bgr` and `yuv` (both as OpenCV has them) or `rgba`. By default by their number: `grey` for one channel,
    `rgb` for three, `rgba` for four; a model of another number takes only pixels. Pixels in requests are the model's
    own already and stay as they are."""
    equalize: bool = False
    """Whether the histogram of each encoded image is equalized once it has the model's size and before its border, as
    `cv2.equalizeHist` does; for models of grey images. Pixels in requests stay as they are."""
    layout: Layout | None = None
    """Where the image input of a file or SavedModel has its channels: `channels_last` or `channels_first`. By default
    first where there are 1, 3 or 4 and both other sides are longer, else last. Requests to a model with its channels
    first may send pixels in either layout. `none` is for inputs that have the shape of images and hold none, such as
    sequences `[n, 50, 32]` or feature maps: they are tensors, of the model's own type, passed as they come."""
    depth: Depth | None = None
    """The depth of the model's pixels: `8`, whole numbers from 0 to 255; `16`, from 0 to 65535; or `float`, any
    float32, such as heights or temperatures. By default `16` for models that declare uint16, else `8`. With `16` and
    `float`, numbers in requests reach the model as they are, of any type that holds them, and so does what encoded
    images hold: 0 to 65535 of grey PNG files of 16 bits, for which `grey16` is not needed then, 0 to 255 of all others.
    With `float` and TensorFlow's `resize`, pixels are not rounded. `preprocess` computes as with 8 bits: `unit` divides
    by 255."""
    pixel_range: PixelRange = PixelRange.LEVELS
    """The range of FP16 and FP32 pixels in requests, with `depth: 8`: `0..255` or `0..1`. A request says otherwise with
    the parameter `pixel_range`. Other types and encoded images are from 0 to 255 always."""
    metadata_input: Literal["pixels", "image"] = "pixels"
    """The input that metadata and configuration show to clients of KServe and Triton, many of which fill every input
    that they find there. Requests may send the other one all the same."""
    input_name: str = Field("", max_length=128)
    """The input's name for clients of the Open Inference Protocol and of TensorFlow Serving that were written for
    another server: metadata show it, and requests may use it in place of `pixels` or, with encoded images, of
    `image`."""
    output_name: str = Field("", max_length=128)
    """The output's name for the same clients, where a model has only one, in place of `scores`, `class_map`,
    `embedding` or `image`."""
    strict_parameters: bool = False
    """Refuse requests with parameters that this server does not know, for finding misspelled ones. Otherwise they are
    ignored, as clients send those of other servers."""
    labels: ClassNames | Path | None = Field(None, examples=[["cat", "dog"]])
    """The names of the classes: a list, or a text file with one a line."""
    activation: Activation | None = None
    """For files and SavedModels: the function that the program applies to scores, `softmax` or `sigmoid` to logits.
    With `none` they are what the model gives; so they are by default, with a warning if they are no probabilities."""
    threshold: float = Field(DEFAULT_THRESHOLD, gt=0, lt=1)
    """For files and SavedModels whose output is one number of each image, or of each pixel: from here on it is of the
    second of two classes."""
    values: Pairs[str, str] = Field((), examples=[{"age": "years"}])
    """For regression: the names of the numbers, in their order, and their units, which metadata show. A unit may be
    empty."""
    blank: Blank | None = None
    """For `task: sequence`: the class that stands for no class (CTC), `last` by default or `first`; `labels` leave it
    out. Steps of one class in a row are one, and blanks are dropped. With `none` there is no blank, and each step
    counts."""
    keypoint_format: KeypointFormat | None = None
    """For `task: keypoints`: what the first two numbers of each keypoint are; `xy`, in pixels of the input, by default.
    `rel_` is relative to the input's size. Heatmaps need none."""
    output_range: OutputRange | None = None
    """For `task: image`: the values of black and white in the model's output, `0..1` by default, `-1..1` or `0..255`.
    Whole numbers are from 0 to 255 always. Answers are levels from 0 to 255, rounded and clipped."""
    outputs: Pairs[str, OutputSettings] = Field(
        (), examples=[{"age": {"task": "regression"}, "sex": {"task": "classification", "labels": ["female", "male"]}}]
    )
    """For files and SavedModels with several outputs: how to read each, by the model's own name of it. Clients get all
    outputs, those that are not read as they are; a method such as Classify answers from the only one of its task."""
    max_detections: int = Field(100, ge=1, le=1000)
    """For detection: the most objects of an image."""
    score_threshold: float = Field(0.2, ge=0, lt=1)
    """For detection: only objects with a score above this are answered."""
    iou_threshold: float = Field(0.5, gt=0, le=1)
    """For detection: of two boxes whose intersection over union is above this, the one with the lower score goes."""
    bounding_box_format: BoxFormat = "xyxy"
    """For detectors from files and SavedModels: what their boxes are. `rel_` is relative to the image's size, the
    others are in pixels."""
    box_decoding: BoxDecoding | None = Field(None, examples=["yolo", {"kind": "ssd", "order": "xywh"}])
    """For detectors from files and SavedModels that give all boxes before suppression, relative to anchors or as
    distributions: how the program decodes them, in place of `bounding_box_format`."""
    output_names: Pairs[OutputRole, str] = Field((), examples=[{"scores": "logits"}])
    """For files and SavedModels with several outputs: the model's own name for `scores`, `class_map`, `embedding`,
    `values`, `keypoints`, `image`, or a detector's `boxes`, `scores`, `classes` and `count`."""
    input_tensor: str | None = Field(None, examples=["input:0"])
    """For frozen graphs (`.pb`): the name of the tensor that takes the images; the only placeholder that can by
    default. Outputs are those that nothing in the graph reads, or the tensors that `output_names` names."""
    signature: str | None = None
    """For SavedModels: the signature to run; `serving_default` or the only one by default."""
    function: str | None = Field(None, examples=["detect"])
    """For SavedModels without signatures: the function of the model to run; `__call__` or the only one of one image
    input by default."""
    architecture: Annotated[str | None, OrPath(sources.is_architecture_path)] = Field(
        None, examples=["my_package.my_module:build"]
    )
    """For `.keras` and `.h5` files: the model that takes the file's weights, where the file has none or one that can't
    be read. A function without arguments that returns a Keras model, as `package.module:function`, or the path of a
    `.json` file that `model.to_json()` wrote. Importing a module runs it."""
    custom_objects: Pairs[str, str] = Field((), examples=[{"Patches": "my_package.layers:Patches"}])
    """For `.keras` and `.h5` files: where the classes and functions that Keras doesn't know are, as
    `{Name: package.module:Name}`. The name of a Lambda layer gives it that function, in place of the code in the file.
    Importing a module runs it."""
    safe_mode: bool = True
    """For `.keras` and `.h5` files: whether to refuse those that hold Python code. `false` runs it: only for files that
    you trust."""
    modes: tuple[Mode, ...] = Field((Mode.XLA,), min_length=1, examples=[["xla", "graph"]])
    """The modes that it offers; each is compiled and warmed for every bucket. `auto` also has `xla`, `graph` and,
    where it is installed, `openvino` compiled, and runs each bucket in the fastest."""
    precision: Precision = Precision.FLOAT32
    """The type that a Keras model computes in: `float32`, `bfloat16` or `float16`. Weights, preprocessing and outputs
    stay float32. Warm-up measures how far the answers then are from those in float32."""
    openvino_precision: Precision | None = None
    """The type that the mode `openvino` computes in, for models from any source; `precision` by default. Warm-up
    measures how far the answers then are from those in float32. `int8` needs a `calibration`."""
    calibration: Path | None = None
    """For `openvino_precision: int8`: the folder that `xlaserve calibrate` wrote for this very model."""
    verification: Literal["refuse", "warn", "off"] = "refuse"
    """Warm-up compares every program's answers to a few images with those that TensorFlow gives operation by operation.
    A program that is off by more than a thousandth of the largest number gets a warning. With `refuse`, a model fails
    if XLA or OpenVINO made one that is off by more than a hundredth, which rounding in float32 does not explain; `warn`
    serves it, `off` compares nothing. Narrower precisions, and the modes `graph` and `eager`, are never refused."""
    examples: ExampleSettings | None = Field(None, examples=[{"folder": "photos"}])
    """Images with the outputs that a notebook gave. Warm-up compares them with the model's own, from the decoder to the
    task, in every mode, and a model that is further off does not become ready: `folder`, `max_difference` and
    `min_agreement` (0.95). `VisionClient.save_examples` makes the folder."""
    batch_dependence: Literal["single", "refuse", "allow"] = "single"
    """Treatment of a model whose answer to an image depends on the other images of its batch, such as one that takes a
    mean over the batch: `single` serves it in batches of one, `refuse` fails it, `allow` serves it as any other."""
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
    """Treatment of pixels of a resolution without buckets: `reject` refuses them. `background`, where the network
    takes several sizes, runs them in graph mode while their buckets compile beside the traffic, and then in those."""
    max_background_resolutions: int = Field(4, ge=1, le=256)
    """Most resolutions that compile so, as long as the model is loaded, in each engine. Others are refused."""
    max_queue_delay_ms: float = Field(0.0, ge=0, le=10_000)
    """How long an incomplete batch may wait for more images while a lane is free. 0: an idle device never waits. Raise
    it only where throughput at low load matters more than latency."""
    shadow: ShadowSettings | None = Field(None, examples=[{"version": "canary", "share": 0.01}])
    """Runs a share of the requests in another version or mode as well, once they are answered and while the device is
    idle, and compares answers and latency: `version`, `mode` and `share` (0.01). `loadtest compare-versions` shows what
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

    @field_validator("border")
    @classmethod
    def _check_border(cls, value: Border | None) -> Border | None:
        levels = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(0 <= level <= 255 for level in levels):
            raise ValueError("expected a level from 0 to 255, or [red, green, blue]")
        return value

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
        if repeated := [shown(item) for item, number in Counter(value).items() if number > 1]:
            raise ValueError(f"expected each once, {', '.join(repeated)} is repeated")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.default_mode is not None and self.default_mode not in self.modes:
            raise ValueError(f"default_mode: expected one of modes ({', '.join(self.modes)}), got {self.default_mode}")
        if self.resolutions and self.input_size:
            raise ValueError("input_size and resolutions are both set; expected one of them")
        if self.outputs and self.task not in ("auto", "tensors"):
            raise ValueError(f"outputs: expected each to have its task there, and no other, got task {self.task}")
        self._check_int8()
        if self.max_queue_images is not None:
            self.check_queue(self.max_queue_images)
        if self.shadow is not None:
            self.shadow.check(self.version, self.modes)
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

    def check_queue(self, max_images: int) -> None:
        """Raises ValueError where too few images may wait to fill the largest bucket."""
        if "buckets" in self.model_fields_set and max_images < self.largest_batch:
            raise ValueError(
                f"max_queue_images: expected at least {self.largest_batch}, the largest bucket of model {self.name},"
                f" got {max_images}"
            )

    @property
    def title(self) -> str:
        """The model's name in messages, with its version unless none is configured."""
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
